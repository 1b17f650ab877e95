"""What a program does to its workspace is its own outcome: never a failure of the infrastructure, and never anyone else's loss."""

import os
import pathlib
import subprocess
import sys

import pytest

from marl_llm.tools.sandbox import Limits, Sandbox, Submission, Workspace
from marl_llm.tools.sandbox.inside import zygote

ATTACKS = pathlib.Path(__file__).resolve().parents[1] / "data" / "sandbox" / "attacks"
VANDALS = {path.stem: path.read_text() for path in sorted(ATTACKS.glob("w*.txt"))}


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(workers=1, limits=Limits(timeout_s=30)) as made:
        yield made


@pytest.mark.parametrize("name", VANDALS)
def test_a5_vandalism_is_the_program_s_own_outcome(name, sandbox):
    code = VANDALS[name]
    fate = code.splitlines()[1].removeprefix(
        "# check: workspace "
    )  # `kept` is in it, or why it is lost
    lost_before = sandbox.metrics()["sandbox/zygotes_lost"]
    done = sandbox.run(Submission(code, workspace=Workspace.from_files({"kept": "mine"})))
    program = done.outcome()
    assert (program.exit_code, done.attempts) == (0, 1), program.stderr
    assert sandbox.metrics()["sandbox/zygotes_lost"] == lost_before
    if fate != "kept":
        assert (program.workspace, program.workspace_lost) == (None, fate)
        return
    files = program.workspace.files()
    assert (files["kept"], program.workspace_lost) == (b"mine", "")
    "".join(files).encode()
    again = "import os\nos.chmod('.', 0o755); os.chmod('kept', 0o644)\nprint(open('kept').read())"
    after = sandbox.run(Submission(again, workspace=program.workspace))
    assert (after.stdout, after.attempts) == ("mine\n", 1)  # what is kept can be started from


def test_a5_a_scratch_folder_is_emptied_whatever_it_holds(tmp_path):
    """Below NAMESPACES. A folder of the host that a link names is not touched."""
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("mine")
    root = tmp_path / "scratch" / "box"
    root.mkdir(parents=True)
    zygote.make_folders(str(root))
    make = (
        "import os, sys\nos.chdir(sys.argv[1])\nos.symlink(sys.argv[2], 'work/link'); os.symlink(sys.argv[2], 'link')\n"
        "os.chdir('tmp')\nfor _ in range(1500): os.mkdir('d'); open('f', 'w').close(); os.chdir('d')\n"
        "for _ in range(1500): os.chdir('..'); os.chmod('d', 0)\nos.mkdir('0'); os.mkdir('1'); os.mkfifo('p')\n"
        "os.chdir('..'); os.mkdir('0'); os.rmdir('shm'); os.symlink(sys.argv[2], 'shm'); os.chmod('.', 0)"
    )
    subprocess.run([sys.executable, "-c", make, str(root), str(precious)], check=True)
    zygote.wipe(str(root))
    assert sorted(os.listdir(root)) == ["tmp", "work"]
    assert [os.listdir(root / name) for name in ("tmp", "work")] == [[], []]
    zygote.make_folders(str(root))
    os.rename(root, tmp_path / "scratch" / "old")
    os.symlink(precious, root)
    zygote.wipe(str(root))
    assert os.listdir(precious) == ["file"]
