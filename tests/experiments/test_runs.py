"""Real runs, small: a game, a workflow and a game of a user's own file, through every command."""

import json
import math
import os
import pathlib
import shutil
import sys

import jax
import orbax.checkpoint as ocp
import pytest

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from test_players import read_flags, write_files  # noqa: E402

from benchmarks import resume  # noqa: E402
from marl_llm.cli import chat, compare, export, rescore, serve  # noqa: E402
from marl_llm.cli.collect import read_groups, table  # noqa: E402
from marl_llm.models import log_prob_gap_bound  # noqa: E402
from marl_llm.planning.plans import plan as plan_of  # noqa: E402
from marl_llm.reporting import read_episodes, read_metrics, read_tokens, validate_episode  # noqa: E402
from marl_llm.runs import (  # noqa: E402
    building,
    train_run,
    workdir,
)
from marl_llm.runs.base import model_section  # noqa: E402
from marl_llm.runs.command import ConfigError, TrainingError  # noqa: E402
from marl_llm.runs.evaluate_run import parse_seat_tables  # noqa: E402
from marl_llm.runs.measuring import measure, page_text, tables  # noqa: E402
from marl_llm.runs.resolve import resolve  # noqa: E402
from marl_llm.runs.variants import placed  # noqa: E402
from marl_llm.tools.retriever import RetrieverServer, open_index  # noqa: E402
from marl_llm.training import CheckpointError, Checkpoints, HostedTeam, make_mesh  # noqa: E402
from marl_llm.viewing import onefile  # noqa: E402
from marl_llm.workflows.replay import replay  # noqa: E402
from marl_llm.workflows.storage import from_json, read_trajectories  # noqa: E402

FILES = str(ROOT / "experiments" / "configs")
OWN = ROOT / "tests" / "games" / "own"
SMALL = ("model.preset=nano", "model.layers=1", "evaluation.final_tasks=4", "evaluation.transcripts=2", "evaluation.every=1")
SMALL += ("checkpoint.every=1", "checkpoint.keep=3", "devices=1")
TINY = (*SMALL, "game.worlds=1", "rollout.tasks=2", "recipe.group_size=4", "evaluation.tasks=2", "rollout.batch_invariant=True")
TINY += ("sft.steps=12", "sft.fresh=1", "sft.learning_rate=0.02")
LETTERS = (*SMALL, "steps=2", "rollout.tasks=4", "optimizer.minibatch=16", "recipe.group_size=4", "evaluation.tasks=4")
LOCK = (*LETTERS, "game.step=3", "sft.steps=3", "script.slip=0.1")


@pytest.fixture(scope="module", autouse=True)
def in_this_process():
    """The suite has started JAX already, with eight devices; one of them trains."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_run, "start_jax", lambda *_, **__: make_mesh(1))
        patch.setattr(building, "start_jax", lambda *_, **__: make_mesh(1))
        yield
    let_go()


def let_go():
    """What the end of a process does."""
    for handle in workdir._HELD.values():
        os.close(handle)
    workdir._HELD.clear()


def config_of(name, *values):
    return read_flags(f"--config={FILES}/{name}", *(value if value[0] == "-" else f"--config.{value}" for value in values))


def run(config, path, game_dir=None):
    let_go()
    return train_run.train_run(config, path, train_run.Launch("some.py", "", game_dir))


def run_and_draw(config, path):
    """A run with the pictures of its report, which `conftest.py` leaves out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("marl_llm.viewing.write_report", onefile.write_report)
        run(config, path)


def lines(path):
    return [(record["phase"], record["step"]) for record in read_metrics(path)]


def untimed(record):
    timed = ("wall_s", "cpu_s", "seconds")
    return {k: x for k, x in record.items() if not k.startswith(("time/", "tool/", "speed/", "programs/")) and k not in timed}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The smoke variant of a workflow from its first step to its report."""
    path = tmp_path_factory.mktemp("whole") / "run"
    config = config_of("search_parallel.py:smoke", *TINY)
    run_and_draw(config, path)
    return path, config


@pytest.fixture(scope="module")
def letters(tmp_path_factory):
    """A value-state game."""
    path = tmp_path_factory.mktemp("letters") / "run"
    config = config_of("joint_letter.py", *LETTERS)
    run_and_draw(config, path)
    return path, config


@pytest.fixture(scope="module")
def lock(tmp_path_factory):
    """A value-state game of a user's file, which is gone when the run is done."""
    folder = tmp_path_factory.mktemp("lock")
    shutil.copytree(OWN, folder / "source")
    config = config_of(f"game.py:{folder}/source/lock.py:Lock", *LOCK)
    run_and_draw(config, folder / "run")
    shutil.rmtree(folder / "source")
    return folder / "run", config


