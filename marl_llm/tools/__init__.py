"""Ground floor: what an agent may touch. Importing this package is cheap; each tool's own dependencies load with its first name."""

import importlib
from typing import Any

# public name -> the module that defines it
_EXPORTS = {
    "Failure": "results",
    "FailureKind": "results",
    "InfrastructureError": "results",
    "ToolResult": "results",
    "result_counts": "results",
    "BM25Index": "retriever",
    "DenseIndex": "retriever",
    "Hit": "retriever",
    "Retriever": "retriever",
    "RetrieverClient": "retriever",
    "build_bm25": "retriever",
    "build_dense": "retriever",
    "MathsChecker": "maths",
    "Verdict": "maths",
    "extract_answer": "maths",
    "numeq": "maths",
    "ChatClient": "chat",
    "ChatRequest": "chat",
    "OpenAICompatible": "chat",
    "Options": "chat",
    "PolicyBackend": "chat",
    "ChatReply": "chat",
    "VllmServer": "vllm",
    "ClusterSandbox": "sandbox",
    "Execution": "sandbox",
    "Executor": "sandbox",
    "Level": "sandbox",
    "Limits": "sandbox",
    "Program": "sandbox",
    "Submission": "sandbox",
    "Sandbox": "sandbox",
    "SandboxError": "sandbox",
    "Workspace": "sandbox",
    "default_sandbox": "sandbox",
    "run": "sandbox",
    "Case": "judge",
    "Judgement": "judge",
    "Tolerance": "judge",
    "ajudge_calls": "judge",
    "ajudge_stdio": "judge",
    "judge_calls": "judge",
    "judge_stdio": "judge",
    "same_output": "judge",
    "same_value": "judge",
}

__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(sorted(_EXPORTS))}")
    return getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])
