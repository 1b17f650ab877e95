"""A server that speaks OpenEnv's protocol, for tests: guess a number that the seed chose. Written after `core/env_server/http_server.py`.

Run as a program it is a server process: `python tests/games/openenv_stand_in.py` prints its address.
"""

import contextlib
import itertools
import json
import random
import threading
import time
import uuid

from websockets.exceptions import ConnectionClosed
from websockets.sync.server import serve

RESETS = itertools.count()


class Guess:
    """The environment of one session: a number from 0 to 9. A broken one counts resets, so that no two in a row are alike by chance."""

    def __init__(self, kind="kept"):
        self.kind, self.number, self.steps = kind, 0, 0

    def reset(self, seed=None, low=0, **_):
        if self.kind == "broken":
            self.number = low + next(RESETS) % (10 - low)
        else:
            self.number = random.Random(seed if self.kind == "kept" else 1).randrange(low, 10)
        self.steps = 0
        return self.seen("guess")

    def step(self, guess):
        if guess > 99:
            raise ValueError(f"{guess} is out of range")
        self.steps += 1
        hint = "right" if guess == self.number else "higher" if guess < self.number else "lower"
        return self.seen(hint, float(hint == "right"), hint == "right")

    def seen(self, hint, reward=None, done=False):
        parity = "even" if self.number % 2 == 0 else "odd"
        observation = {"hint": hint, "parity": parity, "metadata": {"id": str(uuid.uuid4()), "at": time.time()}}
        return {"observation": observation, "reward": reward, "done": done, "metadata": observation["metadata"]}


class Server:
    """Its options may be changed while it runs.

    kind: what becomes of seeds. most: sessions at a time. says: frames in place of answers to steps; None hangs up.
    resets, steps: how many were asked. together: the most sessions that there were at a time. heard: all messages.
    """

    def __init__(self, kind="kept", most=64):
        self.kind, self.most, self.says, self.heard = kind, most, [], []
        self.lock, self.open, self.together = threading.Lock(), 0, 0

    def asked(self, kind):
        return sum(message["type"] == kind for message in self.heard)

    def serve_one(self, socket):
        assert socket.request.path == "/ws"
        with self.lock:
            self.open += 1
            self.together, full = max(self.together, self.open), self.open > self.most
        try:
            if full:
                self.error(socket, "CAPACITY_REACHED", f"Server at capacity: {self.most} sessions", active_sessions=self.most)
            else:
                self.session(socket, Guess(self.kind))
        except ConnectionClosed:
            pass
        finally:
            with self.lock:
                self.open -= 1

    def session(self, socket, env):
        for raw in socket:
            message = json.loads(raw)
            self.heard.append(message)
            data = message.get("data", {})
            match message.get("type"):
                case "reset":
                    self.answer(socket, "observation", env.reset(**data))
                case "step" if self.says:
                    frame = self.says.pop(0)
                    if frame is None:
                        socket.socket.close()
                        return
                    socket.send(frame)
                case "step" if not isinstance(data.get("guess"), int) or set(data) - {"guess", "metadata"}:
                    self.error(socket, "VALIDATION_ERROR", "Invalid message", errors=[{"loc": ["guess"]}])
                case "step":
                    try:
                        self.answer(socket, "observation", env.step(data["guess"]))
                    except ValueError as error:
                        self.error(socket, "EXECUTION_ERROR", str(error))
                case "state":
                    self.answer(socket, "state", {"episode_id": None, "step_count": env.steps})
                case "close":
                    return
                case kind:
                    self.error(socket, "UNKNOWN_TYPE", f"Unknown message type: {kind}")

    def answer(self, socket, kind, data):
        socket.send(json.dumps({"type": kind, "data": data}))

    def error(self, socket, code, message, **more):
        self.answer(socket, "error", {"message": message, "code": code, **more})


@contextlib.contextmanager
def serving(*args, **options):
    """A server on a free port of this machine; its address is `url`."""
    server = Server(*args, **options)
    with serve(server.serve_one, "127.0.0.1", 0) as listening:
        thread = threading.Thread(target=listening.serve_forever, daemon=True)
        thread.start()
        server.url = f"http://127.0.0.1:{listening.socket.getsockname()[1]}"
        yield server
        listening.shutdown()
    thread.join(30)
