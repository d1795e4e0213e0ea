"""implementation= reaches the decoder, and greedy ids do not depend on it."""

import pytest
from support.checkpoints import random_tensors, tiny_config, write_hf

from paged_jax import LLM, SamplingParams
from paged_jax.engine_options import EngineOptions
from paged_jax.errors import InvalidArgument


def test_an_unknown_implementation_is_refused_before_a_model_is_loaded():
    with pytest.raises(InvalidArgument, match=r"implementation.*'cuda'.*auto, triton, xla"):
        EngineOptions(implementation="cuda")
    with pytest.raises(InvalidArgument, match="implementation"):
        LLM("there is no such model", implementation="pallas")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    config = tiny_config()
    write_hf(path, config, random_tensors(config))
    return path


@pytest.mark.parametrize("implementation", ["auto", "triton"])
def test_greedy_ids_are_those_of_xla(model, implementation):
    prompts = [{"prompt_token_ids": ids} for ids in ([5, 9, 3, 7, 1, 8], [4], [6, 2] * 9)]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)

    def ids(implementation):
        with LLM(
            model,
            implementation=implementation,
            num_blocks=32,
            block_size=4,
            max_num_seqs=4,
            max_num_batched_tokens=16,
            use_tqdm=False,
        ) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    assert ids(implementation) == ids("xla")
