"""OpenAI's Agents SDK: a desk reads the question and hands it to the adder or the multiplier, which answers.

    pip install openai-agents && marl model smollm2 --out=models/smollm2
    marl attach --roles=desk=models/smollm2,adder=models/smollm2,multiplier=models/smollm2 --tasks=tasks.jsonl \
        --set=recipe.rewards=mixed --lora_rank=16 --workdir=runs/desk -- python examples/agents/openai_agents_handoff.py --task {task}

A line of tasks.jsonl is like {"question": "2 + 2?", "answer": "4", "agent": "adder"}. The model must have a chat template with tools.
"""

import argparse
import json
import os
import urllib.request

from agents import Agent, MaxTurnsExceeded, ModelBehaviorError, Runner, set_tracing_disabled


def desk() -> Agent:
    """The agent that is asked first; the model of each is the role of its name."""
    adder = Agent("adder", instructions="You add. Answer with a number.", model="adder")
    multiplier = Agent("multiplier", instructions="You multiply. Answer with a number.", model="multiplier")
    instructions = "Hand the question to the agent that can answer it."
    return Agent("desk", instructions=instructions, handoffs=[adder, multiplier], model="desk")


def play(task: dict) -> dict:
    """Answers a question, and says what each agent's part was worth."""
    try:
        said = Runner.run_sync(desk(), task["question"], max_turns=4)
    except (MaxTurnsExceeded, ModelBehaviorError):  # of the models: worth nothing
        return {"reward": 0.0}
    agent, right = said.last_agent.name, float(str(said.final_output).strip() == task["answer"])
    chosen = {"desk": float(agent == task["agent"])}
    return {"reward": right, "rewards": chosen | ({} if agent == "desk" else {agent: right})}


def main() -> None:
    """Plays one episode and pays it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", type=json.loads, required=True)
    set_tracing_disabled(True)  # which would send what was said to OpenAI
    reward = play(parser.parse_args().task)
    headers = {"Content-Type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(os.environ["MARL_EPISODE_URL"] + "/reward", json.dumps(reward).encode(), headers))


if __name__ == "__main__":
    main()
