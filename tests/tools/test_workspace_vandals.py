"""What a program does to its workspace is its own outcome: never a failure of the infrastructure, and never anyone else's loss."""

import os
import subprocess
import sys

import pytest

from marl_llm.tools.sandbox import Limits, Sandbox, Submission, Workspace
from marl_llm.tools.sandbox.inside import zygote

# program, and what is to become of the workspace: the file `kept` is in it, or why it is lost
VANDALS = {
    "no rights on the folder": ("os.chmod('.', 0)", "kept"),
    "no rights on a tree": ("os.makedirs('a/b'); open('a/b/f', 'w').close()\nfor p in ('a/b/f', 'a/b', 'a'): os.chmod(p, 0)", "kept"),
    "no rights on a file": ("os.chmod('kept', 0)", "kept"),
    "odd modes": ("os.mkdir('d'); os.chmod('d', 0o7777); os.chmod('kept', 0o6111); os.chmod('.', 0o1000)", "kept"),
    "deep": ("for _ in range(1500): os.mkdir('d'); os.chdir('d')", "unreadable"),
    "deep with long names": ("for _ in range(60): os.mkdir('d' * 255); os.chdir('d' * 255)", "unreadable"),
    "deep and without rights": (
        "for _ in range(700): os.mkdir('d'); os.chdir('d')\nfor _ in range(700): os.chdir('..'); os.chmod('d', 0)",
        "unreadable",
    ),
    "as deep as may be": ("os.makedirs('/'.join('d' * 498))", "kept"),
    "names": ("for name in (b'\\xff\\xfe', b'a\\nb', b'-rf', b' ', b'\\xed\\xa0\\x80', b'x' * 255): open(name, 'w').close()", "kept"),
    "links": ("os.symlink('.', 'self'); os.symlink('/', 'root'); os.symlink('x' * 4000, 'long'); os.symlink('loop', 'loop')", "kept"),
    "sparse": ("for n in range(40): open(str(n), 'w').truncate(4 << 20)", "too large"),
    "a huge sparse file": ("try: open('s', 'w').truncate(1 << 50)\nexcept OSError: open('s', 'w').truncate(20 << 20)", "kept"),
    "hard links": ("open('f', 'w').write('x' * (1 << 20))\nfor n in range(100): os.link('f', str(n))", "too large"),
    "hard links of part pages": ("open('f', 'w').write('x' * 16700)\nfor n in range(3900): os.link('f', str(n))", "too large"),
    "entries": ("try:\n    for n in range(100000): open(str(n), 'w').close()\nexcept OSError: pass", "kept"),
    "fifos, sockets": ("os.mkfifo('p'); socket.socket(socket.AF_UNIX).bind('s'); os.mkdir('d'); os.mkfifo('d/p')", "kept"),
    "the folder moved": ("try: os.rename('/box/work', '/box/tmp/w')\nexcept OSError: pass\nos.symlink('/usr', '/box/tmp/l')", "kept"),
    "late writers": (
        "for n in range(4):\n    if os.fork() == 0:\n        os.setsid()\n        while True: open(str(n), 'a').write('x'); os.utime('.')",
        "kept",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(workers=1, limits=Limits(timeout_s=30)) as made:
        yield made


@pytest.mark.parametrize("name", VANDALS)
def test_a5_vandalism_is_the_program_s_own_outcome(name, sandbox):
    code, fate = VANDALS[name]
    lost_before = sandbox.metrics()["sandbox/zygotes_lost"]
    done = sandbox.run(Submission("import os, socket\n" + code, workspace=Workspace.from_files({"kept": "mine"})))
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
