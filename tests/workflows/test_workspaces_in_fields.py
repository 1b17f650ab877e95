"""A field that holds a workspace: the line has its digest, its content lies once beside it, and a replay starts from the same files."""

import json

import pytest
from wordy import SPEECH, Says

from marl_llm.tools.sandbox import Workspace
from marl_llm.workflows import Controller, Role, Task, Workflow, WorkflowError, compute, plain, sequence, shared, tool
from marl_llm.workflows.replay import replay
from marl_llm.workflows.samples import sample_table
from marl_llm.workflows.storage import FOLDER_NAME, from_json, read_trajectories, report_episodes, write_trajectories

START = Workspace.from_files({"train.csv": "id,a\n1,2\n"})
CLAIM = {"workspace_sha256": START.digest, "files": {}, "inner": [{"workspace_sha256": None}]}
CODE = plain("code")


def team(parse=CODE):
    def work(files, code):
        return {"files": Workspace.from_files({**files.files(), "out.txt": "ran"}), "kept": (files, files)}

    sizes = compute(lambda files: sum(files.sizes().values()), "size", name="measure")
    coder = Role("coder", "{files} go", parse, {"code": ""})
    begin = compute(lambda given: given, "files", name="begin")
    body = sequence(begin, coder, tool(work, ("files", "kept"), name="work"), sizes, Role("reader", "{files}", plain("said"), {"said": ""}))
    return Workflow("w", body, inputs=("given",))


def play(workflow, n=2, plays=2):
    tasks = [Task(i, {"given": START}) for i in range(n)]
    with Controller(workflow, shared(workflow), Says(lambda prompt, request: "print ( 1 )"), SPEECH) as controller:
        return controller.play(tasks, 3, plays=plays)


def test_a_line_has_digest_names_and_sizes_and_the_content_lies_once_beside_it(tmp_path):
    rollout = play(team())
    write_trajectories(tmp_path, rollout)
    write_trajectories(tmp_path, rollout, "after")
    after = rollout.episodes[0].trajectories[0].fields["files"]
    line = read_trajectories(tmp_path)[0]
    assert line["task"]["fields"]["given"] == {"workspace_sha256": START.digest, "files": {"train.csv": 9}}
    assert line["events"][2]["writes"]["files"]["files"] == {"train.csv": 9, "out.txt": 3}
    assert sorted(path.name for path in (tmp_path / FOLDER_NAME).iterdir()) == sorted({START.digest, after.digest})
    assert "train.csv (9 bytes), out.txt (3 bytes)" in line["events"][4]["prompt"]


def test_a_play_with_files_replays_from_its_record(tmp_path):
    rollout = play(team())
    write_trajectories(tmp_path, rollout)
    line = read_trajectories(tmp_path)[1]
    assert from_json(line, tmp_path).trajectories[0].fields == rollout.episodes[1].trajectories[0].fields
    again = replay(line, team(), shared(team()), SPEECH, plays=2, folder=tmp_path)
    assert again.trajectories[0].fields["files"] == rollout.episodes[1].trajectories[0].fields["files"]
    with pytest.raises(WorkflowError, match="give the folder of its file"):
        from_json(line)


@pytest.mark.parametrize("harm", ["missing", "another"])
def test_content_that_is_missing_or_another_is_an_error_that_says_so(tmp_path, harm):
    write_trajectories(tmp_path, play(team(), 1, 1))
    path = tmp_path / FOLDER_NAME / START.digest
    path.unlink() if harm == "missing" else path.write_bytes(b"")
    with pytest.raises(WorkflowError, match="keep the folder workspaces" if harm == "missing" else "does not hold what its name says"):
        from_json(read_trajectories(tmp_path)[0], tmp_path)


def test_what_a_policy_says_is_never_taken_for_a_workspace(tmp_path):
    rollout = play(team(lambda text: {"code": CLAIM}), 1, 1)
    write_trajectories(tmp_path, rollout)
    path = from_json(read_trajectories(tmp_path)[0], tmp_path).trajectories[0]
    assert path.fields["code"] == {**CLAIM, "inner": ({"workspace_sha256": None},)}


def test_a_damaged_snapshot_is_written_and_read_as_it_is(tmp_path):
    broken = Workspace(b"f\xff\xff")
    workflow = Workflow("w", sequence(Role("a", "{files}", plain("x"), {"x": ""})), inputs=("files",))
    with Controller(workflow, shared(workflow), Says(lambda prompt, request: "hm"), SPEECH) as controller:
        rollout = controller.play([Task(0, {"files": broken})], 0)
    write_trajectories(tmp_path, rollout)
    assert from_json(read_trajectories(tmp_path)[0], tmp_path).task.fields["files"] == broken
    reported, _ = next(iter(report_episodes(rollout, sample_table(rollout))))
    assert json.loads(json.dumps(reported))["task"]["files"]["files"] == {}
