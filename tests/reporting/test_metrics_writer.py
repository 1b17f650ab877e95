"""metrics.jsonl: valid JSON whatever the values, exact after a kill and a resume, loud when the disk is full."""

import errno
import importlib
import importlib.util
import json
import math
import os
import pathlib
import sys

import numpy as np
import pytest

from marl_llm.reporting import LineError, MetricsWriter, Tracker, WriteError, files, read_metrics


def train(step, **figures):
    return {"phase": "train", "step": step, **figures}


def tensorboard_scalars(workdir):
    """(tag, step) → value of every event file, read with TensorBoard's own record format."""
    from tensorboardX.proto import event_pb2

    found = {}
    for path in sorted((workdir / "tensorboard").glob("events.*")):
        data = path.read_bytes()
        while data:
            size = int.from_bytes(data[:8], "little")
            event = event_pb2.Event.FromString(data[12 : 12 + size])
            found |= {(value.tag, event.step): value.simple_value for value in event.summary.value}
            data = data[16 + size :]
    return found


def test_lines_hold_what_was_written(tmp_path):
    record = train(np.int64(3), success=np.float32(0.5), **{"role/tool/reward": 1.25}, n=7, done=True, note="a/b")
    with MetricsWriter(tmp_path / "deep" / "run") as writer:
        writer.write(record)
    (line,) = read_metrics(tmp_path / "deep" / "run")
    assert line == {"phase": "train", "step": 3, "success": 0.5, "role/tool/reward": 1.25, "n": 7, "done": True, "note": "a/b"}


def test_a_line_can_be_read_before_the_file_is_closed(tmp_path):
    writer = MetricsWriter(tmp_path, tensorboard=False)
    writer.write(train(1))
    assert [r["step"] for r in read_metrics(tmp_path)] == [1]
    writer.close()
    writer.close()
    with pytest.raises(ValueError, match="closed"):
        writer.write(train(2))


