"""The loop, over a team that computes nothing: alarms, the way back, errors before anything is overwritten (laws 7, 8 and 10)."""

import itertools
import json
import math
import os
import pathlib
import shutil
import signal
import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

from marl_llm.evaluation import Evaluation, Outcome
from marl_llm.reporting import read_metrics
from marl_llm.runs import loop, measuring, run_files, train_run, workdir
from marl_llm.runs.base import base_config
from marl_llm.runs.command import ConfigError, TrainingError, told
from marl_llm.training import CheckpointError, TrainState, make_mesh
from marl_llm.workflows import RolloutError, WorkflowError

GOOD = {"loss": 0.1, "grad_norm": 1.0, "log_prob_gap": 1e-6, "log_prob_gap_bound": 1e-4,
        "groups_with_signal": 8.0, "updates": 1.0, "groups": 8.0, "kl": 0.0}
GOOD |= {"clip_fraction": 0.0, "tied_share/first": 0.25, "tied_share/second": 0.75}
FIGURES = {"success": 0.5, "turns": 1.0, "aborted": 0.0, "samples": 32.0, "prompts": 8.0, "sampled_tokens": 64.0, "prompt_tokens": 16.0}
FIGURES |= {"seconds": 0.5}


def letters():
    """Two models, no supervised warm-up."""
    c = base_config("letters", game="joint_letter", recipe="magrpo")
    c.steps, c.devices = 6, 2
    c.recipe.group_size = 4
    c.rollout.tasks = 4
    c.evaluation.every = 3
    c.evaluation.tasks = c.evaluation.final_tasks = 4
    c.evaluation.transcripts = 1
    c.checkpoint.every = 2
    return c


class FakeTeam:
    """Adds 1 to every parameter at each update, and notes what it was asked to do; `figures_of(model, call)` are its metrics."""

    roles, headline = ("first", "second"), "success"

    def __init__(self, plan, figures_of):
        self.assignment, self.mesh, self.trained = plan.assignment, make_mesh(2), plan.assignment.trained
        self.calls, self.figures_of, self.log = itertools.count(1), figures_of, []
        self.now = {name: TrainState({"w": jnp.zeros((3,))}, {"moment": jnp.zeros((3,))}) for name in self.trained}

    def norm(self):
        return 0.0  # one process compares with nobody

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.log.append("closed")

    def sft_step(self, step, count, rate):
        self.log.append(("sft", step, count))
        return {"loss": 1.0, "grad_norm": 1.0, "tokens": 4.0}

    def start_rl(self):
        self.log.append("start_rl")

    def start_from(self, policies):
        self.now = {name: policies[name] for name in self.trained}

    advantages = None

    def policies(self):
        return dict(self.now)

    models = policies

    def state(self):
        return {"kl_coef": 0.5}

    def restore_start(self, params):
        assert set(params) == set(self.models())

    def restore(self, now, state):
        assert state == self.state()
        self.now = dict(now)

    def play(self, step, first, count):
        self.log.append(("play", step, first, count))
        of_roles = {f"role/{r}/{k}": 0.5 for r in self.roles for k in ("team", "local", "reward", "well_formed", "truncated", "entropy")}
        pays = np.asarray([0.0, 1.0])
        table = types.SimpleNamespace(team=pays, local=pays, where=pays >= 0)
        batch = dict(step=step, figures=FIGURES | of_roles, table=table, rollout=None)
        return types.SimpleNamespace(**batch, left_out=None, episodes=lambda count, when, advantages=None: [])

    def prepare(self, step, first, count):
        self.log.append(("prepare", step, first, count))

    def learn(self, batch, rate, critic_rate=None):
        self.log.append(("learn", batch.step, rate))
        self.now = {name: TrainState({"w": p.params["w"] + 1}, p.opt_state) for name, p in self.now.items()}
        call = next(self.calls)
        return {name: GOOD | self.figures_of(name, call) for name in self.trained}

    def train_coach(self, batch):
        return {}

    def evaluate(self, seats, split, tasks, plays=1, temperature=0.0, first=0):
        self.log.append(("evaluate", dict(seats), split, tasks))
        played = tuple(Outcome(task, 0, float(task % 2), 1.0) for task in range(tasks))
        return Evaluation(split, seats, temperature, "success", played, dict.fromkeys(self.roles, 1.0))


