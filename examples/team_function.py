"""A team as a plain async function: a planner and two solvers, a tool that looks a word up, and a reward. Forks are replays of it."""

import asyncio

import marl_llm as ml
from marl_llm.text import ByteTokenizer
from marl_llm.workflows import PlainText

COLOURS = ("red", "tan", "blue", "pink", "grey", "teal", "gold", "lime", "navy", "plum")
ROWS = [{"shelf": f"{a}{b}", "target": COLOURS[(a + b) % 10][:3]} for a in range(10) for b in range(10)]
TOKENIZER = ByteTokenizer(specials=("<eos>",), stops=("<eos>",))


def look_up(shelf: str, digit: str) -> str:
    """The colour on a shelf, for the digit that the planner names; it is awaited, with a deadline."""
    return COLOURS[(int(shelf[0]) + int(digit)) % 10] if digit.isdigit() and len(digit) == 1 else "none"


def player(turn) -> str:
    """Who is imitated first: the planner names the second digit, the solvers copy what they read."""
    words = turn.messages[-1].content.split()
    return words[1][1] if turn.role.name == "planner" else words[-1][:3] if turn.random.random() < 0.8 else "none"


SIZES = {"max_prompt": 16, "max_tokens": 5}
ROLES = {"planner": SIZES, "solver": SIZES, "checker": SIZES}


@ml.workflows.team(hidden=("target",), tasks=ROWS, roles=ROLES, renderer=PlainText(TOKENIZER, TOKENIZER.stop_ids), script=player)
async def colours(t, task):
    """Each `await` asks a role or a tool; `if`, `for` and `gather` are Python's."""
    digit = await t.planner(f"p {task.shelf}")
    colour = await t.tool(look_up, task.shelf, digit, timeout_s=2)
    answers = await asyncio.gather(t.solver(f"s {colour}"), t.checker(f"c {colour}"))
    right = [float(answer == task.target) for answer in answers]
    return ml.Reward(team=sum(right) / 2, local={"solver": 0.1 * right[0], "checker": 0.1 * right[1]})


def main(workdir: str = "runs/team_function", steps: int = 60, **options) -> None:
    """Trains it, one model in all roles. From the command line: `marl train game:examples/team_function.py:colours --workdir=...`."""
    options = {"sft": {"steps": 100}, "rollout": {"tasks": 8}} | options
    print(ml.train(colours, "micro", "grpo", steps=steps, workdir=workdir, **options))


if __name__ == "__main__":
    main()
