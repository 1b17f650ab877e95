"""A person's own program that stays: a worker process reads a line of JSON per episode and plays one episode after the other.

What starting costs, imports above all, is paid once per worker, not once per episode. Limits and ends are those of `tools.commands`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from typing import Any

from marl_llm.tools.commands import TAIL_BYTES, Guard, check_code, end_marked, last_lines

WORKER = "MARL_WORKER"
POLL_S = 0.01  # between looks at whether an episode was paid


class WorkerProgram:
    """Plays episodes by processes that stay, as many as there are episodes at once.

    A worker gets a line of JSON on its standard input for each episode: `task`, `base_url`, `api_key` and `episode_url`. It posts the
    reward to `episode_url` + "/reward", which ends the episode, and reads the next line. A worker that ends before, or does not pay in
    time, is killed with all that it started, and the next episode starts another.

    Args:
      command: program and arguments.
      folder: where it is started.
    """

    def __init__(self, command: Sequence[str], folder: str):
        self._command, self._folder, self._guard = tuple(command), folder, Guard()
        self._idle: list[_Worker] = []

    async def __call__(self, task: Any, client: Any) -> None:
        """Plays one episode. Raises `CommandFailed` for an exit code that is not 0, and `OSError` where it cannot be started."""
        self._guard.start()
        line = {"task": task, "base_url": client.base_url, "api_key": client.api_key, "episode_url": client.episode_url}
        while True:
            stayed = self._idle.pop() if self._idle else None
            worker = stayed or _Worker(self._command, self._folder, self._guard.mark)
            try:
                code = await worker.play(json.dumps(line), client)
            except BaseException:  # the time limit's cancellation above all
                client.notes.extend(worker.end())
                raise
            if code is None:
                self._idle.append(worker)
                return
            errors = worker.end()
            if stayed is None or client.about()["replies"]:  # else it had ended before it heard of this episode
                client.notes.extend(errors)
                check_code(code)
                return

    def close(self) -> None:
        """Ends all workers."""
        for worker in self._idle:
            worker.end()
        self._idle.clear()
        self._guard.close()


class _Worker:
    """One process, and the file that takes its standard error."""

    def __init__(self, command: Sequence[str], folder: str, mark: str):
        self._mark = f"{WORKER}={secrets.token_hex(16)}"
        self._errors = tempfile.TemporaryFile("ab+", buffering=0)
        added = dict(entry.split("=", 1) for entry in (mark, self._mark))
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=self._errors, cwd=folder, env={**os.environ, **added},
            start_new_session=True,
        )  # fmt: skip

    async def play(self, line: str, client: Any) -> int | None:
        """Waits for the pay of an episode, and gives None; or the exit code, if the worker ends before."""
        self._errors.truncate(0)
        await asyncio.to_thread(self._tell, line)
        while not client.about()["paid"]:
            if (code := self._process.poll()) is not None:
                return code
            await asyncio.sleep(POLL_S)
        return None

    def _tell(self, line: str) -> None:
        """Writes a line, which blocks while the pipe is full; nothing happens if the worker has ended."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()

    def end(self) -> list[str]:
        """Kills it with all that it started: what its standard error says, if anything."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        end_marked(self._mark)
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._errors.seek(max(0, os.fstat(self._errors.fileno()).st_size - TAIL_BYTES))
        errors = last_lines(self._errors.read())
        self._errors.close()
        return [f"its stderr ends: {errors}"] if errors else []
