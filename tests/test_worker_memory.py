"""Compiled programs are freed after each file, and a run whose processes hold too much fails."""

import types

import jax
import jax.numpy as jnp
import pytest
import worker_memory
from worker_memory import MAX_GB, MAX_MAPS, Peak, WorkerMemory, excesses, free_programs


def test_e1_programs_are_unmapped_when_they_are_freed():
    before = Peak().look()
    functions = [jax.jit(lambda x, n=n: jnp.sort(x * n + n)) for n in range(24)]
    for function in functions:
        function(jnp.zeros(7)).block_until_ready()
    held = Peak().look()
    free_programs()  # the functions still exist: only their programs go
    assert held - before > 40, "compiled programs are expected to be mapped"
    assert held - Peak().look() > 40


def test_e1_both_limits_are_checked_for_every_process():
    assert excesses({"gw0": Peak(MAX_MAPS, MAX_GB), "gw1": Peak(10, 0.1)}) == []
    assert excesses({"gw0": Peak(20_001, 1.0), "gw1": Peak(10, 3.01, "tests/a.py")}, 20_000, 3.0) == [
        "gw0 held 20,001 memory maps, limit 20,000", "gw1 held 3.01 GB in tests/a.py, limit 3 GB"
    ]


@pytest.mark.parametrize(("maps", "exit_code"), [(MAX_MAPS, pytest.ExitCode.OK), (MAX_MAPS + 1, pytest.ExitCode.TESTS_FAILED)])
def test_e1_a_run_fails_when_one_worker_held_too_much(maps, exit_code):
    worker, controller, lines = WorkerMemory(), WorkerMemory(), []
    worker.peak = Peak(maps, 1.5, "tests/a.py")
    config = types.SimpleNamespace(workeroutput={})
    worker.pytest_sessionfinish(types.SimpleNamespace(config=config, exitstatus=pytest.ExitCode.OK))
    node = types.SimpleNamespace(workeroutput=config.workeroutput, gateway=types.SimpleNamespace(id="gw1"))
    controller.pytest_testnodedown(node, None)
    session = types.SimpleNamespace(config=types.SimpleNamespace(), exitstatus=pytest.ExitCode.OK)
    controller.pytest_sessionfinish(session)
    assert session.exitstatus == exit_code
    controller.pytest_terminal_summary(types.SimpleNamespace(write_line=lambda line, **_: lines.append(line)))
    assert lines[0] == f"gw1: at most {maps:,} memory maps and 1.50 GB (tests/a.py)"
    assert len(lines) == 1 + (exit_code != pytest.ExitCode.OK)


def test_e1_a_file_is_cleared_away_when_it_leaves_much(monkeypatch):
    memory, freed = WorkerMemory(), []
    monkeypatch.setattr(worker_memory, "free_programs", lambda: freed.append(1))
    for held, count in ((worker_memory.FREE_ABOVE, 0), (worker_memory.FREE_ABOVE + 1, 1)):
        monkeypatch.setattr(Peak, "look", lambda self, file, held=held: held)
        for nextitem in (types.SimpleNamespace(path="a"), types.SimpleNamespace(path="b"), None):  # the first is of the same file
            step = memory.pytest_runtest_teardown(types.SimpleNamespace(path="a", nodeid="a::b"), nextitem)
            next(step)
            with pytest.raises(StopIteration):
                next(step)
        assert len(freed) == 2 * count
