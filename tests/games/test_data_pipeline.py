"""Modelling tasks in DSBench's schema: what a loader refuses, what is measured, and the pipeline of general prompts on them."""

import json
import pathlib

import numpy as np
import pytest

from marl_llm.games import make_game
from marl_llm.games.pipeline.prompts import MAX_LISTED, REQUIRED, data_roles, feedback, list_files, program_and_note
from marl_llm.games.pipeline.runs import limits_for, run_in_workspace
from marl_llm.games.pipeline.tasks import grade_submission, load_manifest, load_modelling_tasks
from marl_llm.games.pipeline.team import pipeline
from marl_llm.tools.sandbox import Limits, Workspace
from marl_llm.tools.sandbox.profiles import Profile
from marl_llm.workflows import ActionView, Assignment, Controller, FormatError, RoleCall, Scripted, ToolUse, WorkflowError
from marl_llm.workflows.metrics import team_metrics
from marl_llm.workflows.rows import DataError
from marl_llm.workflows.storage import read_trajectories, write_trajectories

GOLDEN = pathlib.Path(__file__).parents[1] / "data" / "pipeline_prompts.txt"
MANIFEST = "task,kind,metric,targets,id_column\nprices,regression,rmse,price,Id\npets,classification,accuracy,kind,Id\n"


def table(rows, target, first=0, with_target=True):
    rng = np.random.default_rng(first)
    lines = ["Id,a,b" + (f",{target}" if with_target else "")]
    for i in range(first, first + rows):
        a, b = rng.normal(size=2)
        said = f"{3 * a - b:.3f}" if target == "price" else ("cat" if a + b > 0 else "dog")
        lines.append(f"{i},{a:.4f},{b:.4f}" + (f",{said}" if with_target else ""))
    return "\n".join(lines) + "\n"


def answers(rows, target, first):
    return "\n".join(line.split(",")[0] + "," + line.split(",")[3] for line in table(rows, target, first).split()) + "\n"


def folder(path, names=("prices", "pets"), rows="tasks.jsonl", seed=0, **harm):
    """A folder of tasks; `harm` replaces the content of a file of the first task, or removes it (None)."""
    lines = []
    for place, name in enumerate(names):
        target = "kind" if name.startswith("pets") else "price"
        base = 1000 * (seed + place)
        files = {
            "train": table(40, target, base),
            "test": table(20, target, base + 100, with_target=False),
            "answer": answers(20, target, base + 100),
        }
        if place == 0:
            files |= harm
        (path / name).mkdir(parents=True, exist_ok=True)
        for kind, text in files.items():
            if text is not None:
                (path / name / {"answer": "test_answer.csv"}.get(kind, f"{kind}.csv")).write_text(text)
        meta = {"task_id": name, "train_file": f"{name}/train.csv", "test_file": f"{name}/test.csv", "answer_dir": name}
        lines.append({"prompt": f"Predict the {target}.", "answer": None, "metadata": {**meta, "data_type": "regression", "url": ""}})
    (path / rows).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (path / "reviewed.csv").write_text(MANIFEST)
    return path


def load(path):
    return load_modelling_tasks(path, path / "reviewed.csv")


def test_tasks_are_measured_as_the_reviewed_table_says_and_answers_stay_hidden(tmp_path):
    prices, pets = load(folder(tmp_path))
    assert (prices.stratum, pets.stratum) == ("regression", "classification")
    assert pets.fields["targets"] == ("kind",)
    assert sorted(prices.fields["given"].sizes()) == ["test.csv", "train.csv"]
    assert set(prices.hidden) == {"answers"}
    assert set(prices.hidden["answers"].to_json()) == {"answers_sha256", "rows"}
    assert set(pets.hidden["answers"].columns["kind"]) == {"cat", "dog"}


NUMBERS = "1,2,3,4\n" + table(3, "price").partition("\n")[2]
REFUSED = {
    "no training table": (dict(train=None), r"'prices'.*no file .*train\.csv"),
    "no answers": (dict(answer=None), r"'prices'.*no file .*test_answer\.csv"),
    "no header": (dict(train=NUMBERS), r"'prices'.*train\.csv has no header"),
    "an empty table": (dict(test=""), r"'prices'.*test\.csv has no header"),
    "a row cut off": (dict(train=table(3, "price") + "7,1\n"), r"'prices'.*train\.csv, row 5, has 2 values"),
    "ids twice": (dict(test="Id,a\n1,2\n1.0,3\n"), r"'prices'.*id column 'Id' of .*test\.csv is not unique: '1'"),
    "no id column": (dict(test="key,a\n1,2\n"), r"'prices'.*test\.csv lacks the id column 'Id'"),
    "answers to other ids": (dict(answer="Id,price\n1,2\n2,3\n"), r"'prices'.*test_answer\.csv answers other ids"),
    "answers in the test table": (dict(test=table(20, "price", 100)), r"'prices'.*test\.csv holds the target 'price'"),
    "a target of one value": (dict(train="Id,price\n1,2\n2,2\n"), r"'prices'.*'price' of .*train\.csv has 1 different values"),
    "answers of one value": (dict(answer=answers(20, "price", 100).partition("\n")[0] + "".join(f"\n{i},1" for i in range(100, 120))),
                             "1 different answers; rmse needs at least two"),
    "answers in words": (dict(answer=answers(20, "price", 100).replace("\n100,", "\n100,about ")), "no value that rmse can take"),
    "no target": (dict(train="Id,a\n1,2\n2,3\n"), r"train\.csv lacks the target 'price'"),
}  # fmt: skip


