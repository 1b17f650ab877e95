"""Sampling by a real vLLM server on this CPU. Needs the extra `vllm` in an environment of its own (docs/remote.md); the suite does not.

    VLLM_PYTHON=/tmp/v_vllm/bin/python python -m pytest -n 0 -s tests/live/vllm_sampler.py
    VLLM_SEEDS=0,10 VLLM_STEPS=60 VLLM_RATE=1e-3 VLLM_PYTHON=... python -m pytest -n 0 -s tests/live/vllm_sampler.py -k learn_as_over

The server runs in its own process and environment, with a tiny random checkpoint that this library writes. What is seen: the largest
difference of a log-prob between server and scorer, runs of some steps beside the same runs over this library's engine (`VLLM_SEEDS`: the
first and the one behind the last), a server that was killed and one that was started anew.
"""

import os
import pathlib
import signal
import socket
import subprocess
import time
import urllib.request

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marl_llm.algorithms import make_recipe
from marl_llm.models import ModelConfig, init_params, log_probs, save_pretrained
from marl_llm.sampling import EngineConfig, EngineError, Request, VllmSampler
from marl_llm.text import train_pieces
from marl_llm.tools import VllmServer
from marl_llm.training import LearnerOptions, ModelSpec, PlayOptions, make_mesh, make_optimizer, make_team
from marl_llm.workflows import Environment, FormatError, PlainText, Role, Task, Workflow, sequence, shared
from marl_llm.workflows.errors import RolloutError
from marl_llm.workflows.rewards import broadcast, format_penalty

PYTHON = os.environ.get("VLLM_PYTHON", "python")
LETTERS = ("a", "b", "c")
TOKENIZER = train_pieces((*LETTERS, "say", "again", "."))
SPEECH = PlainText(TOKENIZER, (int(TOKENIZER.ids_of(["."])[0]),))
SHAPE = ModelConfig(vocab_size=TOKENIZER.vocab_size, width=32, layers=2, query_heads=2, key_value_heads=1, head_dim=32, feed_forward=64,
                    tie_embeddings=False)  # fmt: skip
PARAMS = init_params(SHAPE, jax.random.key(0))
STEPS, RATE = int(os.environ.get("VLLM_STEPS", "30")), float(os.environ.get("VLLM_RATE", "4e-3"))
SEEDS = range(*map(int, os.environ.get("VLLM_SEEDS", "0,3").split(",")))


def letter(field):
    def parse(text):
        if text not in LETTERS:
            raise FormatError("no letter")
        return {field: text}

    return parse


def right(path):
    return float(path.fields["one"] == path.fields["letter"]) / 2 + float(path.fields["two"] == path.fields["letter"]) / 2


def teacher(turn):
    return turn.fields["letter"] if turn.random.random() < 0.5 else turn.random.choice(LETTERS)


FIRST = Role("first", "say {letter}", letter("one"), {"one": "?"}, max_tokens=2, max_prompt=4)
SECOND = Role("second", "again {one}", letter("two"), {"two": "?"}, max_tokens=2, max_prompt=4)
REWARDS = (broadcast(right, name="right"), format_penalty(0.5))
ECHO = Workflow("echo", sequence(FIRST, SECOND), ("letter",), rewards=REWARDS, metrics={"right": right}, score="at_end")


def letters(split, first, count):
    return [Task(number, {"letter": LETTERS[number % 3]}, split=split) for number in range(first, first + count)]


ENVIRONMENT = Environment(ECHO, letters, "right", SPEECH, teacher)


