"""Puts the repository and tests/ on the path: the tests import `support`, and the folders that mirror the
packages must not be found in their place. Lists by name what a machine without a GPU leaves out."""

import sys
from pathlib import Path

TESTS = Path(__file__).parent
sys.path[:0] = [str(TESTS.parent), str(TESTS)]

_left_out_for_want_of_a_gpu = []


def pytest_deselected(items):
    _left_out_for_want_of_a_gpu.extend(item.nodeid for item in items if item.get_closest_marker("gpu"))


def pytest_terminal_summary(terminalreporter):
    for name in _left_out_for_want_of_a_gpu:
        terminalreporter.write_line(f"needs a GPU, not run: {name}")