@pytest.mark.parametrize("fault", REFUSED)
def test_a_task_whose_files_cannot_be_used_is_refused_by_name_and_file(tmp_path, fault):
    harm, message = REFUSED[fault]
    with pytest.raises(DataError, match=message):
        load(folder(tmp_path, **harm))


def test_a_task_that_nobody_reviewed_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"'price' .* is not in the manifest .*did you mean 'prices'\? Review what it predicts"):
        load(folder(tmp_path, names=("price",)))
    with pytest.raises(DataError, match="comes twice"):
        load(folder(tmp_path, names=("pets", "pets")))
    path = folder(tmp_path)
    (path / "tasks.jsonl").write_text((path / "tasks.jsonl").read_text().replace("prices/train.csv", "../secret.csv"))
    with pytest.raises(DataError, match="lies outside of"):
        load(path)
    with pytest.raises(DataError, match="holds? .*bytes, 0.0001 MiB are allowed"):
        load_modelling_tasks(folder(tmp_path), tmp_path / "reviewed.csv", table_mb=0.0001)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("a,regression,accuracy,y,Id", "line 2, task 'a': accuracy measures classification"),
        ("a,regression,mse,y,Id", "metric one of accuracy, f1, auc, mae, rmse"),
        ("a,regression,mae,,Id", "targets and id_column must be given"),
        ("a,regression,mae,y,Id\na,regression,mae,y,Id", "line 3, task 'a': it is there twice"),
        ("a,regression,mae", "has 3 values"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(tmp_path, line, message):
    (tmp_path / "m.csv").write_text(f"task,kind,metric,targets,id_column\n{line}\n")
    with pytest.raises(DataError, match=message):
        load_manifest(tmp_path / "m.csv")


def test_a_submission_is_graded_by_id_and_labels_are_labels(tmp_path):
    for task in load(folder(tmp_path)):
        target, hidden = task.fields["targets"][0], task.hidden["answers"]
        right = f"{target},Id\n" + "".join(f"{v},{i}\n" for i, v in reversed(list(zip(hidden.ids, hidden.columns[target]))))
        grade = {name: task.fields[name] for name in ("kind", "metric", "targets", "id_column")} | {"answers": hidden}
        found = grade_submission(Workspace.from_files({"submission.csv": right}), **grade)
        best = {"accuracy": 1.0, "f1": 1.0} if target == "kind" else {"mae": 0.0, "rmse": 0.0}
        assert (found["raw"], found["problem"], found["measured"]) == (best, "", tuple(best))
        assert grade_submission(Workspace(), **grade)["problem"] == "missing"


def test_limits_follow_from_the_tables_and_a_task_beyond_them_never_starts():
    assert limits_for(10 << 20, 60).disk_mb == 124
    with pytest.raises(ValueError, match="tables hold 500 MiB and need"):
        limits_for(500 << 20)


# --- the roles ----------------------------------------------------------------------------------------------------------------------------

STATE = {
    "task_text": "Predict the price.", "metric": "rmse", "id_column": "Id", "targets": ("price",),
    "listing": "- train.csv (1,200 bytes)\n- test.csv (600 bytes)", "warning": "Files of earlier roles are missing: X_test.pkl.",
    "note_engineer": "I filled gaps.", "note_modeler": "A forest.", "last": "print(1)", "printed": "1",
}  # fmt: skip


def test_the_prompts_are_the_golden_ones():
    bare = STATE | {"warning": "", "note_engineer": "", "note_modeler": "", "last": "", "printed": ""}
    texts = [
        f"===== {role.name}, {name}, {message.role}\n{message.content}"
        for role in data_roles() for name, state in (("first turn", bare), ("second turn", STATE)) for message in role.messages(state)
    ]  # fmt: skip
    assert "\n".join(texts) + "\n" == GOLDEN.read_text()


def test_a_response_is_one_program_and_a_short_note():
    parse = program_and_note("modeler")
    found = parse("I fit a forest.\n```python\nprint(1)\n```\nDone.")
    assert found == {"code": "print(1)\n", "note_modeler": "I fit a forest."}
    assert len(parse("x" * 5000 + "\n```python\nprint(1)\n```")["note_modeler"]) == 1001
    for text in ("no block", "```python\na\n```\n```python\nb\n```"):
        with pytest.raises(FormatError):
            parse(text)


def test_a_listing_is_short_whatever_files_are_called():
    files = Workspace.from_files({f"{i}\nSCORE: 10\n" + "x" * 200: "" for i in range(200)})
    shown = list_files(files).splitlines()
    assert len(shown) == MAX_LISTED + 1
    assert shown[-1] == "- and 160 more"
    assert max(map(len, shown)) < 120
    assert list_files(Workspace()) == "none"


def test_a_distribution_that_is_not_installed_is_no_error_where_it_is_optional():
    assert Profile("a", (), ("numpy",), (), ("no-such-distribution",)).entries() == Profile("b", (), ("numpy",)).entries()


PROGRAMS = {
    "engineer": """import pandas as pd
train, test = pd.read_csv("train.csv"), pd.read_csv("test.csv")
target = train.columns[-1]
train[["a", "b"]].to_pickle("X_train.pkl"); train[target].to_pickle("y_train.pkl"); test[["a", "b"]].to_pickle("X_test.pkl")""",
    "modeler": """import pandas as pd, joblib
from sklearn.linear_model import LinearRegression, LogisticRegression
x, y = pd.read_pickle("X_train.pkl"), pd.read_pickle("y_train.pkl")
joblib.dump((LinearRegression() if y.dtype.kind == "f" else LogisticRegression()).fit(x, y), "model.pkl")""",
    "analyst": """import pandas as pd, joblib
target = pd.read_csv("train.csv").columns[-1]
said = joblib.load("model.pkl").predict(pd.read_pickle("X_test.pkl"))
pd.DataFrame({"Id": pd.read_csv("test.csv").Id, target: said}).to_csv("submission.csv", index=False)""",
}


def test_a_whole_play_with_pandas_from_the_files_to_the_grade(tmp_path):
    folder(tmp_path, names=("prices", "pets", "prices2", "pets2", "prices3"), rows="train.jsonl")
    folder(tmp_path, names=("prices4", "pets3"), rows="test.jsonl", seed=50)
    more = "".join(MANIFEST.split("\n")[1 + (i % 2)].replace(",", f"{2 + i // 2},", 1) + "\n" for i in range(6))
    (tmp_path / "reviewed.csv").write_text(MANIFEST + more)
    options = dict(folder=str(tmp_path), manifest=str(tmp_path / "reviewed.csv"))
    environment = make_game("data_pipeline", **options)
    seen = []

    def play(turn):
        if turn.role.name == "modeler" and not turn.fields["last"]:
            return "First try.\n```python\nraise KeyError('Price')\n```"
        seen.append(turn.messages[-1].content)
        return f"I do my part.\n```python\n{PROGRAMS[turn.role.name]}\n```"

    cast = Assignment(dict.fromkeys(environment.workflow.roles, "script"), {"script": Scripted(play)})
    with Controller(environment.workflow, cast, None, {}) as controller:
        rollout = controller.play(environment.tasks("test", 0, 2), 0)
    found = team_metrics(rollout)
    assert found["success"] == [1.0, 1.0], [episode.trajectories[0].fields["printed"] for episode in rollout.episodes]
    assert found["raw_rmse"][0] < 0.01
    assert found["fair_accuracy"][0] > 0.9
    assert [call.role for call in rollout.trajectories[0].calls] == ["engineer", "modeler", "modeler", "analyst"]
    assert "KeyError: 'Price'" in next(text for text in seen if "the modeler's program" in text)
    write_trajectories(tmp_path / "run", rollout)
    (line, _) = read_trajectories(tmp_path / "run")
    assert set(line["task"]["hidden"]["answers"]) == {"answers_sha256", "rows"}
    assert environment.guide.rubric is None
    assert REQUIRED["modeler"] == ("model.pkl",)
    with pytest.raises(DataError, match="'prices3' of train.jsonl.* is, or has the table of, task 'prices3' of train.jsonl"):
        make_game("data_pipeline", **options, test="train.jsonl")


def test_what_a_coach_reads_of_a_run_comes_from_the_folder_and_not_from_what_was_printed():
    after = Workspace.from_files({"train.csv": "a", "X_train.pkl": "b"})
    wrote = {"state": "ok", "files": after, "missing": ("X_test.pkl",), "printed": "saved X_test.pkl"}
    use = ToolUse("run_engineer:0:0", "run_engineer", (), 1, 0, (), 0, wrote)
    roles, none = data_roles(), np.zeros(0, np.int32)
    about = dict(id="c", node="engineer", role="engineer", agent=0, model="m", parents=(), turn=1, request_number=0, items=(), group="g")
    about |= dict(choice=0, branch=0, seed=(), prompt="", prompt_ids=(), text="", tokens=none, log_probs=None, sampled_log_probs=None)
    call = RoleCall(**about, finish="stop", version=0, writes={}, illegal=None)
    before = {"files": Workspace.from_files({"train.csv": "a"})}
    view = ActionView("w", roles[0], call, {}, before=before, observations=(use,))
    text = feedback(view)
    assert "Files that it wrote: X_train.pkl." in text
    assert "still missing: X_test.pkl" in text


def test_a_world_without_files_says_what_is_missing():
    with pytest.raises(ValueError, match="folder and manifest must be given"):
        make_game("data_pipeline")
    with pytest.raises(WorkflowError, match="three numbers of turns above 0"):
        pipeline("x", data_roles(), REQUIRED, run_in_workspace("bare", Limits()), grade_submission, turns=(1, 1))
