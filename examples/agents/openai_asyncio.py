"""A program of two roles with OpenAI's client, as it would be without any training: solvers answer at the same time, a checker chooses.

    pip install openai && marl model smollm2 --out=models/smollm2
    marl attach --roles=solver=models/smollm2,checker=models/smollm2 --tasks=tasks.jsonl --recipe=grpo --set=recipe.rewards=mixed \
        --lora_rank=16 --workdir=runs/app -- python examples/agents/openai_asyncio.py --task {task}

A line of tasks.jsonl is like {"question": "2 + 2?", "answer": "4"}. What training adds are the last lines: what the answer is worth.
"""

import argparse
import asyncio
import json
import os
import urllib.request

from openai import AsyncOpenAI

SOLVERS = 2


async def ask(models: AsyncOpenAI, role: str, *said: str) -> str:
    """The reply of a role to a conversation, in which it speaks every second time."""
    messages = [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(said)]
    reply = await models.chat.completions.create(model=role, messages=messages)
    return reply.choices[0].message.content or ""


async def play(task: dict) -> dict:
    """Answers a question, and says what each role's part was worth."""
    models = AsyncOpenAI()  # OPENAI_BASE_URL and OPENAI_API_KEY
    question = f"{task['question']} Answer with a number."
    drafts = await asyncio.gather(*(ask(models, "solver", f"{question} You are solver {n}.") for n in range(SOLVERS)))
    listed = "\n".join(f"{n}: {draft}" for n, draft in enumerate(drafts))
    choice = await ask(models, "checker", f"{question}\n{listed}\nWhich is right? Reply 0 or 1.")
    chosen = drafts[1] if choice.strip().startswith("1") else drafts[0]
    final = await ask(models, "solver", f"{question} You are solver 0.", drafts[0], f"The team chose: {chosen}. Your last word?")
    right = [task["answer"] in draft for draft in (*drafts, chosen, final)]
    return {"reward": float(right[-1]), "rewards": {"checker": float(right[2]), "solver": (right[0] + right[1]) / SOLVERS}}


def main() -> None:
    """Plays one episode and pays it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", type=json.loads, required=True)
    reward = asyncio.run(play(parser.parse_args().task))
    where = os.environ["MARL_EPISODE_URL"] + "/reward"
    request = urllib.request.Request(where, json.dumps(reward).encode(), {"Content-Type": "application/json"})
    urllib.request.urlopen(request)


if __name__ == "__main__":
    main()
