"""Programs written by a team and judged by tests: workflow D of UnityMAS-O, coder and unit tester of Stronger-MAS, data, small worlds."""

from marl_llm.games.coding.contests import check_references, load_contests
from marl_llm.games.coding.data import load_problems, read_tests, show_tests
from marl_llm.games.coding.debate import code_debate, debate_roles, single_coder
from marl_llm.games.coding.function_debate import (
    FunctionRuns,
    debate_renderer,
    debate_task,
    debate_tokenizer,
    function_debate_player,
    function_debate_roles,
)
from marl_llm.games.coding.functions import function_renderer, function_task, function_tokenizer, template_split, templates
from marl_llm.games.coding.mini import (
    function_player,
    hide_fields,
    mini_coding_roles,
    mini_plan_code_verify_reflect,
    mini_verifier,
    read_plan,
)
from marl_llm.games.coding.runs import Runs
from marl_llm.games.coding.team import (
    coding_roles,
    plan_code_verify_reflect,
    report,
    verifier,
)

__all__ = [
    "coding_roles", "plan_code_verify_reflect", "report", "verifier",
    "load_problems", "read_tests", "show_tests",
    "hide_fields", "function_player", "function_renderer", "function_task", "function_tokenizer", "mini_coding_roles",
    "mini_plan_code_verify_reflect", "mini_verifier", "read_plan", "template_split", "templates",
    "Runs", "check_references", "code_debate", "debate_roles", "load_contests", "single_coder",
    "FunctionRuns", "debate_renderer", "debate_task", "debate_tokenizer", "function_debate_player", "function_debate_roles",
]  # fmt: skip