@pytest.fixture(params=["letters", "whole", "lock"])
def done(request):
    """A finished run of each kind."""
    return request.getfixturevalue(request.param)[0]


# --- every command, for a game, a workflow and a user's own game -----------------------------------------------------------------------


def test_a_run_leaves_what_it_promises(done):
    names = {p.name for p in done.iterdir()}
    hosted = {"graph.svg", "before_after.md", "trajectories.jsonl"} if "search_parallel" in (done / "config.json").read_text() else None
    both = {"config.json", "metrics.jsonl", "tensorboard", "episodes.jsonl", "episodes_tokens.jsonl", "checkpoints", "evaluation.json"}
    both |= {"outcomes.jsonl", "report.html", "plots"}
    own = {"game"} if "lock.py" in (done / "config.json").read_text() else set()
    assert names == both | (hosted or {"tokenizer.model"}) | own
    for play in read_episodes(done):
        validate_episode(play)
    assert {play["when"] for play in read_episodes(done)} == {"train", "before", "after"}


def test_evaluate_measures_the_page_that_training_measured(done):
    with building.opened(done) as (config, plan, team, step):
        seatings = {"before": tables(plan)["before"], "after": {}}
        page, _ = measure(team, seatings, "test", 4)
        assert step == config.steps == 2
        assert page_text(page, team.headline).startswith("  before")
        (own,) = parse_seat_tables(plan, (f"{team.roles[0]}=start",)).values()
        assert {role: str(seat) for role, seat in own.items()} == dict.fromkeys(team.roles, "trained") | {team.roles[0]: "start"}
        with pytest.raises(ConfigError, match="--seats: .*there is no role 'nobody'"):
            parse_seat_tables(plan, ("nobody=start",))
    found = json.loads((done / "evaluation.json").read_text())
    assert {name: page[name] for name in ("before", "after")} == {name: found[name] for name in ("before", "after")}


def test_c6_export_writes_what_transformers_loads(done, tmp_path):
    from marl_llm.models import load_pretrained

    config = json.loads((done / "config.json").read_text())["config"]
    with building.opened(done) as (_, _, team, _):
        name = team.trained[0]
        kept = {k: x for k, x in team.policies()[name].params.items() if k == "embedding"}
    export.export(str(done), name, tmp_path / "out")
    tokenizer = {"tokenizer.model", "tokenizer.json", "tokenizer_config.json"}
    assert {"README.md", "config.json", "model.safetensors"} | tokenizer == {p.name for p in (tmp_path / "out").iterdir()}
    _, params = load_pretrained(tmp_path / "out")
    assert (params["embedding"] == kept["embedding"]).all()
    assert config["model"]["preset"] == "nano"
    with pytest.raises(ConfigError, match=rf"--model='{name}x': .* has no such model; did you mean '{name}'\?"):
        export.export(str(done), name + "x", tmp_path / "other")
    with pytest.raises(ConfigError, match="exists; choose a new directory"):
        export.export(str(done), name, tmp_path / "out")
    with pytest.raises(ConfigError, match=f"--adapters: {name} of .* has none; leave the flag out, or train with"):
        export.export(str(done), name, tmp_path / "adapters", adapters=True)


def test_c3_collect_reads_runs_of_every_kind(letters, whole, lock):
    said = table(read_groups([f"{name}:{path}" for name, (path, _) in (("letters", letters), ("search", whole), ("lock", lock))]))
    assert [row.split("|")[1].strip() for row in said.splitlines()] == ["runs", "---", "letters", "search", "lock"]
    assert "greedy after" in said
    assert "sampled after" not in said  # not all of them measured it
    assert "sampled after" in table(read_groups([f"search:{whole[0]}"]))


@pytest.mark.parametrize("name", ["joint_letter.py", "search_parallel.py", f"game.py:{OWN}/lock.py:Lock"])
def test_c3_plan_counts_every_kind_of_config(name):
    values = ("model.preset=qwen3-1.7b", *(("game.worlds=1",) if "search" in name else ()))
    out = plan_of(config_of(name, *values), "h100:8", "", 8192, 4096, 0, False)
    assert (out["models"], out["fits"], out["compiled"]) == (2, True, False)
    assert round(out["parameters"] / 1e9, 2) == 1.72


