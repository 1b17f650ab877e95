"""Runs programs that a model wrote: warm interpreters, namespaces, a system-call filter, limits. docs/sandbox.md has the threat model.

from marl_llm.tools.sandbox import Submission, Sandbox, run

run("print(input())", "hello").stdout
with Sandbox(workers=8) as sandbox:
    futures = [sandbox.submit(Submission(code, environment=e)) for e, code in enumerate(codes)]
"""

import atexit
import contextlib
import os
import threading
from collections.abc import Iterator

from marl_llm.tools.sandbox.cluster import Cluster, ClusterSandbox, NodeLost, Worker
from marl_llm.tools.sandbox.interface import Executor
from marl_llm.tools.sandbox.limits import Execution, Level, Limits, Program, SandboxError
from marl_llm.tools.sandbox.pool import Sandbox
from marl_llm.tools.sandbox.profiles import PROFILES, Profile
from marl_llm.tools.sandbox.queueing import FairQueue, Submission
from marl_llm.tools.sandbox.slot import features
from marl_llm.tools.sandbox.workspace import Workspace

__all__ = [
    "PROFILES", "Cluster", "ClusterSandbox", "Execution", "Executor", "FairQueue", "Level", "Limits", "NodeLost", "Profile", "Program",
    "Submission", "Sandbox", "SandboxError", "Worker", "Workspace", "default_sandbox", "features", "run", "using",
]  # fmt: skip

_default: Sandbox | None = None
_chosen: list[Executor] = []
_guard = threading.Lock()


def default_sandbox() -> Executor:
    """One sandbox for the whole process: the one that `using` chose, else one on this host, made when first asked for, with the strongest
    fence as its minimum."""
    global _default
    with _guard:
        if _chosen:
            return _chosen[-1]
        if _default is None or _default.closed or _default._pid != os.getpid():
            _default = Sandbox()
            atexit.register(_default.close)
        return _default


@contextlib.contextmanager
def using(sandbox: Executor) -> Iterator[Executor]:
    """Makes it the `default_sandbox` of the whole process, in all threads; closes it at the end."""
    with sandbox:
        _chosen.append(sandbox)
        try:
            yield sandbox
        finally:
            _chosen.remove(sandbox)


def run(code: str, stdin: str = "", timeout_s: float | int = 10.0, profile: str = "bare") -> Execution:
    """One program in the default sandbox."""
    return default_sandbox().run(Submission(code, stdin, profile, Limits(timeout_s=timeout_s)))
