"""A chat server on a real socket that misbehaves on purpose, one scripted behaviour per request."""

import collections
import http.server
import json
import threading
import time


def completion(text: str, prompt_tokens: int = 7, completion_tokens: int = 3, **fields) -> bytes:
    """The body of a well-formed chat completion."""
    choice = dict(index=0, message=dict(role="assistant", content=text), finish_reason="stop") | fields
    usage = dict(prompt_tokens=prompt_tokens, completion_tokens=completion_tokens)
    return json.dumps(dict(object="chat.completion", choices=[choice], usage=usage)).encode()


class MisbehavingServer:
    """`behaviours` are used up in order; then every request gets the last user message back, in capitals.

    ok | status (an int) | (status, headers, body) | drop | drop_half | short_json | truncated | drip_body | drip_headers | slow

    A slow answer takes 0.1 s, and the first ones wait until `together` requests are under way at once, for 10 s at most.
    """

    def __init__(self, *behaviours, together: int = 1):
        self.behaviours = collections.deque(behaviours)
        self.seen: list[dict] = []  # body, headers and time of each request
        self.under_way = self.most_under_way = 0
        self.together, self.met = together, threading.Event()
        self.lock = threading.Lock()
        self.stopping = threading.Event()
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                server.handle(self)

            def log_message(self, format, *args):
                pass

        class Threads(http.server.ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 64

            def handle_error(self, request, client_address):
                pass  # clients hang up on purpose here

        self.server = Threads(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, kwargs=dict(poll_interval=0.01), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.stopping.set()
        self.server.shutdown()
        self.server.server_close()

    def handle(self, handler) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        with self.lock:
            behaviour = self.behaviours.popleft() if self.behaviours else "ok"
            self.seen.append(dict(body=body, headers=dict(handler.headers), path=handler.path, at=time.monotonic()))
            self.under_way += 1
            self.most_under_way = max(self.most_under_way, self.under_way)
            if self.under_way >= self.together:
                self.met.set()
        if behaviour == "slow":
            self.met.wait(10.0)
            self.met.set()
            time.sleep(0.1)
            behaviour = "ok"
        with self.lock:  # before the answer: whoever has it may send the next request at once
            self.under_way -= 1
        self.behave(handler, behaviour, completion(body["messages"][-1]["content"].upper()))

    def behave(self, handler, behaviour, good: bytes) -> None:
        if behaviour == "drop":
            handler.connection.close()
            return
        if behaviour == "drip_headers":
            self.drip(handler, b"HTTP/1.0 200 OK\r\nX-Filler: " + b"x" * 100_000)
            return
        status, headers, body = 200, {}, good
        if isinstance(behaviour, int):
            status, body = behaviour, b'{"error": {"message": "no"}}'
        elif isinstance(behaviour, tuple):
            status, headers, body = behaviour
        elif behaviour == "short_json":  # a proxy that cut the body and wrote an honest length
            body = good[: len(good) // 2]
        handler.send_response(status)
        if behaviour != "drip_body":
            handler.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.end_headers()
        if behaviour == "drip_body":
            self.drip(handler, b" " * 100_000)
        elif behaviour == "truncated":  # the length promises more than comes
            handler.wfile.write(body[: len(body) // 2])
        else:
            handler.wfile.write(body)

    def drip(self, handler, data: bytes) -> None:
        """One byte each 20 ms: never silent for long, never done."""
        for byte in data:
            if self.stopping.wait(0.02):
                return
            handler.wfile.write(bytes([byte]))
            handler.wfile.flush()