def test_resume_needs_the_directory_alone(done, tmp_path):
    """Cut before its last checkpoint was whole, and then with one step more (c15)."""
    path = tmp_path / "run"
    shutil.copytree(done, path)
    shutil.rmtree(path / "checkpoints" / "2")
    (path / "evaluation.json").unlink()
    again = run(workdir.read_config(path), path, workdir.game_dir_of(path))
    kept = json.loads((done / "evaluation.json").read_text())
    assert lines(path) == lines(done)
    assert again["after"] == kept["after"]
    config = workdir.read_config(path)
    config.steps = 3
    assert run(config, path, workdir.game_dir_of(path))["steps"] == 3
    assert lines(path) == [*lines(done), ("train", 3), ("eval", 3)]


def test_a_resume_that_fails_has_written_nothing(done, tmp_path):
    """Its checkpoint is damaged, and lines behind it are those of a step that would be taken again."""
    path = tmp_path / "run"
    shutil.copytree(done, path)
    shutil.rmtree(path / "checkpoints" / "2")  # so that lines of step 2 lie behind the newest one
    damaged = next((path / "checkpoints" / "1" / "policies").rglob("_METADATA"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    config = workdir.read_config(path)
    config.steps = 12
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    with pytest.raises(CheckpointError, match="_METADATA is damaged.*--step=0"):
        run(config, path, workdir.game_dir_of(path))
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before


@pytest.mark.parametrize("text", ["{}", '{"step": 2}', '{"step": "2", "team": []}', "[" * 5000])
def test_a_state_of_a_stranger_is_told_by_its_field(done, tmp_path, text):
    path = tmp_path / "run"
    shutil.copytree(done, path)
    (path / "checkpoints" / "2" / "SHA256SUMS").unlink()
    (path / "checkpoints" / "2" / "state.json").write_text(text)
    (path / "evaluation.json").unlink()
    with pytest.raises(CheckpointError, match=r"state\.json"):
        run(workdir.read_config(path), path, workdir.game_dir_of(path))


@pytest.mark.parametrize("name", ["letters", "whole", "lock"])
def test_c3_compare_is_runs_and_a_table(request, name, tmp_path, monkeypatch):
    """Its runs are the commands that a user could type; here the finished run stands for each of them."""
    path, config = request.getfixturevalue(name)
    typed = []

    def launch(arguments):
        typed.append(arguments)
        folder = next(arg.partition("=")[2] for arg in arguments if arg.startswith("--workdir="))
        shutil.copytree(path, folder)

    monkeypatch.setattr(compare, "launch", launch)
    variants = compare.variants_of(config, ["per_role", "slow:steps=1,optimizer.learning_rate=1e-5"])
    for _ in range(2):  # finished runs are not run again
        runs = compare.run_all(config, ["--config=x.py"], variants, [0, 1], tmp_path)
    assert [run[-2:] for run in typed] == [[f"--config.seed={s}", f"--workdir={tmp_path}/{v}-{s}"] for s in (0, 1) for v in variants]
    assert typed[1][:3] == ["--config=x.py", "--config.steps=1", "--config.optimizer.learning_rate=1e-5"]
    assert table({n: [compare_run(r) for r in of] for n, of in runs.items()}).count("\n| ") == 3


def test_what_offers_a_single_agent_is_compared_as_in_the_papers_tables():
    config = config_of("plan_path_programs.py:smoke")
    variants = compare.variants_of(config, [])
    assert set(variants) == {"single", "single_grpo", "team", "team_grpo", "at_grpo_shared", "at_grpo_per_role", "imitation"}
    assert set(compare.variants_of(config_of("search_extract.py"), [])) == {"per_role", "shared"}
    assert compare.variants_of(config_of("search_extract.py"), ["imitation", "slow:steps=1"])["imitation"] == {}
    for name, changes in variants.items():
        changed = compare.same_samples(config, changes)
        with resolve(config_of("plan_path_programs.py:smoke", *(f"{key}={value}" for key, value in changed.items()))) as plan:
            assert len(plan.assignment.trained) == (1 if "single" in name or "shared" in name else 2)
            assert plan.recipe.name == ("grpo" if name.endswith("_grpo") and "at_" not in name else "at_grpo")


@pytest.mark.parametrize(
    ("table", "file", "names"),
    [
        ("4", "plan_path_programs.py:smoke", "tool_alone planner_alone alone_then_team at_grpo_per_role"),
        ("6", "sudoku.py:smoke", "single team at_grpo_per_role at_grpo_outcome"),
        ("7", "sums.py:smoke", "once again once_grpo again_grpo"),
        ("figure5", "sums.py:ensemble", "at_grpo_1 grpo_1 at_grpo_3 grpo_3 at_grpo_5 grpo_5 at_grpo_7 grpo_7"),
    ],
)
def test_the_other_tables_of_the_paper_are_changes_of_one_config(table, file, names):
    config = config_of(file)
    variants = compare.variants_of(config, [], table)
    assert list(variants) == names.split()
    for name, changes in variants.items():
        changed = placed(compare.same_samples(config, changes), "runs", 3)
        with resolve(config_of(file, *(f"{key}={value}" for key, value in changed.items()))) as plan:
            assert plan.recipe.name == ("grpo" if "grpo" in name and "at_grpo" not in name else "at_grpo")
            if table == "6":
                assert plan.game.rewards_form == ("outcome" if name == "at_grpo_outcome" else "safe")
            if table == "figure5":  # as many responses per step, up to what does not divide
                agents = int(name.rpartition("_")[2])
                speakers = int(changed["game.reasoners"]) + int(changed["game.users"]) + (agents > 1)
                assert speakers == agents
                assert 0 <= 7 * config.rollout.tasks - agents * int(changed["rollout.tasks"]) < agents
            if table == "7":
                assert list(plan.assignment.roles) == ["reasoner"]
                assert config_of(file, *(f"{key}={value}" for key, value in changed.items())).game.turns == (1 if "once" in name else None)
    if table == "4":
        assert variants["tool_alone"]["schedule"] == f"tool:{config.steps},planner:1"
        models = placed(variants["alone_then_team"], "runs", 3)["sft.models"]
        assert models == "tool=run:runs/tool_alone-3,planner=run:runs/planner_alone-3"


def test_a_table_of_what_a_game_lacks_is_refused():
    for number, file, why in (
        ("figure5", "sums.py", "varies config.game.reasoners, which sums does not have"),
        ("6", "search_extract.py", "varies config.game.agents, which fact_extract does not have"),
    ):
        with pytest.raises(ConfigError, match=why):
            compare.variants_of(config_of(file), [], number)


def test_columns_of_a_table_are_means_of_what_the_runs_measured(tmp_path):
    def page(x):
        return {"success": x, "team": {"majority": x / 2}, "roles": {"tool": {"well_formed": x}}}

    def tied(n):
        return {"phase": "train", "step": n, "model/a/tied_share": 0.2 * n, "model/b/tied_share": 0.0}

    steps = [tied(n) for n in (1, 2, compare.TIED_STEPS + 1)]
    pages = [{"after": page(0.0), "sampled": {"after": page(x), "swapped": page(x / 4)}} for x in (0.4, 0.8)]
    runs = [{"evaluation": one, "metrics": steps} for one in pages]
    groups = {"team": runs, "bare": [{"evaluation": {"after": {"success": 1.0}}, "metrics": []}]}
    found = compare.columns(groups, "4")
    assert found["swapped"] == {"team": "0.150", "bare": ""}
    assert found["well-formed"] == {"team": "tool 0.600", "bare": ""}
    assert found["well-formed, swapped"]["team"] == "tool 0.150"
    assert compare.columns(groups, "figure5")["majority"] == {"team": "0.300", "bare": ""}
    assert compare.columns(groups, "6") == {f"tied groups, first {compare.TIED_STEPS} steps": {"team": "0.15", "bare": ""}}
    assert compare.columns(groups, None) == {}


def compare_run(folder):
    from marl_llm.cli.collect import read_run

    return read_run(folder)


def test_d1_a_killed_compiled_run_ends_with_the_same_bytes(lock, tmp_path, monkeypatch):
    """As `test_resume`, for a user's game and without processes: cut after step 1, its last checkpoint has equal bytes."""
    from benchmarks import resume

    path = tmp_path / "run"
    shutil.copytree(lock[0], path)
    shutil.rmtree(path / "checkpoints" / "2")
    run(workdir.read_config(path), path, workdir.game_dir_of(path))
    ours, theirs = resume.arrays(path), resume.arrays(lock[0])
    assert resume.equal(ours, theirs, 0.0)
    assert any(ours[name].tobytes() != ours["1" + name[1:]].tobytes() for name in ours if name.startswith("2/"))


def test_a_role_of_a_run_is_served_and_talks(whole, letters):
    from marl_llm.serving import ChatServer
    from marl_llm.tools.chat import ChatClient, OpenAICompatible, Options

    path, said = whole[0], []
    let_go()
    with serve.answers_of_run(path, ["answer"]) as models, ChatServer(models) as server:
        assert list(models) == ["answer"]
        with ChatClient(OpenAICompatible(server.url, "answer", None)) as client:
            messages = [{"role": "user", "content": "whomade film"}]
            there = client.complete(messages, temperature=0.0).outcome()
        here = models["answer"](messages, Options(temperature=0.0))
        figures = ("text", "finish_reason", "prompt_tokens", "completion_tokens")
        assert [getattr(there, name) for name in figures] == [getattr(here, name) for name in figures]
        lines = ["whomade film\n", "\n", "whomade film " * 2_000 + "\n", "/new\n", "whomade film\n", "who?\n"]
        chat.talk(models["answer"], lines, said.append)
        ended = "" if there.finish_reason == "stop" else f" [cut off after {there.completion_tokens} tokens]"
        assert said[0] == said[2] == there.text + ended
        assert "are served] (/new forgets" in said[1]
        assert "the model's vocabulary lacks 1 of the words ('who?')" in said[3]
    for folder, roles, wrong in ((path, ["anser"], "did you mean 'answer'"), (letters[0], [], "numbered words and no chat")):
        let_go()
        with pytest.raises(ConfigError, match=wrong), serve.answers_of_run(folder, roles):
            pass


# --- what a run of a workflow leaves -----------------------------------------------------------------------------------------------------


def test_every_promised_file_is_there(whole):
    path, config = whole
    record = json.loads((path / "config.json").read_text())
    assert (record["name"], record["config_file"], record["headline"]) == ("search_parallel", "some.py", "f1")
    assert record["config"]["game"]["worlds"] == 1
    assert sorted(int(p.name) for p in (path / "checkpoints").iterdir()) == [0, 1, 2]
    assert {p.name for p in (path / "checkpoints" / "2" / "policies").iterdir()} == {"decompose", "answer"}
    assert (path / "graph.svg").read_text().startswith("<svg")
    table = (path / "before_after.md").read_text()
    assert "## greedy, 4 tasks of the test split" in table
    assert "## sampled, 4 tasks of the test split" in table
    assert "| team/f1 |" in table
    page = (path / "report.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "search_parallel" in page


def test_the_lines_of_a_run(whole):
    path, _ = whole
    assert lines(path) == [
        ("sft", 1), ("sft", 10), ("sft", 12), ("eval", 0), ("train", 1), ("eval", 1), ("train", 2), ("eval", 2),
    ]  # fmt: skip
    steps = [record for record in read_metrics(path) if record["phase"] == "train"]
    for record in steps:
        for role in ("decompose", "answer"):
            assert -1.0 <= record[f"role/{role}/reward"] <= 1.0
            assert record[f"role/{role}/reward"] == pytest.approx(sum(record[f"role/{role}/component/{part}"] for part in ("f1", "format")))
            assert 0.0 <= record[f"role/{role}/zero_variance"] <= 1.0
            assert 0.0 <= record[f"role/{role}/well_formed"] <= 1.0
            assert math.isfinite(record[f"model/{role}/grad_norm"])
            assert record[f"model/{role}/log_prob_gap"] < 1e-4  # what is served is what is scored
        assert record["success"] == record["team/f1"]
        assert record["episodes"] == 8
    assert any(record[f"model/{role}/grad_norm"] > 0 for record in steps for role in ("decompose", "answer")), "nothing was learned"
    tokens = [8 * sum(record[f"role/{role}/tokens"] for role in ("decompose", "answer")) for record in steps]
    assert steps[0]["sampled_tokens"] == pytest.approx(tokens[0])
    assert steps[1]["sampled_tokens"] == pytest.approx(sum(tokens))
    assert [record["samples"] for record in steps] == [16, 32]


def test_plays_and_graphs_are_read_back_and_replayed(whole):
    path, config = whole
    plays, tokens, graphs = read_episodes(path), read_tokens(path), read_trajectories(path)
    assert [play["episode"] for play in plays] == [one["episode"] for one in tokens]
    # per checkpoint the whole group of one task, and the worst three plays of the other; of the last evaluation the other tasks too
    assert [play["when"] for play in plays] == ["train"] * 14 + ["before"] * 2 + ["after"] * 4
    said = [one for play in tokens for step in play["steps"] for one in step["responses"]]
    assert ["advantage" in one for one in said] == [True] * 28 + [False] * (len(said) - 28)
    for group in (said[:8:2], said[14:22:2]):  # of a role, whose mean was taken off
        assert abs(sum(one["advantage"] for one in group)) < 1e-4
    for play, drawn in zip(plays, tokens):
        assert set(drawn["pieces"]) == set(play["roles"].values())  # every id has its text, by model
        for step in drawn["steps"]:
            assert {str(i) for i in step["prompt_ids"]} <= set(drawn["pieces"][play["roles"][step["role"]]])
    played = [(graph["when"], graph["step"], graph["task"]["split"], graph["task"]["number"]) for graph in graphs]
    evaluated = [("before", 0, "test", task) for task in (0, 1)] + [("after", 2, "test", task) for task in (0, 1, 2, 3)]
    of_training = [("train", 1, "train", 0)] * 4 + [("train", 1, "train", 1)] * 3
    of_training += [("train", 2, "train", 2)] * 4 + [("train", 2, "train", 3)] * 3
    assert played == of_training + evaluated  # c4: an evaluation's plays bear no step of seeds
    assert [graph["episode"] for graph in graphs] == [play["episode"] for play in plays]
    assert {event["kind"] for graph in graphs for event in graph["events"]} >= {"role"}
    with resolve(config) as plan:
        for graph in graphs:
            candidates = 4 if graph["task"]["split"] == "train" else 1
            again = replay(from_json(graph), plan.game.workflow, plan.assignment, plan.game.renderer, candidates)
            assert [way.fields["answer"] for way in again.trajectories] == [way["fields"]["answer"] for way in graph["paths"]]


def test_rescore_computes_the_stored_rewards_again(whole, capsys):
    assert rescore.main([str(whole[0]), "--json"]) == 0
    plays = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(plays) == len(read_trajectories(whole[0]))
    assert all(call["stored"] == pytest.approx(call["now"]) for play in plays for call in play["calls"])


def test_the_final_evaluation_has_both_ways_and_each_role_put_back(whole):
    path, _ = whole
    found = json.loads((path / "evaluation.json").read_text())
    assert (found["split"], found["headline"], found["seed"], found["steps"]) == ("test", "f1", 0, 2)
    for part in (found, found["sampled"]):
        assert set(part["pairs"]) == {"decompose untrained", "answer untrained"}
        for figures in (part["before"], part["after"], *part["pairs"].values()):
            assert figures["episodes"] == 4
            assert figures["success"] == figures["team"]["f1"]
            assert set(figures["roles"]) == {"decompose", "answer"}


def test_a_complete_run_says_so_and_another_config_is_refused(whole, capsys):
    path, config = whole
    before = {p: p.stat().st_mtime_ns for p in path.rglob("*")}
    assert run(config, path) == json.loads((path / "evaluation.json").read_text())
    assert f"{path} is complete; its report is" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"config\.steps: 2 -> 1"):
        run(config_of("search_parallel.py:smoke", *TINY, "steps=1"), path)
    assert {p: p.stat().st_mtime_ns for p in path.rglob("*")} == before


# --- beginning where another run was ---------------------------------------------------------------------------------------------------

MEASURE = ("evaluation.ablate_roles=False", "evaluation.transcripts=0", "steps=0")


def begun(source, *values):
    return config_of("search_parallel.py:smoke", *TINY[:-3], *MEASURE, f"sft.run={source}", *values)


def test_a_trained_team_is_measured_again_by_another_run(whole, tmp_path):
    found = run(begun(whole[0], "sft.step=2"), tmp_path / "run")
    assert found["after"] == json.loads((whole[0] / "evaluation.json").read_text())["after"]
    assert lines(tmp_path / "run") == [("eval", 0)]


def test_one_model_begins_where_several_did(whole, tmp_path):
    """They began as copies of one; so that shared and separate models are compared from the same start."""
    found = run(begun(whole[0], "assignment=shared", "sft.models=shared=answer"), tmp_path / "run")
    assert found["before"] == json.loads((whole[0] / "evaluation.json").read_text())["before"]


def test_each_model_of_a_team_begins_where_another_run_left_one(whole, tmp_path):
    """Table 4: roles that learned in runs of their own are put together."""
    last, first = f"run:{whole[0]}", f"run:{whole[0]}@0"

    def begun_at(models):
        return config_of("search_parallel.py:smoke", *TINY[:-3], *MEASURE, f"sft.models={models}")

    found = run(begun_at(f"decompose={last},answer={last}"), tmp_path / "a")
    assert found["after"] == json.loads((whole[0] / "evaluation.json").read_text())["after"]
    run(begun_at(f"decompose={last}#answer,answer={first}"), tmp_path / "b")
    there, here = (resume.arrays(path) for path in (whole[0], tmp_path / "b"))
    params = [array.removeprefix("0/decompose") for array in here if array.startswith("0/decompose") and "params" in array]
    assert params
    for array in params:
        assert (here[f"0/decompose{array}"] == there[f"2/answer{array}"]).all()
        assert (here[f"0/answer{array}"] == there[f"0/answer{array}"]).all()
    assert any((there[f"0/answer{array}"] != there[f"2/answer{array}"]).any() for array in params)


def test_a_start_that_is_not_there_is_refused_before_anything_is_written(whole, tmp_path):
    for values, message in (
        ((tmp_path / "nowhere",), r"config\.sft\.run='.*nowhere' has no checkpoint 0; it has none"),
        ((whole[0], "sft.step=7"), r"has no checkpoint 7; it has 0, 1, 2$"),
        ((whole[0], f"sft.models=answer=run:{whole[0]}@9"), r"models='answer=run:.*has no checkpoint 9; it has 0, 1, 2$"),
        (("", "sft.models=answer=run:x"), "names no run for model 'decompose', nor does sft.run"),
        (("", "sft.models=decompose=run:,answer=run:x"), "sft.models=.*: seat 'run:' is unknown"),
    ):
        with pytest.raises(ConfigError, match=message):
            run(begun(*values), tmp_path / "run")
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (("assignment=shared",), "cannot begin this team: .*It has answer, decompose; config.sft.models can name"),
        (("model.feed_forward=40",), r"cannot begin this team: .* there, the config makes .*"),
    ],
)
def test_a_start_of_another_kind_is_refused(whole, tmp_path, values, message):
    with pytest.raises(ConfigError, match=message) as refusal:
        run(begun(whole[0], *values), tmp_path / "run")
    assert "Delete" not in str(refusal.value)  # the other run is not this one's to mend


