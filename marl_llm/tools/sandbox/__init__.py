"""Runs programs that a model wrote: warm interpreters, namespaces, a system-call filter, limits. docs/sandbox.md has the threat model.

from marl_llm.tools.sandbox import Submission, Sandbox, run

run("print(input())", "hello").stdout
with Sandbox(workers=8) as sandbox:
    futures = [sandbox.submit(Submission(code, environment=e)) for e, code in enumerate(codes)]
"""

import atexit
import os
import threading

from marl_llm.tools.sandbox.limits import Execution, Level, Limits, Program, SandboxError
from marl_llm.tools.sandbox.pool import Sandbox
from marl_llm.tools.sandbox.profiles import PROFILES, Profile
from marl_llm.tools.sandbox.queueing import FairQueue, Submission
from marl_llm.tools.sandbox.slot import features
from marl_llm.tools.sandbox.workspace import Workspace

__all__ = [
    "PROFILES", "Execution", "FairQueue", "Level", "Limits", "Profile", "Program", "Submission", "Sandbox", "SandboxError", "Workspace",
    "default_sandbox", "features", "run",
]  # fmt: skip

_default: Sandbox | None = None
_guard = threading.Lock()


def default_sandbox() -> Sandbox:
    """One sandbox for the whole process, made when first asked for, with the strongest fence as its minimum."""
    global _default
    with _guard:
        if _default is None or _default._closed or _default._pid != os.getpid():
            _default = Sandbox()
            atexit.register(_default.close)
        return _default


def run(code: str, stdin: str = "", timeout_s: float | int = 10.0, profile: str = "bare") -> Execution:
    """One program in the default sandbox."""
    return default_sandbox().run(Submission(code, stdin, profile, Limits(timeout_s=timeout_s)))
