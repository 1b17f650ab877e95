"""The programs of examples/agents with the packages that they are written for, trained for two steps. The suite has no such packages.

    python -m venv V && V/bin/pip install -e '.[test,agents,lm_eval]' transformers
    PYTHONPATH=tests/serving:tests/text V/bin/python -m pytest -n 0 -s tests/live/agent_programs.py

What is seen: with models that say what a test wants, the requests and the pay of an episode; with a tiny model, a
step's episodes are paid, no prompt is encoded twice where a program only adds to its history, and the scorer gives the ids that were drawn
the log-probs that they were drawn with.
"""

import json
import os
import pathlib
import subprocess
import sys

import pytest
from serving_lab import ScriptedEngine, ended, scripted

from marl_llm.cli.attach import main
from marl_llm.cli.tiny import make
from marl_llm.serving import ChatServer
from marl_llm.serving.episodes import EpisodeServer
from marl_llm.serving.local import LocalModel
from marl_llm.tools.chat import ChatReply
from marl_llm.tools.commands import CommandProgram
from marl_llm.tools.workers import WorkerProgram
from marl_llm.training.attached import AttachOptions, play_all
from marl_llm.workflows.play import finish

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples" / "agents"
SIZES = dict(width=32, layers=1, query_heads=2, key_value_heads=1, head_dim=16, feed_forward=32)
SETTINGS = (
    "rollout.max_prompt=2048", "rollout.max_tokens=8", "rollout.max_num_seqs=8", "optimizer.row_tokens=2064", "optimizer.minibatch=8",
    "evaluation.tasks=2", "evaluation.final_tasks=2", "evaluation.ablate_roles=false", "recipe.rewards=mixed", "quick_compile=true",
)  # fmt: skip
SUM = {"question": "2 + 2?", "answer": "4"}
PROGRAMS = {
    "langgraph_two_roles.py": (("titler", "tagger"), {"post": "Return the words of a text, in the order in which they stand"}, 2, True),
    "openai_asyncio.py": (("solver", "checker"), SUM, 4, False),
    "openai_agents_handoff.py": (("desk", "adder", "multiplier"), SUM | {"agent": "adder"}, 1, False),
    "pydantic_ai_two_agents.py": (("planner", "solver"), SUM, 2, False),
    "smolagents_code.py": (("coder",), SUM, 3, True),
}
HANDOFF = '<tool_call>\n{"name": "transfer_to_adder", "arguments": {}}\n</tool_call>'
RESULT = '<tool_call>\n{"name": "final_result", "arguments": {"number": 4}}\n</tool_call>'
CODE = ["Thought: two\n<code>\nx = 2\nprint('kept', x)\n</code>", "<code>\nimport os\nopen('no/such')\n</code>"]
CASES = {  # case -> program, role -> what its model says, and what the episode is paid
    "handoff": (
        "openai_agents_handoff.py", {"desk": [HANDOFF], "adder": ["4"], "multiplier": []},
        {"reward": 1.0, "rewards": {"desk": 1.0, "adder": 1.0}},
    ),
    "an answer that only holds the number": (
        "openai_agents_handoff.py", {"desk": [HANDOFF], "adder": ["14"], "multiplier": []},
        {"reward": 0.0, "rewards": {"desk": 1.0, "adder": 0.0}},
    ),
    "a typed answer at the second try": (
        "pydantic_ai_two_agents.py", {"planner": ["a" * 100], "solver": ["No.", RESULT]},
        {"reward": 1.0, "rewards": {"planner": 0.75, "solver": 1.0}},
    ),
    "a planner that writes nothing": (
        "pydantic_ai_two_agents.py", {"planner": ["", ""], "solver": []}, {"reward": 0.0, "rewards": {"planner": 0.0}},
    ),
    "pieces of code": ("smolagents_code.py", {"coder": [*CODE, "<code>\nfinal_answer(x + 2)\n</code>"]}, {"reward": 1.0}),
    "an answer after the last step": ("smolagents_code.py", {"coder": ["2", "3", "5", "4"]}, {"reward": 0.0}),
}  # fmt: skip
REWRITERS = ("openai_agents_handoff.py", "smolagents_code.py")  # hand one agent's words to another, add the calls to the words


def command_of(program):
    """What is started, once per episode or to stay."""
    return [sys.executable, str(EXAMPLES / program), *["--task", "{task}"] * (not PROGRAMS[program][3])]


def play_episode(program, models):
    """An episode of a program, and the server's counts."""
    played_by = (WorkerProgram if PROGRAMS[program][3] else CommandProgram)(command_of(program), "/")
    with EpisodeServer(models) as server:
        (episode,) = finish(play_all(server, played_by, [((0,), PROGRAMS[program][1])], AttachOptions(timeout_s=60)))
        stats = server.stats()
    played_by.close()
    return episode, stats