class Killed(BaseException):
    """What no run catches."""


def test_d1_a_workflow_that_was_cut_after_a_checkpoint_above_0_ends_as_the_other(whole, tmp_path, monkeypatch, capsys):
    """Cut at the worst moment: the lines and plays of a step are written, its checkpoint is not. All bytes are those of the other run,
    because it plays with `rollout.batch_invariant`."""
    path, config = tmp_path / "run", whole[1]
    save = Checkpoints.save

    def cut(self, step, *rest):
        if step == 2:
            raise Killed
        save(self, step, *rest)

    monkeypatch.setattr(Checkpoints, "save", cut)
    with pytest.raises(Killed):
        run(config, path)
    assert lines(path)[-1] == ("eval", 2)
    monkeypatch.setattr(Checkpoints, "save", save)
    results = run(config, path)
    assert f"continuing {path} after step 1" in capsys.readouterr().err
    assert lines(path) == lines(whole[0])
    for ours, theirs in zip(read_metrics(path), read_metrics(whole[0]), strict=True):
        assert ours.keys() == theirs.keys()
        assert untimed(ours) == untimed(theirs)
    assert resume.differences(whole[0], path) == []  # every array of every checkpoint, every line
    for name in ("episodes.jsonl", "episodes_tokens.jsonl", "trajectories.jsonl"):
        ids = [[json.loads(line)["episode"] for line in (folder / name).read_text().splitlines()] for folder in (path, whole[0])]
        assert ids[0] == ids[1]
        assert len(set(ids[0])) == len(ids[0]) == 20  # of two steps a group of four and three more each, of the evaluations two and four
    drawn, theirs = ([[(play["episode"], step["prompt_ids"], [response["ids"] for response in step["responses"]]) for step in play["steps"]]
                      for play in read_tokens(folder)] for folder in (path, whole[0]))  # fmt: skip
    assert drawn == theirs
    assert sum(play[0][0].startswith("train-1/") for play in drawn) == 7  # of step 2
    assert results["after"] == json.loads((whole[0] / "evaluation.json").read_text())["after"]


