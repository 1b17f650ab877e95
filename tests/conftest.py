"""Every test runs with jaxtyping's shapes and beartype's types checked, a persistent compilation cache, and limits on memory."""

import functools
import gc
import os
import pathlib
import sys
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="marl_llm_state_")  # what runs of these tests claim is no business of the user's
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

CACHE = pathlib.Path(os.environ.get("MARL_LLM_TEST_CACHE", pathlib.Path(tempfile.gettempdir()) / "marl_llm_test_cache"))
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(CACHE)  # of runs within tests too, here and in processes of their own

import type_checks  # noqa: E402

type_checks.install(["marl_llm", "experiments"], CACHE / "checked")

import jax  # noqa: E402
import pytest  # noqa: E402
from worker_memory import WorkerMemory  # noqa: E402

from marl_llm.training import compile_quickly  # noqa: E402

compile_quickly()  # tests compile much and compute little

gc.set_threshold(20_000, 20, 20)  # tracing makes so many objects that Python's own (700, 10, 10) looks them through all the time

jax.config.update("jax_compilation_cache_dir", str(CACHE))
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def pytest_configure(config):
    config.pluginmanager.register(WorkerMemory(), "worker_memory")
    if sys.dont_write_bytecode and not config.getoption("numprocesses", None):  # where tests run, not where pytest-xdist starts workers
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # it is meant for the folders of the source; processes of tests keep theirs here
        os.environ["PYTHONPYCACHEPREFIX"] = str(CACHE / "bytecode")


def pytest_collection_finish():
    gc.collect()
    gc.freeze()  # modules and collected tests live to the end: no later collection needs to look at them


def pytest_runtest_setup():
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # a run within a test has raised it


@pytest.fixture(scope="session", autouse=True)
def _runs_draw_no_pictures():
    """Matplotlib takes 2 s over the pictures of a run. Those that `test_runs`, `test_report` and processes of their own draw are enough."""
    from marl_llm.viewing import onefile

    @functools.wraps(onefile.write_report)
    def write_page(workdir, pictures=False):
        return onefile.write_report(workdir, pictures=False)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("marl_llm.viewing.write_report", write_page)
        yield
