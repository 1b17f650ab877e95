"""A person's own program, started once per episode: as the person would start it, with limits, and so that nothing of it stays behind.

No shell reads anything, and nothing that a model says is run here. Every process of an episode carries the episode's address in its
environment; when the episode ends all that carry it are killed, also those that left their process group. A second process waits for the
end of this one, however it ends, and kills what is left of all episodes. Where there is no `/proc`, process groups alone are killed.

This file is that second process's program too: it imports nothing of the library.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import pathlib
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

TAIL_BYTES, TAIL_LINES = 4096, 3  # of standard error, that are kept
MOST_TASK = 100_000  # bytes of a task in an environment variable; Linux takes 131,072
EPISODE, RUN = "MARL_EPISODE_URL", "MARL_RUN"
ROUNDS = 40  # of looking for processes that end, each 5 ms
END_S = 1.0  # for standard error to close once all that held it were killed


class CommandFailed(RuntimeError):
    """The program ended with an error; the message says which."""


class CommandProgram:
    """Plays an episode by running a command to its end.

    The program finds the base URL and the key of its models in `OPENAI_BASE_URL` and `OPENAI_API_KEY`, the episode's address in
    `MARL_EPISODE_URL` (`/task`, `/reward`), and its task as JSON in `MARL_TASK` if it is at most 100 kB. It posts its reward itself.

    Args:
      command: program and arguments; `{task}` stands for the task as JSON, `{name}` for one of its fields.
      folder: where it is started.
    """

    def __init__(self, command: Sequence[str], folder: str):
        self._command, self._folder, self._guard = tuple(command), folder, Guard()

    async def __call__(self, task: Any, client: Any) -> None:
        """Runs one episode. Raises `CommandFailed` for an exit code that is not 0, and `OSError` where it cannot be started."""
        self._guard.start()
        mark = f"{EPISODE}={client.episode_url}"
        text = json.dumps(task)
        added = {"OPENAI_BASE_URL": client.base_url, "OPENAI_API_KEY": client.api_key, "MARL_TASK": text}
        added |= dict(entry.split("=", 1) for entry in (mark, self._guard.mark))
        if len(text.encode()) > MOST_TASK:
            del added["MARL_TASK"]
        process, (reader, writer) = None, os.pipe()  # not asyncio's own, which waits until children of the program close it too
        tail = asyncio.create_task(_last_lines(open(reader, "rb", buffering=0)))
        try:
            process = await asyncio.create_subprocess_exec(
                *fill_in(self._command, task), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=writer,
                cwd=self._folder, env={**os.environ, **added}, start_new_session=True,
            )  # fmt: skip
            code = await process.wait()
        finally:
            os.close(writer)
            if process is not None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
            end_marked(mark)
            done, _ = await asyncio.wait({tail}, timeout=END_S)
            client.notes.extend(f"its stderr ends: {stderr.result()}" for stderr in done if stderr.result())
            tail.cancel()
        check_code(code)

    def close(self) -> None:
        """Ends what is left of any episode."""
        self._guard.close()


class Guard:
    """A process that outlives this one, however it ends, and then ends what carries the guard's mark in its environment.

    Attributes:
      mark: the entry of the environment, `MARL_RUN=...`.
    """

    def __init__(self):
        self.mark = f"{RUN}={secrets.token_hex(16)}"
        self._process: subprocess.Popen | None = None

    def start(self) -> None:
        """Starts the process, if it does not run."""
        if self._process is None:
            command, quiet = [sys.executable, "-I", "-S", __file__, self.mark], dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, **quiet)

    def close(self) -> None:
        """Ends what carries the mark, and the process."""
        if self._process is not None:
            self._process.stdin.close()
            self._process.wait()
            self._process = None


def check_code(code: int) -> None:
    """Raises `CommandFailed` for an exit code that is not 0, of a signal where it is negative."""
    if code:
        raise CommandFailed(f"exit code {code}" if code > 0 else f"killed by {signal.Signals(-code).name}")


def fill_in(command: Sequence[str], task: Any) -> list[str]:
    """The command of one task; what a task holds is put in once, and not read again.

    >>> fill_in(["app", "--task={task}", "{question}", "{other}"], {"question": "1+1 {task}"})
    ['app', '--task={"question": "1+1 {task}"}', '1+1 {task}', '{other}']
    """
    values = {**task, "task": task} if isinstance(task, dict) else {"task": task}
    fields = {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}
    return [re.sub(r"\{(\w+)\}", lambda match: fields.get(match[1], match[0]), part) for part in command]


def end_marked(mark: str) -> None:
    """Kills every process whose environment has the entry `mark`, but this one."""
    for _ in range(ROUNDS):
        pids = [pid for pid in _processes() if _has(pid, mark.encode())]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not pids:
            return
        time.sleep(0.005)


def _processes() -> list[int]:
    with contextlib.suppress(OSError):
        return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]
    return []


def _has(pid: int, mark: bytes) -> bool:
    """Whether a process has an entry in its environment; not one that has ended, or that is another user's."""
    try:
        return mark in pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


async def _last_lines(pipe: io.RawIOBase) -> str:
    """See `last_lines`, of what comes through a pipe."""
    stream, kept = asyncio.StreamReader(), b""
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), pipe)
    try:
        while piece := await stream.read(65536):
            kept = (kept + piece)[-TAIL_BYTES:]
    finally:
        transport.close()
    return last_lines(kept)


def last_lines(output: bytes) -> str:
    """The last lines as one line, with nothing in it that a terminal obeys."""
    lines = [_printable(line) for line in output[-TAIL_BYTES:].decode(errors="replace").splitlines()]
    return " | ".join([line for line in lines if line][-TAIL_LINES:])


def _printable(line: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in line).strip()


if __name__ == "__main__":
    sys.stdin.buffer.read()
    end_marked(sys.argv[1])
