"""First floor: teams as graphs of role calls and tool calls on the host; played, paid, kept and replayed. docs/workflows.md shows how."""

from typing import Any

from marl_llm.old_names import new_object
from marl_llm.workflows.assignment import (
    Assignment,
    Inside,
    Outside,
    Schedule,
    Scripted,
    ScriptTurn,
    alternate,
    separate,
    shared,
)
from marl_llm.workflows.controller import Controller, Rollout
from marl_llm.workflows.drawing import to_mermaid, to_svg
from marl_llm.workflows.environment import Environment
from marl_llm.workflows.errors import FormatError, RolloutError, ToolCallError, ToolRefusal, WorkflowError
from marl_llm.workflows.function_replay import Reward
from marl_llm.workflows.function_team import FunctionTeam, team
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
    with_roles,
)
from marl_llm.workflows.hidden_values import Hidden, HiddenValueError
from marl_llm.workflows.mcp_tools import McpAddress, mcp_tools
from marl_llm.workflows.parsers import after_hashes, code_block, json_object, plain, short_text, tagged, texts
from marl_llm.workflows.program_team import ProgramTeam
from marl_llm.workflows.renderer import PlainText, Renderer
from marl_llm.workflows.roles import AgentTool, Role, RoleTool, numbered
from marl_llm.workflows.scoring import Scorer
from marl_llm.workflows.trajectory import Episode, RoleCall, Score, Task, ToolUse, Trajectory
from marl_llm.workflows.views import ActionView, CoachGuide

__all__ = [
    "AgentTool", "FormatError", "McpAddress", "Role", "RoleTool", "ToolRefusal", "WorkflowError", "mcp_tools", "numbered",
    "after_hashes", "code_block", "json_object", "plain", "short_text", "tagged", "texts",
    "NOTHING", "Workflow", "call", "choose", "compute", "each", "repeat", "sequence", "stop", "together", "tool", "when", "with_roles",
    "to_mermaid", "to_svg",
    "FunctionTeam", "Hidden", "HiddenValueError", "ProgramTeam", "Reward", "ToolCallError", "team",
    "Assignment", "Outside", "Inside", "Schedule", "Scripted", "ScriptTurn", "alternate", "separate", "shared",
    "Controller", "PlainText", "Rollout", "RolloutError", "Renderer", "Task",
    "ActionView", "CoachGuide", "Episode", "RoleCall", "Score", "Scorer", "ToolUse", "Trajectory", "Environment",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    return new_object(__name__, name)
