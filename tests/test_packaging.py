"""What a user meets after installing: a lazy package that leaves the user's own modules alone."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

from support.checkpoints import write_hf

import paged_jax

ROOT = Path(__file__).parent.parent


def run(script, cwd):
    return subprocess.run([sys.executable, script], cwd=cwd, capture_output=True, text=True, check=False)


def test_a_users_own_models_folder_changes_nothing(tmp_path):
    write_hf(tmp_path / "checkpoint")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "__init__.py").write_text("")
    (tmp_path / "models" / "mine.py").write_text("ANSWER = 42\n")
    (tmp_path / "train.py").write_text(
        "from paged_jax import LLM, SamplingParams\n"
        "from models.mine import ANSWER\n"
        "llm = LLM('checkpoint', num_blocks=8, max_num_batched_tokens=32)\n"
        "params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)\n"
        "out = llm.generate({'prompt_token_ids': [5, 6]}, params)\n"
        "import models\n"
        "print(ANSWER, len(out[0].outputs[0].token_ids), models.__file__)\n"
    )
    done = run("train.py", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["42", "3", str(tmp_path / "models" / "__init__.py")]


def test_the_models_package_is_never_imported_under_its_common_name(tmp_path):
    write_hf(tmp_path / "checkpoint")
    (tmp_path / "train.py").write_text(
        "import sys\n"
        "from paged_jax import LLM\n"
        "LLM('checkpoint', num_blocks=8).close()\n"
        "assert 'models' not in sys.modules\n"
    )
    done = run("train.py", tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_version_is_the_installed_one():
    assert importlib.metadata.version("paged-jax") == paged_jax.__version__


def test_every_pinned_name_is_a_plain_version():
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if not line.startswith("#"):
            assert "==" in line
            assert "@" not in line
            assert "/" not in line


def test_an_unknown_attribute_is_an_attribute_error():
    assert not hasattr(paged_jax, "no_such_name")
    assert set(paged_jax.__all__) <= set(dir(paged_jax))
