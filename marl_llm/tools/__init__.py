"""Ground floor: what an agent may touch. Importing this package is cheap; each tool's own dependencies load with its first name."""

import importlib
from typing import Any

_EXPORTS = {  # module -> the public names that it defines
    "results": ("Failure", "FailureKind", "InfrastructureError", "ToolResult", "result_counts"),
    "retriever": ("BM25Index", "DenseIndex", "Hit", "Retriever", "RetrieverClient", "build_bm25", "build_dense"),
    "maths": ("MathsChecker", "Verdict", "extract_answer", "numeq"),
    "chat": ("ChatClient", "ChatRequest", "OpenAICompatible", "Options", "PolicyBackend", "ChatReply"),
    "vllm": ("VllmServer",),
    "sandbox": (
        "ClusterSandbox", "Execution", "Executor", "Level", "Limits", "Program", "Submission", "Sandbox", "SandboxError", "Workspace",
        "default_sandbox", "run",
    ),
    "judge": (
        "Case", "Judgement", "Tolerance", "ajudge_calls", "ajudge_stdio", "judge_calls", "judge_stdio", "same_output", "same_value",
    ),
}  # fmt: skip
_MODULE_OF = {name: module for module, names in _EXPORTS.items() for name in names}

__all__ = list(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(sorted(_MODULE_OF))}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULE_OF])
