"""The gate's reading of what the compiler writes, on short samples of it; needs no GPU compiler."""

import sys
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from gpu_gate import addresses, checks, hlo, kernel_cases, ptx, targets, thunks
from gpu_gate.compiling import Program
from roofline import DecodeShape, PrefillShape, microseconds

from pallas_kernels import tuning

META = 'metadata={op_name="jit(step)/layer_0/write_kv/scatter" deduplicated_name="input_scatter_fusion"}'
PALLAS = (
    'custom-call(%q), custom_call_target="__gpu$xla.gpu.triton", '
    'metadata={op_name="jit(step)/paged_decode_attention/paged_decode_attention/pallas_call"}'
)
CLEAN = f"""\
%fused_scatter (param_0: bf16[64,8,16,128]) -> bf16[64,8,16,128] {{
  %copy.7 = bf16[64,8,16,128]{{3,2,1,0}} copy(%param_0)
}}

ENTRY %main.7 (pool: bf16[64,8,16,128]) -> bf16[64,8,16,128] {{
  %pool = bf16[64,8,16,128]{{3,2,1,0}} parameter(0)
  %input_scatter_fusion.1 = bf16[64,8,16,128]{{3,2,1,0}} fusion(%pool), calls=%fused_scatter, {META}
  ROOT %pallas_call.1 = bf16[4,32,128]{{2,1,0}} {PALLAS}
}}
"""
TENSOR = 2 * 64 * 8 * 16 * 128


def ops(text):
    return list(hlo.scheduled_ops(text))


def with_line(line):
    """The clean program with one more instruction."""
    return CLEAN.replace("  ROOT", f"  {line}\n  ROOT")


def program(text=CLEAN, **changes):
    fields = {
        "alias": 2 * TENSOR,
        "temporaries": 0,
        "ops": ops(text),
        "thunks": Counter(kCustomKernel=2),
        "launches": [thunks.Launch("paged_decode_attention", (4, 8, 1), 128, 100)],
        "kernels": {k.name: k for k in ptx.kernels(PTX)},
        "resources": {"paged_decode_attention": ptx.Resources(100, 0)},
    }
    return Program(**fields | changes)


PTX = """\
.visible .entry input_scatter_fusion(
\tst.global.v4.b32 \t[%rd1], {%r1, %r2, %r3, %r4};
.visible .entry paged_decode_attention(
\tcp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2;
\tmma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 { %r1 };
"""


def in_place(p):
    return checks.in_place(p, tensor_bytes=TENSOR, donated_bytes=2 * TENSOR)


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("bf16[4,8]{1,0}", 64),
        ("f32[]", 4),
        ("(s32[3]{0}, pred[5]{0})", 17),
        ("s4[8]", 4),
        ("f8e4m3fn[16]", 16),
        ("token[]", 0),
    ],
)
def test_shape_bytes(shape, size):
    assert hlo.shape_bytes(shape) == size


def test_only_what_is_scheduled_counts_and_not_the_inside_of_fusions():
    assert [op.name for op in ops(CLEAN)] == ["pool", "input_scatter_fusion.1", "pallas_call.1"]


def test_a_clean_program_passes_every_check():
    p = program()
    assert in_place(p) == checks.capturable(p) == checks.no_atomics(p, "write_kv") == []
    assert checks.attention_kernel(p, low_precision=True, most_launches=1) == []
    assert checks.pallas_kernels(p) == ["paged_decode_attention"]


@pytest.mark.parametrize(
    "line",
    [
        "%copy.1 = bf16[64,8,16,128]{3,2,1,0} copy(%pool)",
        "%copy-done.1 = bf16[64,8,16,128]{3,2,1,0} copy-done(%copy-start.1)",
        "%loop_dynamic_slice_fusion = bf16[64,8,16,128]{3,2,1,0} fusion(%pool), kind=kLoop",
        "%convert.2 = (f32[64,8,16,128]{3,2,1,0}, s32[1]{0}) fusion(%pool), kind=kLoop",
    ],
)
def test_a_new_array_of_a_pools_size_is_found(line):
    assert "a layer's K or more" in in_place(program(with_line(line)))[0]


def test_a_copy_inside_a_loop_or_a_branch_is_found():
    body = "%body.1 (p: s32[]) -> s32[] {\n  %copy.9 = bf16[64,8,16,128]{3,2,1,0} copy(%x)\n}\n\n"
    for caller in (
        "%while.1 = (s32[]) while(%t), condition=%cond.1, body=%body.1",
        "%conditional.1 = s32[] conditional(%i, %a, %b), branch_computations={%other.1, %body.1}",
        "%call.1 = s32[] call(%t), to_apply=%body.1",
    ):
        assert any("copy.9" in complaint for complaint in in_place(program(body + with_line(caller))))