def test_non_finite_values_become_null_and_are_named(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(train(1, loss=math.nan, norm=np.float32("inf"), fine=1.0))
    text = (tmp_path / "metrics.jsonl").read_text()

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    line = json.loads(text, parse_constant=refuse)
    assert line == {"phase": "train", "step": 1, "loss": None, "norm": None, "fine": 1.0, "non_finite": ["loss", "norm"]}
    scalars = tensorboard_scalars(tmp_path)
    assert math.isnan(scalars["train/loss", 1])
    assert scalars["train/norm", 1] == math.inf


@pytest.mark.parametrize(
    ("record", "error", "words"),
    [
        ({"step": 1}, ValueError, "phase.*sft, train, eval"),
        ({"phase": "training", "step": 1}, ValueError, "phase"),
        ({"phase": "train"}, ValueError, "step"),
        ({"phase": "train", "step": -1}, ValueError, "step"),
        ({"phase": "train", "step": 1.5}, ValueError, "step"),
        ({"phase": "train", "step": True}, ValueError, "step"),
        ({"phase": "train", "step": 1, "non_finite": "x"}, ValueError, "non_finite"),
        ({"phase": "train", "step": 1, "reward": None}, TypeError, "reward"),
        ({"phase": "train", "step": 1, "reward": [1.0, 2.0]}, TypeError, "reward"),
    ],
)
def test_a_bad_record_is_refused_and_leaves_no_line(tmp_path, record, error, words):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        with pytest.raises(error, match=words):
            writer.write(record)
        writer.write(train(1))
    assert len(read_metrics(tmp_path)) == 1


def test_resumed_file_equals_the_uninterrupted_one(tmp_path):
    def run(workdir, first, last, **options):
        with MetricsWriter(workdir, **options) as writer:
            if first == 1:
                for step in range(1, 9):
                    writer.write({"phase": "sft", "step": step, "loss": 1 / step})
            for step in range(first, last + 1):
                writer.write(train(step, success=step / 10))
                if step % 2 == 0:
                    writer.write({"phase": "eval", "step": step, "success": step / 10})

    run(tmp_path / "whole", 1, 6)
    run(tmp_path / "killed", 1, 5)
    with open(tmp_path / "killed" / "metrics.jsonl", "a") as file:
        file.write('{"phase": "train", "step": 6, "succ')  # the line that a kill tore
    run(tmp_path / "killed", 4, 6, resume_step=3)
    name = "metrics.jsonl"
    assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert tensorboard_scalars(tmp_path / "killed") == tensorboard_scalars(tmp_path / "whole")


def test_resume_from_nothing_starts_over(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write({"phase": "sft", "step": 1, "loss": 2.0})
    with MetricsWriter(tmp_path, resume_step=-1) as writer:
        writer.write(train(1))
    assert [r["phase"] for r in read_metrics(tmp_path)] == ["train"]
    assert all(not tag.startswith("sft") for tag, _ in tensorboard_scalars(tmp_path))


def test_a_run_that_goes_on_from_step_0_keeps_its_warm_up_and_its_first_evaluation(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write({"phase": "sft", "step": 5, "loss": 2.0})
        writer.write({"phase": "eval", "step": 0, "success": 0.5})
        writer.write(train(1))
    with MetricsWriter(tmp_path, resume_step=0):
        pass
    assert [(r["phase"], r["step"]) for r in read_metrics(tmp_path)] == [("sft", 5), ("eval", 0)]


def test_a_second_writer_appends(tmp_path):
    for step in (1, 2):
        with MetricsWriter(tmp_path) as writer:
            writer.write(train(step, success=0.5))
    assert [r["step"] for r in read_metrics(tmp_path)] == [1, 2]
    assert {step for _, step in tensorboard_scalars(tmp_path)} == {1, 2}


@pytest.mark.parametrize("torn", ['{"phase": "train", "st', '{"phase": "tr\udcff', "x" * 200_000])
def test_a_torn_last_line_is_left_out_and_cut_off(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"phase": "train", "step": 1}\n' + torn.encode("utf-8", "surrogateescape"))
    assert [r["step"] for r in read_metrics(path)] == [1]
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(train(2))
    assert [r["step"] for r in read_metrics(path)] == [1, 2]


def test_a_whole_last_line_without_newline_is_kept(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"phase": "train", "step": 1}')
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(train(2))
    assert [r["step"] for r in read_metrics(tmp_path)] == [1, 2]


@pytest.mark.parametrize("bad", ["not json", "[1, 2]"])
def test_a_damaged_line_in_the_middle_is_named_and_nothing_is_rewritten(tmp_path, bad):
    path = tmp_path / "metrics.jsonl"
    text = f'{{"phase": "train", "step": 1}}\n{bad}\n{{"phase": "train", "step": 3}}\n'
    path.write_text(text)
    with pytest.raises(LineError, match="metrics.jsonl, line 2: "):
        read_metrics(path)
    with pytest.raises(LineError, match="line 2"):
        MetricsWriter(tmp_path, resume_step=1)
    assert path.read_text() == text


def test_no_file_is_said(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_metrics(tmp_path)


def full_disk_after(limit, monkeypatch):
    """os.write that takes `limit` bytes in all, the last of them in a short write, and then says that the disk is full."""
    real, left = os.write, [limit]

    def write(fd, data):
        if left[0] == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = real(fd, bytes(data)[: left[0]])
        left[0] -= count
        return count

    monkeypatch.setattr(files.os, "write", write)


def test_full_disk_is_an_error_that_names_the_file_and_leaves_no_half_line(tmp_path, monkeypatch):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(train(1))
        before = (tmp_path / "metrics.jsonl").read_bytes()
        with monkeypatch.context() as patch:
            full_disk_after(10, patch)
            with pytest.raises(WriteError, match="disk is full.*free some space") as caught:
                writer.write(train(2))
        assert caught.value.errno == errno.ENOSPC
        assert caught.value.filename == str(tmp_path / "metrics.jsonl")
        assert (tmp_path / "metrics.jsonl").read_bytes() == before
        writer.write(train(2))  # space was freed
    assert [r["step"] for r in read_metrics(tmp_path)] == [1, 2]


def test_a_short_write_is_continued(tmp_path, monkeypatch):
    real = os.write
    monkeypatch.setattr(files.os, "write", lambda fd, data: real(fd, bytes(data)[:7]))
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(train(1, success=0.25))
    assert read_metrics(tmp_path) == [train(1, success=0.25)]


@pytest.mark.skipif(not pathlib.Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_the_kernels_own_full_device(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        with pytest.raises(WriteError, match="disk is full") as caught:
            writer.write(train(1))
    assert caught.value.errno == errno.ENOSPC


def test_full_disk_while_resuming_keeps_the_old_file(tmp_path, monkeypatch):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        for step in (1, 2, 3):
            writer.write(train(step))
    before = (tmp_path / "metrics.jsonl").read_bytes()

    def refuse(fd):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, "fsync", refuse)
    with pytest.raises(WriteError, match="disk is full"):
        MetricsWriter(tmp_path, resume_step=1, tensorboard=False)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_full_disk_under_tensorboard_is_an_error_too(tmp_path, monkeypatch):
    from tensorboardX.event_file_writer import EventsWriter

    def refuse(self, event):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with MetricsWriter(tmp_path) as writer:
        with monkeypatch.context() as patch:
            patch.setattr(EventsWriter, "write_event", refuse)
            with pytest.raises(WriteError, match="disk is full.*tensorboard"):
                writer.write(train(1, success=1.0))
    assert [r["step"] for r in read_metrics(tmp_path)] == [1]


def test_a_work_directory_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(WriteError) as caught:
        MetricsWriter(tmp_path / "run")
    assert caught.value.filename == str(tmp_path / "run" / "metrics.jsonl")


# --- Weights & Biases and trackio, by a module that stands in for them ----------------------------------------------------------------

STAND_IN = """
import json, pathlib
calls = []
def init(**named): calls.append(("init", named))
def log(figures): calls.append(("log", figures)); assert "train/bad" not in figures, "the disk is full"
def finish(): calls.append(("finish", None))
"""


@pytest.fixture(params=["wandb", "trackio"])
def stand_in(request, tmp_path, monkeypatch):
    folder = tmp_path / "packages"
    folder.mkdir()
    (folder / f"{request.param}.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, request.param, raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    yield request.param, importlib.import_module(request.param)
    sys.modules.pop(request.param, None)


def test_a_tracker_gets_every_figure_by_its_name_and_offline_unless_told(stand_in, tmp_path):
    kind, package = stand_in
    run = tmp_path / "group" / "run"
    with MetricsWriter(run, tensorboard=False, tracker=Tracker(kind, run, {"steps": 3})) as metrics:
        metrics.write({"phase": "train", "step": 1, "role/tool/reward": 0.5, "note": "text"})
        metrics.write({"phase": "eval", "step": 1, "success": 0.25})
    (first, named), *logged, last = package.calls
    assert (first, last) == ("init", ("finish", None))
    assert named["name"].startswith("run-")
    assert (named["group"], named["config"], named["resume"]) == ("group", {"steps": 3}, "allow")
    assert kind != "wandb" or (named["mode"], named["dir"], named["id"]) == ("offline", str(run), named["name"])
    assert [figures for _, figures in logged] == [
        {"train/role/tool/reward": 0.5, "train/step": 1}, {"eval/success": 0.25, "eval/step": 1},
    ]  # fmt: skip


def test_a_run_that_goes_on_keeps_its_entry_and_another_run_of_the_same_name_gets_its_own(stand_in, tmp_path):
    kind, package = stand_in
    for place in ("here", "here", "there"):
        Tracker(kind, tmp_path / place / "group" / "run", {}).close()
    first, again, other = [named["name"] for name, named in package.calls if name == "init"]
    assert first == again != other


def test_a_tracker_that_fails_is_told_once_and_costs_the_run_nothing(stand_in, tmp_path, capsys):
    kind, package = stand_in
    with MetricsWriter(tmp_path, tensorboard=False, tracker=Tracker(kind, tmp_path, {})) as metrics:
        for step in (1, 2, 3):
            metrics.write({"phase": "train", "step": step, "bad" if step == 2 else "good": 1.0})
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3]
    assert capsys.readouterr().err == f"{kind} failed and is left out from here on: AssertionError: the disk is full\n"
    assert [name for name, _ in package.calls] == ["init", "log", "log"]


def test_a_tracker_that_cannot_be_had_is_refused_with_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"logger='wandb' needs its package: pip install 'marl_llm\[wandb\]'"):
        Tracker("wandb", tmp_path, {})
    with pytest.raises(ValueError, match="logger='mlflow' is none of wandb, trackio"):
        Tracker("mlflow", tmp_path, {})


def test_a_torn_last_line_hides_no_fault_before_it(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nnot json\n{"step": 3}\n{"step": 4')
    objects, faults = files.read_lines(path)
    assert [one["step"] for one in objects] == [1, 3]
    assert ["line 2: not JSON" in fault for fault in faults] == [True]
