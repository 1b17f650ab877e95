"""First floor: teams as graphs of role calls and tool calls on the host; played, paid, kept and replayed. docs/workflows.md shows how."""

from marl_llm.workflows.drawing import to_mermaid, to_svg
from marl_llm.workflows.graph import (
    NOTHING,
    Workflow,
    call,
    choose,
    compute,
    each,
    repeat,
    sequence,
    stop,
    together,
    tool,
    when,
)
from marl_llm.workflows.parsers import code_block, json_object, plain, short_text, tagged, texts
from marl_llm.workflows.roles import FormatError, Role, RoleTool, WorkflowError, numbered

__all__ = [
    "FormatError", "Role", "RoleTool", "WorkflowError", "numbered",
    "code_block", "json_object", "plain", "short_text", "tagged", "texts",
    "NOTHING", "Workflow", "call", "choose", "compute", "each", "repeat", "sequence", "stop", "together", "tool", "when",
    "to_mermaid", "to_svg",
]  # fmt: skip
