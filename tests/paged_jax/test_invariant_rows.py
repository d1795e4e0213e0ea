"""With one shape for every decode and one for every prefill, a row's numbers hang on nothing but its tokens.

Exactly, not nearly: the log-probabilities of its 20 best tokens are the same bits.
"""

import jax.numpy as jnp
import pytest
from support.checkpoints import random_tensors, tiny_config, write_glassllm
from support.paged_decoder import decoder_of
from support.steps import Steps

from models.loading import load_model

CHUNK = 16
PROMPT = list(range(20, 41))  # more than a chunk, less than two
PARAMS = {"temperature": 0.8, "top_p": 0.9, "seed": 3, "logprobs": 20}


def random_model(tmp_path):
    config = tiny_config(num_hidden_layers=2)
    return decoder_of(config, random_tensors(config, seed=2))


def glass_model(tmp_path):
    write_glassllm(tmp_path)
    return load_model(tmp_path, dtype=lambda stated: jnp.dtype(jnp.float32)).decoder


@pytest.fixture(scope="module", params=[random_model, glass_model])
def steps(request, tmp_path_factory):
    decoder = request.param(tmp_path_factory.mktemp("model"))
    return Steps(
        decoder,
        num_blocks=256,
        max_num_seqs=12,
        batch_invariant=True,
        prefill_chunk=CHUNK,
        max_num_batched_tokens=64,
        logprobs_mode="processed",
    )


def prefill(steps, sequence, beside=()):
    """In chunks that begin at multiples of CHUNK, one a call."""
    while sequence.num_to_prefill:
        chunk = steps.chunk(sequence, min(CHUNK, sequence.num_to_prefill))
        steps.decode(*beside, prefill=[chunk], placed=[sequence])


def described(steps, row, others=(), moved_to=None):
    """What six steps say about the prompt in a row, the last three in another one."""
    steps.forget()
    beside = [steps.sequence(range(3 + r, 3 + r + 2 * r % 30 + 1), r, temperature=1.0) for r in others]
    for other in beside:
        prefill(steps, other)
    if beside:
        steps.decode(*beside, placed=beside)
    sequence = steps.sequence(PROMPT, row, **PARAMS)
    prefill(steps, sequence, beside)
    said = []
    for step in range(6):
        moves = step == 3 and moved_to is not None
        sequence.row = moved_to if moves else sequence.row
        at = step % (len(beside) + 1)
        batch = [*beside[:at], sequence, *beside[at:]]
        found = steps.decode(*batch, placed=[sequence] if moves or not step else [])
        said.append(found.logprobs[at])
    return said


def test_there_is_one_program_of_a_kind(steps):
    kinds = [key.kind for key in steps.runner.program_keys]
    assert kinds == ["prefill", "decode", "place", "copy"]


@pytest.mark.parametrize(
    ("row", "others", "moved_to"),
    [
        (11, (), None),
        (5, (), 0),
        (0, (1, 2, 3), None),
        (7, (0, 1, 2, 3, 4, 5, 6, 8, 9, 10, 11), None),
        (4, (0, 1, 2, 3, 5, 9, 11), 6),
    ],
)
def test_a_row_is_the_same_bits_wherever_it_stands_and_whatever_stands_beside_it(
    steps, row, others, moved_to
):
    alone = described(steps, 0)
    assert len({one.token_id for one in alone}) > 1
    assert described(steps, row, others, moved_to) == alone


def test_computed_again_a_chunk_has_the_same_bits(steps):
    """As after a preemption, or for another request: the prompt's full chunks, whatever follows them."""
    steps.forget()

    def blocks(tokens, row):
        sequence = steps.sequence(tokens, row)
        prefill(steps, sequence)
        held = sequence.table.blocks[: CHUNK // 4]
        return [pool.k[jnp.asarray(held)] for pool in steps.runner.cache]

    first = blocks(PROMPT, 0)
    for again in (blocks(PROMPT, 9), blocks([*PROMPT[:CHUNK], 7, 8], 3)):
        assert all((ours == theirs).all() for ours, theirs in zip(first, again, strict=True))