def test_missing_aliases_and_large_temporaries_are_found():
    assert "not aliased" in in_place(program(alias=TENSOR))[0]
    assert "temporaries" in in_place(program(temporaries=TENSOR))[0]


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("%while.1 = (s32[]) while(%t), condition=%c.1, body=%b.1", "while"),
        ("%conditional.1 = s32[] conditional(%i, %a, %b), branch_computations={%c.1, %b.1}", "conditional"),
        ("%outfeed.1 = token[] outfeed(%a, %t)", "host transfer"),
        ("%send.1 = (f32[4]{0}, u32[], token[]) send(%a, %t)", "host transfer"),
        ('%c.1 = () custom-call(%a), custom_call_target="xla_ffi_python_gpu_callback"', "host transfer"),
        ("%copy.3 = f32[4]{0:S(5)} copy(%a)", "host transfer"),
    ],
)
def test_what_a_graph_cannot_capture_is_found(line, word):
    assert word in checks.capturable(program(with_line(line)))[0]


def test_a_program_whose_launches_are_unknown_does_not_pass():
    assert checks.capturable(program(thunks=Counter()))
    assert checks.capturable(program(thunks=Counter(kHostSend=1)))


@pytest.mark.parametrize(
    "line",
    [
        "atom.global.cas.b32 %r1, [%rd1], %r2, %r3;",
        "red.global.add.f32 [%rd1], %f1;",
        "atom.relaxed.gpu.global.add.u32 %r1, [%rd1], 1;",
    ],
)
def test_atomics_in_a_write_are_found(line):
    planted = PTX.replace("\tst.global", f"\t{line}\n\tst.global")
    p = program(kernels={k.name: k for k in ptx.kernels(planted)})
    assert "atomic" in checks.no_atomics(p, "write_kv")[0]


def test_a_write_whose_kernel_cannot_be_found_does_not_pass():
    assert "not among" in checks.no_atomics(program(kernels={}), "write_kv")[0]
    assert "no kernel" in checks.no_atomics(program(), "copy_blocks")[0]


def test_a_kernel_shared_by_alike_fusions_is_found_under_either_name():
    renamed = PTX.replace("input_scatter_fusion", "input_scatter_fusion_1")
    assert checks.no_atomics(program(kernels={k.name: k for k in ptx.kernels(renamed)}), "write_kv") == []


def test_a_fusion_that_launches_an_alike_ones_kernel_must_be_seen_to_do_so():
    meta = 'metadata={op_name="jit(step)/layer_1/write_kv/scatter"}'
    second = f"%input_scatter_fusion.2 = bf16[64,8,16,128]{{3,2,1,0}} fusion(%pool), {meta}"
    text = with_line(second).replace(META, meta)
    renamed = PTX.replace("input_scatter_fusion", "input_scatter_fusion_1")
    kernels = {k.name: k for k in ptx.kernels(renamed)}
    launch = thunks.Launch("input_scatter_fusion_1", (4, 1, 1), 128, 0)
    assert checks.no_atomics(program(text, kernels=kernels, launches=[launch] * 2), "write_kv") == []
    found = checks.no_atomics(program(text, kernels=kernels, launches=[launch]), "write_kv")
    assert found == ["kernel of input_scatter_fusion.2 in write_kv is not among the compiler's PTX"]


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        ("cp.async.cg", "ld.global", "cp.async"),
        ("mma.sync", "fma.rn", "mma"),
        ("entry paged_decode_attention", "entry other", "not among"),
    ],
)
def test_an_idle_pipeline_or_tensor_core_is_found(old, new, word):
    p = program(kernels={k.name: k for k in ptx.kernels(PTX.replace(old, new))})
    assert word in checks.attention_kernel(p, low_precision=True, most_launches=1)[0]


def test_tf32_in_a_float32_kernel_is_found():
    body = PTX.replace("f32.bf16.bf16.f32", "f32.tf32.tf32.f32")
    p = program(kernels={k.name: k for k in ptx.kernels(body)})
    assert "tf32" in checks.attention_kernel(p, low_precision=False, most_launches=1)[0]


def test_a_kernel_whose_launch_is_unknown_does_not_pass():
    complaints = checks.attention_kernel(program(launches=[]), low_precision=True, most_launches=1)
    assert "no launch of paged_decode_attention" in complaints[0]
    assert checks.capturable(program(launches=[]))


def test_a_kernel_of_which_ptxas_says_nothing_does_not_pass(monkeypatch):
    monkeypatch.setattr(checks.ptx, "find_ptxas", lambda: "/bin/ptxas")
    silent = program(resources={})
    assert "ptxas says nothing" in checks.attention_kernel(silent, low_precision=True, most_launches=1)[0]


