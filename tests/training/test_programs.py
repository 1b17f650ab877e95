"""A process says how many compiled programs it holds before the system ends it (e1)."""

import jax
import jax.numpy as jnp
import pytest

from marl_llm.training import programs


@pytest.fixture
def proc(tmp_path, monkeypatch):
    """A system whose counts are files of the test's own."""
    (tmp_path / "self").mkdir()
    (tmp_path / "sys/vm").mkdir(parents=True)
    (tmp_path / "sys/vm/max_map_count").write_text("100\n")
    monkeypatch.setattr(programs, "PROC", tmp_path)

    def hold(maps):
        (tmp_path / "self/maps").write_text("a line\n" * maps)

    return hold


def test_a_run_is_warned_once_at_half_of_the_limit(proc):
    said = []
    watch = programs.ProgramWatch(said.append)
    for step, maps in enumerate((10, 49, 50, 51, 90)):
        proc(maps)
        assert watch.look(step)["programs/memory_maps"] == maps
    assert len(said) == 1
    assert said[0].startswith("WARNING step 2: 50 of at most 100 memory maps")
    assert "vm.max_map_count=400" in said[0]


def test_where_the_system_does_not_say_nothing_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(programs, "PROC", tmp_path)
    said = []
    assert set(programs.ProgramWatch(said.append).look(1)) == {"programs/compiled"}
    assert said == []


def test_this_process_counts_what_it_compiles_and_can_let_it_go():
    before = programs.compiled_programs()
    f = jax.jit(lambda x: jnp.sin(x) * 41.0)
    f(jnp.ones(3))
    f(jnp.ones(3))
    once = programs.compiled_programs()
    assert once > before
    maps, most = programs.memory_maps()
    assert 0 < maps < most
    programs.free_programs()
    f(jnp.ones(3))
    assert programs.compiled_programs() > once