@pytest.mark.parametrize("case", CASES)
def test_an_episode_is_asked_for_and_paid_as_the_program_means_it(case):
    program, says, pay = CASES[case]
    models = {role: scripted(*map(ended, texts), max_prompt=20_000) for role, texts in says.items()}
    episode, stats = play_episode(program, models)
    assert stats["refused"] == 0
    for line in episode.replies:
        print(f"{line['model']}: {str(line['messages'][-1])[:300]!r} -> {line['text'][:80]!r} {line.get('tool_calls')}")
    assert (episode.aborted, episode.pay) == ("", pay), episode.message
    asked = [line["model"] for line in episode.replies]
    assert {role: asked.count(role) for role in says} == {role: len(texts) for role, texts in says.items()}
    assert program in REWRITERS or all(line["reencoded"] == 0 for line in episode.replies)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_server_that_fails_after_its_first_reply_is_no_reward(program, monkeypatch):
    asked, submit = [], ScriptedEngine.submit

    def submit_once(engine, request, on_tokens=None):
        asked.append(request)
        if len(asked) > 1:
            raise RuntimeError("no memory")
        return submit(engine, request, on_tokens)

    monkeypatch.setattr(ScriptedEngine, "submit", submit_once)
    says = next((says for name, says, _ in CASES.values() if name == program), {})
    models = {role: scripted(*map(ended, says.get(role) or ["x"]), max_prompt=20_000) for role in PROGRAMS[program][0]}
    episode, stats = play_episode(program, models)
    assert (episode.aborted, episode.pay, len(episode.replies)) == ("failed", None, 1), episode.message
    assert stats["failed"] >= 1


def lm_eval(task, model, out, *flags):
    """The results of a task of examples/agents/lm_eval, run by the command and offline."""
    command = [sys.executable, "-m", "lm_eval", "run", "--model=local-completions", "--model_args", model, "--include_path=."]
    offline = {"HF_HOME": str(out / "home"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(
        [*command, f"--tasks={task}", "--output_path", str(out), *flags],
        cwd=EXAMPLES / "lm_eval", env=os.environ | offline, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    (scores,) = out.rglob("results_*.json")
    found = json.loads(scores.read_text())["results"][task]
    print("lm-eval:", found)
    return found


def test_lm_eval_asks_a_served_role_and_scores_its_answers(tmp_path):
    answers = {"2 + 2 =": " 4\n", "3 + 4 =": " 7\n", "5 + 1 =": " 8\n"}  # two of them are right
    prompts = []

    def answer(prompt, options):
        prompts.append(prompt)
        return ChatReply(answers[prompt], "stop", 5, 2)

    with ChatServer({"solver": answer}) as server:
        model = f"model=solver,base_url={server.url}/completions,tokenizer_backend=None,num_concurrent=1"
        found = lm_eval("sums", model, tmp_path, "--batch_size=3")
        requests = server.stats()["requests"]
    assert found["exact_match,first_number"] == pytest.approx(2 / 3)
    assert (sorted(prompts), requests) == (sorted(answers), 1)


def test_lm_eval_compares_the_log_probs_of_texts_under_a_served_role(tmp_path):
    tiny = make(tmp_path / "tiny", "qwen2", 320, **SIZES)
    with LocalModel(str(tiny), max_tokens=8, max_num_seqs=4) as local, ChatServer({"solver": local.answers}) as server:
        where = f"tokenizer_backend=huggingface,tokenizer={tiny}"
        model = f"model=solver,base_url={server.url}/completions,{where},num_concurrent=1"
        found = lm_eval("capitals", model, tmp_path / "out", "--batch_size=2", "--log_samples")
        encode, right = local.answers.renderer.tokenizer.encode, []
        (samples,) = (tmp_path / "out").rglob("samples_*.jsonl")
        for line in map(json.loads, samples.open()):
            context, sums = f"The capital of {line['doc']['country']} is", []
            for choice in line["doc"]["choices"]:
                ids, first = encode(f"{context} {choice}"), len(encode(context))
                sums.append(float(local.answers.score(ids).log_probs[first - 1 :].sum()))
            assert [float(one[0][0]) for one in line["resps"]] == pytest.approx(sums, abs=1e-4)
            right.append(max(range(3), key=sums.__getitem__) == line["doc"]["right"])
    assert found["acc,none"] == pytest.approx(sum(right) / 3)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_is_trained_as_it_stands(program, tmp_path):
    roles, task, requests, stays = PROGRAMS[program]
    tiny = make(tmp_path / "tiny", "qwen2", 320, **SIZES)
    rows = [task | {"number": number} for number in range(20)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = [f"--roles={','.join(f'{role}={tiny}' for role in roles)}", f"--tasks={tmp_path / 'tasks.jsonl'}", "--tasks_per_step=2"]
    flags += [f"--workdir={tmp_path / 'run'}", "--steps=2", "--group_size=2", "--processes=2", *(f"--set={one}" for one in SETTINGS)]
    with pytest.raises(SystemExit) as ended:
        main([*flags, "--stays" if stays else "--nostays", "--", *command_of(program)])  # flags of an earlier call would stay
    assert not ended.value.code
    steps = [row for row in map(json.loads, (tmp_path / "run" / "metrics.jsonl").open()) if row["phase"] == "train"]
    assert len(steps) == 2
    for row in steps:
        print(program, {name: x for name, x in row.items() if name.startswith("aborted/") or name in ("refused", "forked", "reencoded")})
        assert (row["episodes"], row["aborted"]) == (4, 0)
        assert not row["reencoded"] or program in REWRITERS
        assert all(x <= 1e-4 for name, x in row.items() if name.endswith("log_prob_gap"))
    assert steps[-1]["samples"] >= 2 * 4 * requests
