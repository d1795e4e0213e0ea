"""The pages for learners run: their code blocks are executed in order, and what they show is compared."""

import doctest
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
PAGES = ["paging.md"]


def run_page(name, text):
    """Run all ```python blocks of a page in one namespace: how many examples failed, and of how many."""
    blocks = re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    test = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, name, name, 0)
    return doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test)


@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs_and_shows_what_it_says(page):
    result = run_page(page, (DOCS / page).read_text(encoding="utf-8"))
    assert result.attempted >= 10
    assert result.failed == 0


@pytest.mark.parametrize("page", PAGES)
def test_every_code_block_of_a_page_is_an_example(page):
    """A block without a prompt would not be run, and so not be checked."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert all(block.startswith(">>> ") for block in blocks)


def test_a_page_that_shows_something_wrong_is_found():
    page = "```python\n>>> x = 1\n```\ntext\n```python\n>>> x + 1\n3\n```\n"
    assert run_page("wrong.md", page) == (1, 2)
