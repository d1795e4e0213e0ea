"""Puts the repository and tests/ on the path: the tests import `support`, and the folders that mirror the
packages must not be found in their place."""

import sys
from pathlib import Path

TESTS = Path(__file__).parent
sys.path[:0] = [str(TESTS.parent), str(TESTS)]
