"""The implementations under test. A further one joins the whole suite by an entry in IMPLEMENTATIONS."""

import pytest
from support.paged_cache import ops_of

IMPLEMENTATIONS = {name: ops_of(name) for name in ("xla", "triton")}


@pytest.fixture(params=IMPLEMENTATIONS)
def ops(request):
    return IMPLEMENTATIONS[request.param]
