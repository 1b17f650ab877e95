"""The worlds of MathChat: `chain_maths`, which tiny models play, and `math_chat` on competition problems."""

from __future__ import annotations

from marl_llm.games.maths import chain
from marl_llm.games.maths.chat import math_chat as math_chat_workflow
from marl_llm.games.maths.sums import SHARES
from marl_llm.workflows import World
from marl_llm.workflows.splits import drawn_tasks


def chain_maths(
    information: str = "full",
    executor_turns: int = 2,
    chain_seed: int = 0,
    least: int = 2,
    most: int = 3,
    filler_price: float = 0.25,
    wrong: float = 0.3,
    program: float = 0.5,
    trust: float = 0.5,
    claims: float = 0.5,
    slip: float = 0.7,
    repeats: float = 0.1,
    filler: int = 4,
) -> World:
    """MathChat's team on generated chains of operations; programs run in the sandbox.

    Args:
      information: "full", or "partial": the executor reads the solver's words alone, the verifier the executor's.
      executor_turns: most actions of the executor.
      least, most: operations of a problem.
      filler_price: what the rubric takes off for a piece of filler.
      wrong, program, trust, claims, slip, repeats, filler: habits of the scripted player, see `maths.chain_player`.
    """
    tools = chain.ChainTools()
    workflow = math_chat_workflow(
        tools, chain.chain_roles(information, executor_turns), information, executor_turns, hidden=chain.HIDDEN,
        hand_over=chain.chain_hand_over, metrics=chain.chain_metrics(),
    )  # fmt: skip
    tasks = drawn_tasks(lambda split, number: chain.chain_task(split, chain_seed, number, least, most), SHARES)
    player = chain.chain_player(wrong, program, trust, claims, slip, repeats, filler)
    return World(workflow, tasks, "correct", chain.chain_speech(), player, close=tools.close)
