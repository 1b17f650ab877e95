"""Latency of a team whose agents speak one after another, and side by side, on the engine: Stronger-MAS, Appendix G.

    python -m benchmarks.latency [--agents=1,2,3,4,5,6,7] [--candidates=1,4] [--instances=8] [--turns=2] [--slots=64] [--repeats=3]

Prints one JSON line per number of agents N, of candidates K, and order. Both teams have the same roles, prompts and draws; no agent reads
what another one wrote, so that they say the same, and only the schedule differs: a sequence of N roles, or the N roles together, T times. A
response has `tokens` tokens, or fewer if the random model happens to draw its stop token, one of 258.

Appendix G counts waves: N T one after another, T ceil(N / N_max) in parallel, where N_max = floor(slots / (E K)) agents fit into the engine
at once. `formula` is their number over that of a single agent with as many turns, T: N and ceil(N / N_max). (The paper compares parallel
teams with a single agent of one turn, which is T times that.) `over_single` is the time that was measured over that of the single agent
with the same K in the same round; medians over rounds, in which all teams take turns. `critical_tokens` is the most that an instance must
draw one after another: the longest response of each group of candidates, along the longest path.

The formula takes a wave to last as long whatever it holds. A CPU does not keep that: a decoding step takes longer the more rows it has.
Seconds are wall time, `cpu_s` those of this process, which is bound to one core: on a busy machine only the latter can be compared.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import statistics
import time
from collections.abc import Iterator

import jax
from absl import app, flags

from benchmarks.critical_path import critical_tokens, waves
from benchmarks.peers.lines import pin
from marl_llm.models import init_params, make_model_config
from marl_llm.sampling import Engine, EngineConfig
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


@dataclasses.dataclass(frozen=True)
class Play:
    """One play of all instances."""

    seconds: float
    cpu_s: float
    tokens: int
    critical_tokens: int


def played(engine: Engine, params: dict, workflow: Workflow, candidates: int) -> Play:
    """One play in which nothing was compiled; the same draws every time. Which requests enter together, and so the shapes, is chance."""
    while True:
        engine.set_params("policy", params)  # which forgets the keys and values of the play before
        before = engine.stats()["policy"]["compilations"]
        play = played_once(engine, workflow, candidates)
        if engine.stats()["policy"]["compilations"] == before:
            return play


def played_once(engine: Engine, workflow: Workflow, candidates: int) -> Play:
    """Plays all instances."""
    tasks = [Task(i, {"question": f"What is {i} and {i}?"}) for i in range(INSTANCES.value)]
    branching = dict.fromkeys(workflow.roles, candidates) if candidates > 1 else None
    renderer = PlainText(TOKENIZER, (TOKENIZER.eos_id,))
    with Controller(workflow, shared(workflow), engine, renderer, branching=branching, pick="first" if branching else None) as controller:
        start, cpu = time.perf_counter(), time.process_time()
        rollout = controller.play(tasks, 0)
        took, cpu = time.perf_counter() - start, time.process_time() - cpu
    spoken = [{call.id: len(call.tokens) for way in (*e.trajectories, *e.candidates) for call in way.calls} for e in rollout.episodes]
    calls, asked = sum(map(len, spoken)), INSTANCES.value * len(workflow.roles) * TURNS.value * candidates
    if calls != asked:
        raise RuntimeError(f"{calls} calls instead of {asked}: a play failed")
    return Play(took, cpu, sum(sum(tokens_of_role.values()) for tokens_of_role in spoken), max(map(critical_tokens, rollout.episodes)))


def rows(engine: Engine, params: dict, agents: list[int], candidates: int) -> Iterator[dict]:
    """The lines of one K. All teams take turns."""
    teams = {(n, order): team(n, order == "parallel") for n in agents for order in ("sequential", "parallel")}
    single = team(1, False)
    plays_of: dict[tuple, list[Play]] = {name: [] for name in teams}
    alone: list[Play] = []
    for _ in range(REPEATS.value):
        for plays, workflow in [(alone, single), *((plays_of[name], workflow) for name, workflow in teams.items())]:
            plays.append(played(engine, params, workflow, candidates))
    median = statistics.median
    for (n, order), plays in plays_of.items():
        def over(field, plays=plays):
            return median(getattr(a, field) / getattr(b, field) for a, b in zip(plays, alone, strict=True))

        needed = waves(n, order == "parallel", SLOTS.value, INSTANCES.value * candidates)
        yield {
            "agents": n, "candidates": candidates, "order": order, "instances": INSTANCES.value, "turns": TURNS.value, "slots": SLOTS.value,
            "seconds": median(play.seconds for play in plays), "cpu_s": median(play.cpu_s for play in plays), "tokens": plays[0].tokens,
            "critical_tokens": plays[0].critical_tokens, "waves": TURNS.value * needed,
            "formula": needed / waves(1, False, SLOTS.value, INSTANCES.value * candidates),
            "over_single": over("seconds"), "over_single_cpu": over("cpu_s"),
            "critical_over_single": plays[0].critical_tokens / alone[0].critical_tokens,
        }  # fmt: skip


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}")
    pin(1)
    use_cpu_devices(1)
    jax.config.update("jax_compilation_cache_dir", str(pathlib.Path("~/.cache/marl_llm/xla").expanduser()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
    config = make_model_config(PRESET.value, vocab_size=TOKENIZER.vocab_size)
    sizes = EngineConfig(max_num_seqs=SLOTS.value, prompt_tokens=PROMPT, response_tokens=TOKENS.value, decode_steps=8)
    params = init_params(config, jax.random.key(0))
    with Engine({"policy": (config, params)}, jax.random.key(1), sizes=sizes) as engine:
        for candidates in map(int, CANDIDATES.value):
            for line in rows(engine, params, list(map(int, AGENTS.value)), candidates):
                print(json.dumps({name: round(x, 4) if isinstance(x, float) else x for name, x in line.items()}), flush=True)


if __name__ == "__main__":
    app.run(main)