def test_a_run_whose_plays_all_fail_ends_with_one_line(tmp_path, monkeypatch):
    from marl_llm.workflows import RolloutError

    def fails(*_, **__):
        raise RolloutError("all 2 plays of workflow 'x' failed")

    monkeypatch.setattr(HostedTeam, "evaluate", fails)
    with pytest.raises(TrainingError, match="all 2 plays of workflow 'x' failed"):
        run(config_of("search_parallel.py:smoke", *TINY, "sft.steps=0"), tmp_path / "run")


def test_permuted_rewards_train_too_and_otherwise(whole, tmp_path):
    small = ("control.permute_rewards=True", "steps=1", "evaluation.ablate_roles=False", "evaluation.final_tasks=2")
    run(config_of("search_parallel.py:smoke", *TINY, *small), tmp_path / "run")
    (permuted,), (plain, _) = ([r for r in read_metrics(path) if r["phase"] == "train"] for path in (tmp_path / "run", whole[0]))
    assert permuted["role/answer/reward"] == pytest.approx(plain["role/answer/reward"], abs=1e-3)  # what was earned is told as it was
    assert "pairs" in json.loads((tmp_path / "run" / "evaluation.json").read_text())


def test_a_team_of_a_frozen_an_adapted_and_a_scripted_role_takes_a_step(tmp_path):
    config = config_of("search_extract.py:smoke", *TINY, "steps=1", "sft.steps=2")
    config.models.decompose = model_section(kind="scripted")
    config.models.evidence = model_section(lora_rank=2, lora_alpha=4.0)
    config.models.answer = model_section(kind="frozen")
    results = run(config, tmp_path / "run")
    (record,) = [r for r in read_metrics(tmp_path / "run") if r["phase"] == "train"]
    assert {name.split("/")[1] for name in record if name.startswith("model/")} == {"evidence"}
    assert record["model/evidence/log_prob_gap"] < 1e-4
    assert record["role/decompose/calls"] == record["role/answer/calls"] == 8
    assert results["pairs"] == {}  # one role trains: put back, it is the team before
    policies = tmp_path / "run" / "checkpoints" / "1" / "policies"
    assert {p.name for p in policies.iterdir()} == {"answer", "evidence"}

    def names(of):
        return {path[-1].key for path, _ in jax.tree.leaves_with_path(metadata(policies / of).item_metadata.tree["params"])}

    metadata = ocp.PyTreeCheckpointer().metadata
    assert names("evidence") == {"a", "b"}  # adapters alone
    assert "embedding" in names("answer")