class Server:
    """vLLM in a process group of its own."""

    def __init__(self, checkpoint, log):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.command = [
            PYTHON, "-m", "vllm.entrypoints.openai.api_server", f"--model={checkpoint}", "--host=127.0.0.1", f"--port={self.port}",
            "--dtype=float32", "--max-model-len=256", "--max-num-seqs=32", "--enforce-eager", "--skip-tokenizer-init", "--enable-scale-out",
        ]  # fmt: skip
        self.log, self.url = log, f"http://127.0.0.1:{self.port}/v1"
        self.start()

    def start(self):
        """Starts it and waits until it answers."""
        ours = ("JAX_PLATFORMS", "XLA_FLAGS", "PYTHONPATH")
        env = {key: value for key, value in os.environ.items() if key not in ours} | dict(
            VLLM_SERVER_DEV_MODE="1", VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1"
        )
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(self.command, env=env, stdout=log, stderr=log, start_new_session=True, cwd=self.log.parent)
        end = time.monotonic() + 600
        while time.monotonic() < end and self.process.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                    return
            except OSError:
                time.sleep(1)
        raise RuntimeError(f"the server did not start:\n{pathlib.Path(self.log).read_text()[-3000:]}")

    def kill(self):
        """Ends it at once, workers too."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    home = tmp_path_factory.mktemp("vllm")
    save_pretrained(home / "checkpoint", SHAPE, PARAMS)
    one = Server(home / "checkpoint", home / "server.log")
    yield one
    one.kill()


def team(sampler=None, seed=0, params=None):
    recipe = make_recipe("grpo", group_size=4, rewards="mixed", returns="immediate", scale_advantages="none", rollout_correction="truncate")
    options = LearnerOptions(recipe, make_optimizer(), row_tokens=64, minibatch=8)
    spec = ModelSpec(SHAPE, init_params(SHAPE, jax.random.key(seed)) if params is None else params, SPEECH, sampler=sampler)
    return make_team(
        ENVIRONMENT, shared(ECHO), {"policy": spec}, options, make_mesh(1), play=PlayOptions(max_num_seqs=16, decode_steps=2), seed=seed
    )


def success(one):
    """Of 480 plays at temperature 1; their draws are the same for all policies of a seed."""
    return one.evaluate({}, "test", 60, plays=8, temperature=1.0).success


def learned(one, steps):
    """(success before and after, and as the mean of the last ten steps; largest gap of a step; the parameters then)."""
    for step in range(30):
        one.sft_step(step % 10, 12, 1e-2)
    one.start_rl()
    before, gaps, curve = success(one), [], []
    for step in range(steps):
        batch = one.play(step, 6 * step, 6)
        assert batch.figures["aborted"] == 0
        curve.append(batch.figures["success"])
        gaps.append(one.learn(batch, RATE)["policy"]["log_prob_gap"])
    return (before, success(one), float(np.mean(curve[-10:]))), max(gaps), jax.device_get(one.learners["policy"].params)


def test_the_log_probs_of_long_answers_are_the_scorers_and_seeds_draw_again(server, tmp_path):
    sizes = EngineConfig(max_num_seqs=16, prompt_tokens=32, response_tokens=128)
    sampler = VllmSampler("policy", SHAPE, PARAMS, VllmServer(server.url, str(tmp_path)), jax.random.key(1), sizes=sizes)
    try:
        asked = [Request((1, 2, 3 + i % 5), (0, i), 128, stop_ids=(9,) if i % 2 else ()) for i in range(16)]
        drawn = [[pending.result() for pending in [sampler.submit(one) for one in asked]] for _ in range(2)]
        gaps, same = [], []
        for request, first, second in zip(asked, *drawn):
            ids = jnp.asarray([[*request.prompt, *first.tokens]], jnp.int32)
            scored = np.asarray(log_probs(SHAPE, PARAMS, ids).log_probs)[0, len(request.prompt) :]
            gaps.append(float(np.max(np.abs(scored - first.log_probs))))
            same.append(np.array_equal(first.tokens, second.tokens))
            assert first.finish == ("stop" if first.tokens[-1] == 9 and request.stop_ids else "length")
        print(f"\n{sum(len(x.tokens) for x in drawn[0])} tokens: largest gap {max(gaps):.1e} nats; {sum(same)} of 16 drawn again")
        assert max(gaps) < 1e-3
        assert all(same)
    finally:
        sampler.close()


_scored = jax.jit(lambda params, rows: log_probs(SHAPE, params, rows).log_probs[:, -1])


def chances(prefix, params=PARAMS):
    """The scorer's distribution of the token behind a prefix, `[V]`."""
    rows = jnp.asarray([[*prefix, token] for token in range(SHAPE.vocab_size)], jnp.int32)
    return np.exp(np.asarray(_scored(params, rows)))


