"""Tests of training compile the most: programs are let go within a file too, long before `worker_memory`'s limit."""

import pytest
import worker_memory

BETWEEN_TESTS = 9_000  # maps; the largest single test adds about 5,000


@pytest.fixture(autouse=True)
def _programs_are_bounded(request):
    yield
    if request.config.pluginmanager.get_plugin("worker_memory").peak.look(request.node.nodeid) > BETWEEN_TESTS:
        worker_memory.free_programs()