@pytest.fixture
def run(monkeypatch):
    """`run(config, path, figures_of) -> (results, team)` in this process; each call is a process of its own to the run directory."""
    monkeypatch.setattr(train_run, "start_jax", lambda *_, **__: make_mesh(2))

    def page(path, pictures=True):
        return pathlib.Path(path, "report.html").write_text("") and None

    monkeypatch.setattr("marl_llm.viewing.write_report", page)
    monkeypatch.setattr(run_files, "REPORT_S", 0.0)
    teams = []

    def once(config, path, figures_of=lambda model, call: {}, game_dir=None, step=None):
        let_go()
        monkeypatch.setattr(train_run, "build_team", lambda plan, config, mesh, **_: teams.append(FakeTeam(plan, figures_of)) or teams[-1])
        results = train_run.train_run(config, path, train_run.Launch("letters.py", "", game_dir, step=step))
        return results, teams[-1] if teams else None

    once.teams = teams
    yield once
    let_go()


def let_go():
    """What the end of a process does."""
    for handle in workdir._HELD.values():
        os.close(handle)
    workdir._HELD.clear()


def lines(path):
    return [(r["phase"], r["step"]) for r in read_metrics(path)]


def test_alarms_errors_and_the_way_back(tmp_path, monkeypatch, capsys, run):
    """One run through: alarms, a loss that is not finite, a damaged checkpoint, and a good end."""
    path = tmp_path / "run"
    monkeypatch.setattr(measuring, "SILENT_ALARM", 2)

    def figures(model, call):
        if model == "second":
            return {"groups_with_signal": 0.0, "updates": 0.0, "grad_norm": 0.0}
        return {"log_prob_gap": {2: 1e-2, 3: np.nan}.get(call, 1e-6), "loss": np.nan if call == 5 else 0.1}

    with pytest.raises(TrainingError) as error:
        run(letters(), path, figures)
    assert str(error.value).startswith("step 4, model first: loss not finite. Nothing of that step was saved")
    assert "Lower optimizer.learning_rate" in str(error.value)
    said = capsys.readouterr().err
    alarms = [line for line in said.splitlines() if line.startswith("ALARM")]
    assert alarms == [
        "ALARM step 2: model first, sampler and scorer differ by 1.0e-02 nats (bound 1e-04, law 2)",
        "ALARM step 2: model second got no gradient for 2 steps (all its groups are tied)",
        "ALARM step 3: model first, sampler and scorer differ by nan nats (bound 1e-04, law 2)",
        "ALARM step 4: model second got no gradient for 4 steps (all its groups are tied)",
    ]
    # nothing of the bad step was written; c5: the report was, at the checkpoints before it
    assert sorted(p.name for p in (path / "checkpoints").iterdir()) == ["0", "2", "4"]
    assert lines(path) == [("eval", 0), *(("train", i) for i in (1, 2, 3)), ("eval", 3), ("train", 4)]
    assert not (path / "evaluation.json").exists()
    assert (path / "report.html").exists()
    assert f"python -m marl_llm view {path} --report" in said

    # a damaged checkpoint is told, and its folder given up, the run goes on from the one before
    kept = tmp_path / "kept"
    shutil.copytree(path / "checkpoints" / "4", kept)
    for part in (path / "checkpoints" / "4" / "policies" / "first").rglob("*"):
        if part.is_file():
            part.write_bytes(part.read_bytes()[:7])
    advice = r"checkpoints/4 cannot be read: .* Go on from the checkpoint of step 2: .*--step=2"
    with pytest.raises(CheckpointError, match=advice) as damage:
        run(letters(), path)
    assert "\n" not in str(damage.value)
    assert sorted(p.name for p in (path / "checkpoints").iterdir()) == ["0", "2", "4"]
    shutil.rmtree(path / "checkpoints" / "4")
    shutil.move(kept, path / "checkpoints" / "4")

    # to the end, as the same command would; the count of steps without a gradient went on
    results, team = run(letters(), path, lambda model, call: {"groups_with_signal": 0.0} if model == "second" else {})
    said = capsys.readouterr().err
    assert f"continuing {path} after step 4" in said
    assert "ALARM step 6: model second got no gradient for 6 steps" in said
    assert json.loads((path / "evaluation.json").read_text()) == results
    assert lines(path) == [("eval", 0), *(("train", i) for i in (1, 2, 3)), ("eval", 3), *(("train", i) for i in (4, 5, 6)), ("eval", 6)]
    assert [r["samples"] for r in read_metrics(path) if r["phase"] == "train"] == [32, 64, 96, 128, 160, 192]
    assert np.all(np.asarray(team.now["first"].params["w"]) == 6)

    # complete: the same command says so and changes nothing; another config is refused
    before = {p: p.stat().st_mtime_ns for p in path.rglob("*")}
    assert run(letters(), path)[0] == results
    assert "is complete; its report is" in capsys.readouterr().err
    other = letters()
    other.optimizer.b2 = 0.5
    with pytest.raises(ConfigError, match=r"config\.optimizer\.b2: 0\.99 -> 0\.5"):
        run(other, path)
    assert {p: p.stat().st_mtime_ns for p in path.rglob("*")} == before


