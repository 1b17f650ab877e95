"""PydanticAI: a planner writes steps, a solver follows them and answers by a typed tool call.

    pip install "pydantic-ai-slim[openai]" && marl model smollm2 --out=models/smollm2
    marl attach --roles=planner=models/smollm2,solver=models/smollm2 --tasks=tasks.jsonl --set=recipe.rewards=mixed \
        --lora_rank=16 --workdir=runs/plan -- python examples/agents/pydantic_ai_two_agents.py --task {task}

A line of tasks.jsonl is like {"question": "2 + 2?", "answer": "4"}. The solver's model must have a chat template with tools.
"""

import argparse
import json
import os
import urllib.request

from pydantic import BaseModel
from pydantic_ai import Agent, UnexpectedModelBehavior
from pydantic_ai.models.openai import OpenAIChatModel


class Answer(BaseModel):
    """What the solver gives."""

    number: int


def play(task: dict) -> dict:
    """Answers a question, and says what each role's part was worth."""
    instructions = "Write the steps that answer the question, not the answer."
    planner = Agent(OpenAIChatModel("planner"), instructions=instructions, retries=1)
    solver = Agent(OpenAIChatModel("solver"), instructions="Follow the steps.", output_type=Answer, retries=1)
    try:
        plan = planner.run_sync(task["question"]).output
    except UnexpectedModelBehavior:  # it wrote nothing, twice
        return {"reward": 0.0, "rewards": {"planner": 0.0}}
    brief = 1 - min(len(plan), 400) / 400
    try:
        number = solver.run_sync(f"{task['question']}\n{plan}").output.number
    except UnexpectedModelBehavior:  # no call of the tool, after one more try
        return {"reward": 0.0, "rewards": {"planner": brief, "solver": 0.0}}
    right = float(str(number) == task["answer"])
    return {"reward": right, "rewards": {"planner": brief, "solver": 0.5 + 0.5 * right}}


def main() -> None:
    """Plays one episode and pays it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", type=json.loads, required=True)
    reward = play(parser.parse_args().task)
    headers = {"Content-Type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(os.environ["MARL_EPISODE_URL"] + "/reward", json.dumps(reward).encode(), headers))


if __name__ == "__main__":
    main()