def test_draws_have_the_distribution_that_is_told_also_behind_each_other(server, tmp_path):
    """Log-probs may be right while draws are not: counted against the scorer's distribution, and the second token given the first."""
    sizes, prompt, count = EngineConfig(max_num_seqs=32, prompt_tokens=8, response_tokens=4), (1, 2, 3), 4000
    sampler = VllmSampler("policy", SHAPE, PARAMS, VllmServer(server.url, str(tmp_path)), jax.random.key(1), sizes=sizes)
    try:
        pending = [sampler.submit(Request(prompt, (0, i // 4, 0, i % 4), 3)) for i in range(count)]
        drawn = np.asarray([one.result().tokens for one in pending])
    finally:
        sampler.close()

    def square(seen, due):
        return float(np.sum((np.bincount(seen, minlength=len(due)) - due * len(seen)) ** 2 / (due * len(seen))))

    first = chances(prompt)
    one = square(drawn[:, 0], first)
    begun = [token for token in range(SHAPE.vocab_size) if np.sum(drawn[:, 0] == token) >= 30]
    two = sum(square(drawn[drawn[:, 0] == token, 1], chances((*prompt, token))) for token in begun)
    agree = np.mean([drawn[a::4, 0] == drawn[b::4, 0] for a in range(4) for b in range(a)])
    freedom = SHAPE.vocab_size - 1
    print(f"\nchi-square {one:.1f} of {freedom}, behind each other {two:.1f} of {freedom * len(begun)}; "
          f"pairs of a group agree {agree:.3f}, {np.sum(first**2):.3f} expected")  # fmt: skip
    for found, degrees in ((one, freedom), (two, freedom * len(begun))):
        assert found < degrees + 5 * np.sqrt(2 * degrees)


def places_in_distribution(params, batch, dice):
    """Of every drawn token, where it lies in the scorer's distribution: F(token - 1) + u p(token), uniform and independent if draws are.

    Rows (agent, prompt, branch, position, place); `batch` must have been drawn with `params`.
    """
    tokens, rows, known = batch.tokens, [], {}
    begin = len(tokens.ids) - len(tokens.log_probs)
    seen: dict[tuple, int] = {}
    for i in range(len(tokens)):
        prompt = tuple(tokens.ids[tokens.prompt_at[i] : tokens.prompt_at[i] + tokens.prompt_size[i]].tolist())
        answer = tokens.ids[begin + tokens.response_at[i] : begin + tokens.response_at[i] + tokens.size[i]].tolist()
        group = (int(batch.table.instance[i]), int(batch.table.agent[i]))
        branch = seen[group] = seen.get(group, -1) + 1
        for position, token in enumerate(answer):
            prefix = (*prompt, *answer[:position])
            if prefix not in known:
                known[prefix] = chances(prefix, params)
            below = float(np.sum(known[prefix][:token]))
            rows.append((*group, branch, position, below + dice.random() * known[prefix][token]))
    return np.asarray(rows)


def correlation(rows, key, pairs_of):
    """Of the places of draws that agree in `key` (columns) and differ in the column `pairs_of` by one; and how many there are."""
    table = {(*row[key], row[pairs_of]): row[-1] for row in rows}
    pairs = [(x, table[(*where[:-1], where[-1] + 1)]) for where, x in table.items() if (*where[:-1], where[-1] + 1) in table]
    return float(np.corrcoef(np.asarray(pairs).T)[0, 1]), len(pairs)


def test_draws_of_a_whole_run_are_uniform_in_the_scorers_distribution_and_independent(server, tmp_path):
    """As they should be of parameters that change: among branches, roles, positions, tasks and steps."""
    found, dice = [], np.random.default_rng(0)
    with team(VllmServer(server.url, str(tmp_path))) as one:
        for step in range(30):
            one.sft_step(step % 10, 12, 1e-2)
        one.start_rl()
        for step in range(STEPS):
            batch = one.play(step, 6 * step, 6)
            rows = places_in_distribution(jax.device_get(one.learners["policy"].params), batch, dice)
            rows[:, 0] -= 6 * step  # the task's place in its step
            found.append(np.concatenate([np.full((len(rows), 1), step), rows], axis=1))
            one.learn(batch, RATE)
    rows = np.concatenate(found)  # step, task, agent, branch, position, place
    counts = np.bincount((rows[:, -1] * 20).astype(int), minlength=20)
    uniform = float(np.sum((counts - len(rows) / 20) ** 2 / (len(rows) / 20)))
    print(f"\n{len(rows)} draws: chi-square {uniform:.1f} of 19")
    assert uniform < 19 + 5 * np.sqrt(38)
    for name, column in {"steps": 0, "tasks": 1, "roles": 2, "group_size": 3, "positions": 4}.items():
        found, pairs = correlation(rows, [c for c in range(5) if c != column], column)
        print(f"neighbours in {name}: correlation {found:+.3f}, {found * np.sqrt(pairs):+.1f} standard errors")
        assert abs(found) * np.sqrt(pairs) < 5


def test_runs_over_the_server_are_scored_as_they_were_drawn_and_learn_as_over_the_engine(server, tmp_path):
    """Both arms begin with the same policy, and what the server's arm learned is measured by both: these must agree."""
    rows = []
    for seed in SEEDS:
        with team(VllmServer(server.url, str(tmp_path)), seed) as one:
            over_server, gap, params = learned(one, STEPS)
        with team(None, seed, params) as one:
            again = success(one)
        with team(None, seed) as one:
            over_engine, _, _ = learned(one, STEPS)
        rows.append((*over_server, again, *over_engine))

        def told(one):
            return "{:.3f} -> {:.3f}, last ten steps {:.3f}".format(*one)

        print(f"\nseed {seed}: server {told(over_server)} (measured by the engine {again:.3f}); engine {told(over_engine)}; gap {gap:.1e}")
        assert gap < 1e-3
    began, ended, curve, again, engine_began, engine_ended, engine_curve = np.asarray(rows).T
    for name, difference in (("before", began - engine_began), ("measured twice", ended - again)):
        assert abs(difference.mean()) < 4 * np.sqrt(2 * 0.16 / (480 * len(rows))), (name, difference)  # 0.16: of one play, at most 0.25
    for name, difference in (("after", ended - engine_ended), ("last ten steps", curve - engine_curve)):
        error = difference.std(ddof=1) / np.sqrt(len(rows)) if len(rows) > 1 else np.nan
        print(f"server less engine, {name}: {difference.mean():+.3f}, standard error {error:.3f}, over {len(rows)} seeds")
    assert (ended - began).mean() > 0.1
    assert (engine_ended - engine_began).mean() > 0.1


def test_a_server_that_was_started_anew_or_killed_is_noticed(server, tmp_path):
    with team(VllmServer(server.url, str(tmp_path))) as one:
        one.learn(one.play(0, 0, 6), 1e-2)
        one.play(1, 6, 6)
        server.kill()
        with pytest.raises(RolloutError, match="unavailable"):
            one.play(2, 12, 6)
        server.start()
        with pytest.raises(RolloutError, match="drawn with the parameters 'default'"):
            one.play(2, 12, 6)
        server.kill()
        one._serve(["policy"])  # as after an update
        with pytest.raises(EngineError, match="could not be given to its sampler"):
            one.play(2, 12, 6)
        server.start()
        assert one.play(2, 12, 6).figures["aborted"] == 0  # it has the parameters again