def test_d1_a_run_that_goes_on_asks_for_the_same_tasks_rates_and_state(tmp_path, run):
    """Cut in step 4, so that it goes on after step 2: data position, schedule and counters are those of a run that was never cut."""
    config = letters()
    config.steps = 4
    _, whole = run(config, tmp_path / "whole")
    parts = []
    for stop in (3, 99):
        before = 2 * len(parts)

        def figures(model, call, most=stop - before):
            return {"loss": math.nan} if call > most else {}

        try:
            run(config, tmp_path / "cut", figures)
        except TrainingError:
            pass
        parts.append([x for x in run.teams[-1].log if x[0] in ("play", "learn")])
    kept = [x for part, low, high in zip(parts, (0, 2), (2, 4)) for x in part if low <= x[1] < high]
    assert kept == [x for x in whole.log if x[0] in ("play", "learn")]
    assert [x[2] for x in kept if x[0] == "play"] == [0, 4, 8, 12]
    timed = ("wall_s", "cpu_s")

    def untimed(path):
        return [{k: x for k, x in r.items() if k not in timed and "/" not in k} for r in read_metrics(path)]

    assert untimed(tmp_path / "cut") == untimed(tmp_path / "whole")


def test_a_checkpoint_keeps_which_rewards_there_were_and_the_watch_of_a_resumed_run_begins_there(tmp_path, run, monkeypatch):
    path, config, states = tmp_path / "run", letters(), []
    watch = loop.signal_watch
    monkeypatch.setattr(loop, "signal_watch", lambda plan, say, state: states.append(dict(state)) or watch(plan, say, state))
    for config.steps in (4, 6):
        run(config, path)
    kept = json.loads((path / "checkpoints" / "6" / "state.json").read_text())
    pays = [{key: state[key] for key in measuring.UNPAID} for state in (*states, kept)]
    assert pays[0] == measuring.UNPAID
    assert pays[1] == pays[2]
    assert (len(pays[1]["pays"]), pays[1]["paid_samples"]) == (2, 2)  # of the first step: it had two rewards


def test_sigterm_while_processes_agree_on_a_step_stops_the_run_behind_the_next_one(tmp_path, monkeypatch, run):
    """It waits there for the others, so that is where most signals arrive."""
    from marl_llm.training import processes

    def agreed_stop(step, asked, **figures):
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return asked

    monkeypatch.setattr(processes, "agreed_stop", agreed_stop)
    with pytest.raises(SystemExit) as end:
        run(letters(), tmp_path / "run")
    assert end.value.code == 143
    assert max(int(path.name) for path in (tmp_path / "run" / "checkpoints").iterdir()) == 3


def test_a_step_is_played_ahead_but_for_the_first_and_those_behind_a_checkpoint(tmp_path, monkeypatch, run):
    """So a run that continues from a checkpoint, whose first step is on policy, plays what one that was never cut plays."""
    monkeypatch.setattr("marl_llm.runs.resolve.check_whole", lambda config, plan: None)  # compiled play cannot, this team can
    config = letters()
    config.steps, config.checkpoint.every, config.rollout.max_staleness = 7, 3, 1
    _, team = run(config, tmp_path / "run")
    calls = [x[:2] for x in team.log if x[0] in ("prepare", "learn")]
    ahead = [step for (name, step), after in zip(calls, calls[1:]) if name == "prepare" and after == ("learn", step - 1)]
    assert ahead == [1, 2, 4, 5]
    assert [x for x in calls if x[0] == "prepare"] == [("prepare", step) for step in ahead]
    assert [x[2:] for x in team.log if x[0] == "prepare"] == [(4 * step, 4) for step in ahead]
    config.rollout.max_staleness = 0
    _, team = run(config, tmp_path / "on_policy")
    steps = [x[0] for x in team.log if x[0] in ("prepare", "play", "learn")]
    assert steps == ["play", "learn"] * 7


def test_c15_a_finished_run_goes_on_with_more_steps(tmp_path, capsys, run):
    path = tmp_path / "run"
    run(letters(), path)
    more = letters()
    more.steps = 8
    results, team = run(more, path)
    assert "goes on with config.steps: 6 -> 8" in capsys.readouterr().err
    assert results["steps"] == 8
    assert [x[1] for x in team.log if x[0] == "play"] == [6, 7]
    assert lines(path)[-3:] == [("train", 7), ("train", 8), ("eval", 8)]
    with pytest.raises(ConfigError, match=r"config\.steps: 8 -> 6"):
        run(letters(), path)