# --- the paper's sizes, cut down -----------------------------------------------------------------------------------------------------

CUT = ("steps=1", "rollout.tasks=1", "rollout.max_num_seqs=2", "rollout.decode_steps=8", "recipe.group_size=2", "evaluation.tasks=1",
       "devices=1")
CUT += ("evaluation.final_tasks=1", "evaluation.transcripts=1", "evaluation.ablate_roles=False")
CUT += ("optimizer.minibatch=2", "quick_compile=True", "mesh.fsdp=1")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_files(tmp_path_factory.mktemp("files"))


def test_a_full_size_config_steps_on_a_checkpoint_files_and_a_retriever(files, tmp_path):
    given = {flag.partition("=")[0].rpartition(".")[2]: flag.partition("=")[2] for flag in files["search_parallel"]}
    with RetrieverServer(open_index(given["index"])) as server:
        address = f"--config.game.index={server.url}"
        config = config_of("search_parallel.py:full", *files["search_parallel"], address, *CUT, "optimizer.row_tokens=4224")
        run(config, tmp_path / "run")
    (record,) = [r for r in read_metrics(tmp_path / "run") if r["phase"] == "train"]
    for model in ("decompose", "answer"):
        assert record[f"model/{model}/log_prob_gap"] < log_prob_gap_bound("bfloat16")
        assert math.isfinite(record[f"model/{model}/value_error"])
    saved = {p.name for p in (tmp_path / "run" / "checkpoints" / "1" / "policies").iterdir()}
    assert saved == {"decompose", "answer", "decompose.critic", "answer.critic"}
    first = read_trajectories(tmp_path / "run")[0]
    (call, *_) = [event for event in first["events"] if event["kind"] == "role"]
    assert "<|im_start|>" not in call["prompt"]  # what a person reads; the ids of the chat are the checkpoint's
    tokens = read_tokens(tmp_path / "run")[0]
    assert "Write the search queries" in call["prompt"]
    assert tokens["episode"] == "train-0/0/0"
