"""The implementations under test. A further one joins the whole suite by an entry in IMPLEMENTATIONS."""

import jax
import pytest
from support.paged_cache import Ops

import pallas_kernels as pk

STATIC = ("scale", "soft_cap", "sliding_window")
IMPLEMENTATIONS = {
    "xla": Ops(
        jax.jit(pk.write_kv),
        jax.jit(pk.copy_blocks),
        jax.jit(pk.paged_decode_attention, static_argnames=STATIC),
        jax.jit(pk.paged_prefill_attention, static_argnames=STATIC),
    ),
}


@pytest.fixture(params=IMPLEMENTATIONS)
def ops(request):
    return IMPLEMENTATIONS[request.param]