@pytest.mark.parametrize("step", [None, 4], ids=["with more steps", "from an earlier checkpoint"])
def test_a_finished_run_that_is_killed_in_another_evaluation_makes_it_when_it_goes_on(tmp_path, run, monkeypatch, step):
    path, config = tmp_path / "run", letters()
    run(config, path)
    config.steps = 6 if step else 8
    ends = [path / name for name in ("evaluation.json", "outcomes.jsonl", "before_after.md")]
    ends[2].touch()  # as a hosted run has it
    with monkeypatch.context() as kill:
        kill.setattr(loop, "final_evaluation", lambda _: sys.exit(143))
        with pytest.raises(SystemExit):
            run(config, path, step=step)
        assert not any(end.exists() for end in ends)
    results, team = run(config, path)
    assert [x[0] for x in team.log if x[0] in ("play", "evaluate")] == ["evaluate"] * 6  # as many tables of seats
    assert results == json.loads(ends[0].read_text())
    assert results["steps"] == config.steps


def test_an_evaluation_of_another_step_that_an_earlier_version_left_is_made_anew(tmp_path, run):
    path = tmp_path / "run"
    run(letters(), path)
    old = (path / "evaluation.json").read_text()
    (path / "evaluation.json").write_text(json.dumps(json.loads(old) | {"steps": 4}))
    results, team = run(letters(), path)
    assert results["steps"] == json.loads((path / "evaluation.json").read_text())["steps"] == 6
    assert team.log[-1] == "closed"


def test_the_warm_up_is_taken_once_and_its_plays_come_again(tmp_path, run):
    config = letters()
    config.steps, config.sft.steps, config.sft.fresh = 0, 3, 2
    _, team = run(config, tmp_path / "run")
    assert [x for x in team.log if x == "start_rl" or x[0] == "sft"] == [("sft", n, 8) for n in (0, 1, 0)] + ["start_rl"]
    assert lines(tmp_path / "run") == [("sft", 1), ("sft", 3), ("eval", 0)]


def test_the_page_measures_before_after_the_floor_a_swap_and_each_role_put_back(tmp_path, run):
    results, team = run(letters(), tmp_path / "run")
    seats = [x[1] for x in team.log if x[0] == "evaluate" and x[2] == "test"]
    assert seats == [
        {"first": "start", "second": "start"},
        {},
        {"first": "random", "second": "random"},
        {"first": "trained:second", "second": "trained:first"},
        {"first": "start"},
        {"second": "start"},
    ]
    assert set(results["pairs"]) == {"first untrained", "second untrained"}
    assert results["gain"]["difference"] == 0.0
    assert (results["after"]["success"], results["after"]["tasks"], results["steps"]) == (0.5, 4, 6)
    assert "sampled" not in results
    config = letters()
    config.steps, config.assignment, config.evaluation.sampled = 0, "shared", True
    results, _ = run(config, tmp_path / "shared")
    assert set(results) >= {"before", "after", "random", "sampled"}  # one model: nothing to swap
    assert "swapped" not in results


def test_what_does_not_divide_is_refused_before_the_directory_is_made(tmp_path, run):
    config = letters()
    config.rollout.tasks = 5
    with pytest.raises(ConfigError, match=r"config\.rollout\.tasks=5 does not divide over 2 devices"):
        run(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RolloutError("all 4 plays failed."), "plays failed. Once that is mended, the same command goes on from the last checkpoint. The"),
        (WorkflowError("the parser of role 'x' raised KeyError: 'y'"), r"raised KeyError: 'y'. The whole traceback is in .*error\.txt"),
    ],
)
def test_c7_an_error_of_play_is_one_line_and_promises_nothing_that_cannot_hold(tmp_path, monkeypatch, run, error, said):
    def fails(self, *_):
        raise error

    monkeypatch.setattr(FakeTeam, "play", fails)
    with pytest.raises(TrainingError, match=said) as told_so:
        run(letters(), tmp_path / "run")
    assert "\n" not in str(told_so.value)
    assert ("same command" in str(told_so.value)) == isinstance(error, RolloutError)
    assert type(error).__name__ in (tmp_path / "run" / "error.txt").read_text()
    assert run.teams[-1].log[-1] == "closed"