def test_spills_and_extra_launches_are_found():
    p = program(resources={"paged_decode_attention": ptx.Resources(255, 160)})
    assert "spills 160" in checks.attention_kernel(p, low_precision=True, most_launches=1)[0]
    assert "launches" in checks.attention_kernel(program(), low_precision=True, most_launches=0)[0]


@pytest.mark.parametrize(
    ("line", "counts"),
    [
        ("shl.b32 %r1, %r2, 14;", (1, 0)),
        ("mul.lo.s32 %r1, %r2, 16384;", (1, 0)),
        ("mul.wide.u32 %rd1, %r2, 16384;", (0, 1)),
        ("mad.lo.s32 %r1, %r2, 16384, %r3;", (1, 0)),
        ("mad.wide.s32 %rd1, %r2, 16384, %rd3;", (0, 1)),
        ("mul.lo.s64 %rd1, %rd2, 16384;", (0, 1)),
        ("shl.b64 %rd1, %rd2, 14;", (0, 1)),
        ("shl.b32 %r1, %r2, 4;", (0, 0)),
        ("mul.wide.u32 %rd1, %r2, 2;", (0, 0)),
    ],
)
def test_the_width_of_a_product_is_read(line, counts):
    assert addresses.products(f"  {line}\n", 16384) == counts


def test_ptxas_report():
    text = """\
ptxas info    : Compiling entry function 'paged_decode_attention' for 'sm_90a'
ptxas info    : Function properties for paged_decode_attention
    16 bytes stack frame, 24 bytes spill stores, 40 bytes spill loads
ptxas info    : Used 110 registers, used 1 barriers, 64 bytes cmem[0]
"""
    assert ptx.parse_ptxas(text) == {"paged_decode_attention": ptx.Resources(110, 64)}


def test_launch_sequence():
    text = """\
001: kCopy [source | next=2] copy.1
002: kCustomKernel [sink] paged_decode grid: [64, 8, 2] threads: [128, 1, 1]  shared_memory: 39168 bytes
"""
    assert thunks.thunk_kinds(text) == Counter(kCopy=1, kCustomKernel=1)
    assert thunks.launches(text) == [thunks.Launch("paged_decode", (64, 8, 2), 128, 39168)]


def test_the_covering_set_meets_every_pair():
    cases = list(kernel_cases.covering_set())
    columns = [
        [(c.num_heads, c.num_kv_heads) for c in cases],
        [c.head_dim for c in cases],
        [c.block_size for c in cases],
        [c.dtype for c in cases],
        [c.op for c in cases],
    ]
    for i, left in enumerate(columns):
        for right in columns[i + 1 :]:
            assert len(set(zip(left, right, strict=True))) == len(set(left)) * len(set(right))


def test_the_gate_compiles_every_entry_of_the_tuning_tables():
    used = set()
    for case in kernel_cases.every_setting():
        dtype, group = jnp.dtype(case.dtype), case.num_heads // case.num_kv_heads
        if case.op == "prefill":
            chosen = tuning.prefill_settings(dtype, case.head_dim, group=group, queries=case.queries)
        else:
            programs = case.num_seqs * case.num_kv_heads
            chosen = tuning.decode_settings(
                dtype, case.head_dim, group=group, programs=programs, context=8192
            )
        key = tuning._key(case.head_dim, group)
        used.add(
            (case.op, dtype.itemsize, key, getattr(chosen, "rows", None), chosen.tile_k, chosen.num_warps)
        )
    assert len(used) == len(tuning.decode_choices()) + len(tuning.prefill_choices())


@pytest.mark.parametrize("target", targets.TARGETS.values(), ids=targets.TARGETS)
def test_targets_state_their_facts(target):
    assert target.bandwidth > 1e12
    assert target.fact("core_count") > 100
    with pytest.raises(ValueError, match="states no"):
        target.fact("weight")


def test_without_the_gpu_compiler_the_reader_is_told_what_to_do(monkeypatch):
    def refuse(**_):
        raise RuntimeError("topology not implemented for cuda")

    monkeypatch.setattr(targets.topologies, "get_topology_desc", refuse)
    with pytest.raises(targets.NoGpuCompiler, match=f"jax-cuda13-plugin=={jax.__version__}"):
        targets.H200.device()


def test_rooflines():
    shape = DecodeShape(num_seqs=64, context=4096, num_heads=32, num_kv_heads=8, head_dim=128)
    assert shape.kv_bytes == 64 * 4096 * 8 * 128 * 2 * 2
    assert shape.num_bytes - shape.kv_bytes == 2 * 64 * 32 * 128 * 2
    assert microseconds(4.8e12, 4.8e12) == 1e6
    one = PrefillShape(num_seqs=1, context=2, num_heads=1, num_kv_heads=1, head_dim=1)
    assert one.flops == 4 * 3
    assert one.num_bytes == 4 * 2 * 2
