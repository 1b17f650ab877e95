"""Latency of a team whose agents speak one after another, and side by side, on the engine: Stronger-MAS, Appendix G.

    python -m benchmarks.latency [--agents=1,2,3,4,5,6,7] [--candidates=1,4] [--instances=8] [--turns=2] [--slots=64] [--repeats=3]

Prints one JSON line per number of agents N and of candidates K. Both teams have the same roles, prompts and draws; no agent reads what
another one wrote, so that they say the same, and only the schedule differs: a sequence of N roles, or the N roles together, T times. A
response has `tokens` tokens, or fewer if the random model happens to draw its stop token, one of 258.

The formula of Appendix G: N T waves against T ceil(N / N_max), where N_max = floor(slots / (E K)) agents fit into the engine at once and a
wave takes as long whatever it holds. `bound` is the ratio by that formula, `ratio` the one that was measured (medians, runs interleaved).
A CPU does not keep the premise: there a decoding step takes longer the more rows it has, so the ratio falls short of the bound.
`wave_ratio` says by how much: the time of a parallel wave over that of a sequential one.
"""

from __future__ import annotations

import json
import math
import statistics
import time

import jax
from absl import app, flags

from marl_llm.models import init_params, make_model_config
from marl_llm.sampling import Engine, LaneConfig
from marl_llm.text import ByteTokenizer
from marl_llm.training import use_cpu_devices
from marl_llm.workflows import Controller, PlainText, Role, Task, Workflow, plain, repeat, sequence, shared, together

AGENTS = flags.DEFINE_list("agents", ["1", "2", "3", "4", "5", "6", "7"], "numbers of agents N")
CANDIDATES = flags.DEFINE_list("candidates", ["1", "4"], "numbers of candidates K per prompt")
INSTANCES = flags.DEFINE_integer("instances", 8, "instances E that are played at once")
TURNS = flags.DEFINE_integer("turns", 2, "turns T")
SLOTS = flags.DEFINE_integer("slots", 64, "rows that the engine decodes at once, B_max")
TOKENS = flags.DEFINE_integer("tokens", 32, "most tokens of a response")
PRESET = flags.DEFINE_string("preset", "micro", "shape of the model, with random parameters")
REPEATS = flags.DEFINE_integer("repeats", 3, "runs of each figure; medians are printed")

PROMPT = 224  # tokens; a random response may be three bytes of replacement per token when it is read again
TOKENIZER = ByteTokenizer(specials=("<eos>",), stops=("<eos>",))


def team(agents: int, parallel: bool) -> Workflow:
    """N agents that read the question and their own last words, one after another or side by side."""
    roles = [
        Role(f"agent{i}", f"Agent {i}. {{question}}\nYou said: {{said{i}}}\n", parse=plain(f"said{i}"), writes={f"said{i}": ""},
             max_prompt=PROMPT, max_tokens=TOKENS.value)
        for i in range(agents)
    ]  # fmt: skip
    stage = roles[0] if agents == 1 else (together if parallel else sequence)(*roles)
    return Workflow("latency", repeat(stage, at_most=TURNS.value), inputs=("question",), start={f"said{i}": "-" for i in range(agents)})


def seconds(engine: Engine, workflow: Workflow, candidates: int, step: int) -> float:
    """Of one play of all instances."""
    tasks = [Task(i, {"question": f"What is {i} and {i}?"}) for i in range(INSTANCES.value)]
    branching = dict.fromkeys(workflow.roles, candidates) if candidates > 1 else None
    speech = PlainText(TOKENIZER, (TOKENIZER.eos_id,))
    with Controller(workflow, shared(workflow), engine, speech, branching=branching, pick="first" if branching else None) as controller:
        start = time.perf_counter()
        rollout = controller.play(tasks, step)
        took = time.perf_counter() - start
    calls = INSTANCES.value * len(workflow.roles) * TURNS.value * candidates
    if (drawn := sum(len(way.calls) for way in rollout.trajectories)) < calls // candidates:
        raise RuntimeError(f"{drawn} calls instead of {calls // candidates}: a play failed")
    return took


def row(engine: Engine, agents: int, candidates: int) -> dict:
    """The two schedules, interleaved, after one play of each that compiles."""
    teams = {"sequential": team(agents, False), "parallel": team(agents, True)}
    took: dict[str, list[float]] = {name: [] for name in teams}
    for repeat_number in range(REPEATS.value + 1):
        for name, workflow in teams.items():
            took[name].append(seconds(engine, workflow, candidates, repeat_number))
    s, p = (statistics.median(took[name][1:]) for name in ("sequential", "parallel"))
    waves = math.ceil(agents * INSTANCES.value * candidates / SLOTS.value)
    alone = math.ceil(INSTANCES.value * candidates / SLOTS.value)
    return {
        "agents": agents, "candidates": candidates, "instances": INSTANCES.value, "turns": TURNS.value, "slots": SLOTS.value,
        "sequential_s": s, "parallel_s": p, "ratio": s / p, "bound": agents * alone / waves,
        "wave_ratio": (p / waves) / (s / (agents * alone)),
    }  # fmt: skip


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}")
    use_cpu_devices(1)
    config = make_model_config(PRESET.value, vocab_size=TOKENIZER.vocab_size)
    sizes = LaneConfig(slots=SLOTS.value, prompt_tokens=PROMPT, response_tokens=TOKENS.value, chunk=8, admit=min(SLOTS.value, 16))
    params = init_params(config, jax.random.key(0))
    with Engine({"policy": (config, params)}, jax.random.key(1), sizes=sizes) as engine:
        for candidates in map(int, CANDIDATES.value):
            for agents in map(int, AGENTS.value):
                found = row(engine, agents, candidates)
                print(json.dumps({name: round(x, 4) if isinstance(x, float) else x for name, x in found.items()}), flush=True)


if __name__ == "__main__":
    app.run(main)