def test_c7_a_fault_in_a_users_game_is_told_with_its_line(tmp_path):
    (tmp_path / "mine.py").write_text("def act():\n    return {}['x']\n")
    space: dict = {}
    exec(compile((tmp_path / "mine.py").read_text(), str(tmp_path / "mine.py"), "exec"), space)
    with pytest.raises(KeyError) as error:
        space["act"]()
    assert told(error.value, [str(tmp_path / "mine.py")]) == f"{tmp_path}/mine.py line 2, in act: KeyError: 'x'"
    assert told(error.value) is None  # a fault of the library is no fault of the user: nothing is hidden


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("no such thing"), 2),
        (TrainingError("not finite"), 2),
        (OSError(28, "No space left on device", "metrics.jsonl"), 2),
        (CheckpointError("checkpoint 4 cannot be read"), 3),
    ],
)
def test_errors_are_one_line_and_a_code(monkeypatch, capsys, error, code):
    from marl_llm.runs import command

    def fails(argv):
        raise error

    monkeypatch.setattr(command.app, "run", lambda main, flags_parser: main(["train"]))
    with pytest.raises(SystemExit) as end:
        command.run(fails, flags.FlagValues())
    assert end.value.code == code
    assert capsys.readouterr().err == f"error: {error}\n"


def test_other_errors_keep_their_traceback(monkeypatch):
    from marl_llm.runs import command

    def fails(argv):
        raise RuntimeError("a bug")

    monkeypatch.setattr(command.app, "run", lambda main, flags_parser: main(["train"]))
    with pytest.raises(RuntimeError, match="a bug"):
        command.run(fails, flags.FlagValues())


def test_the_first_plays_of_a_run_are_looked_at_once_before_anything_is_learned(tmp_path):
    from marl_llm.reporting import EpisodeError, EpisodeWriter

    looked = []

    class Plays:
        def __init__(self, task):
            self.task = task

        def episodes(self, count, when):
            looked.append((count, when))
            yield dict(episode="e", step=0, when="train", task=self.task, roles={}, status="success", turns=0, steps=[]), None

    files = run_files.RunFiles.__new__(run_files.RunFiles)
    with EpisodeWriter(tmp_path) as files.episodes:
        files._looked = False
        with pytest.raises(EpisodeError, match="task.map"):
            files.looked_at(Plays({"map": "no list"}))
        sound, later = Plays({"size": 3}), Plays({"map": "no list"})
        assert files.looked_at(sound) is sound
        assert files.looked_at(later) is later
    assert looked == [(1, "train")] * 2
    assert (tmp_path / "episodes.jsonl").read_text() == ""


def rates_of(team):
    """Step -> the learning rate that it was learned with."""
    return {entry[1]: entry[2] for entry in team.log if entry[0] == "learn"}


@pytest.mark.parametrize("earlier", [False, True])
def test_a_run_that_goes_on_longer_keeps_its_learning_rate(tmp_path, run, capsys, earlier, monkeypatch):
    config = letters()
    config.steps, config.optimizer.warmup = 4, 0
    before = rates_of(run(config, tmp_path / "run")[1])
    assert before[3] < before[0]
    if earlier:
        restore = loop.restored
        monkeypatch.setattr(loop, "restored", lambda *a: {k: v for k, v in restore(*a).items() if k != "decay_steps"})
    config.steps = 8
    capsys.readouterr()
    after = rates_of(run(config, tmp_path / "run")[1])
    assert after == dict.fromkeys(range(4, 8), pytest.approx(0.05 * config.optimizer.learning_rate))
    assert after[4] < before[3]
    said = [line for line in capsys.readouterr().err.splitlines() if "learning rate" in line]
    assert len(said) == 1
    assert said[0].startswith("note: the learning rate decays until step 4 and then stays at 5 % of its peak; config.optimizer")


def test_the_length_of_the_schedule_is_the_users(tmp_path, run, capsys):
    config = letters()
    config.steps, config.optimizer.warmup, config.optimizer.decay_steps = 4, 0, 8
    peak = config.optimizer.learning_rate = 1e-3
    line = {step: pytest.approx(peak * (1 - 0.95 * step / 8)) for step in range(8)}
    assert rates_of(run(config, tmp_path / "run")[1]) == {step: line[step] for step in range(4)}
    config.steps = 6
    assert rates_of(run(config, tmp_path / "run")[1]) == {step: line[step] for step in (4, 5)}
    assert "the learning rate" not in capsys.readouterr().err
    config.steps, config.optimizer.decay_steps = 8, 16
    assert rates_of(run(config, tmp_path / "run")[1]) == {step: pytest.approx(peak * (1 - 0.95 * step / 16)) for step in (6, 7)}
    assert "note: the learning rate now decays until step 16, before until step 8" in capsys.readouterr().err
