"""The frame of stand-ins for services: a server on a real socket, whose subclass answers."""

import http.server
import json
import sys
import threading


class HttpStandIn:
    """Answers each request by `handle`, in a thread of its own; a context manager.

    Args:
      path: of its address, behind host and port.
    """

    def __init__(self, path="/v1"):
        stand_in = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                stand_in.handle(self)

            do_GET = do_DELETE = do_POST

            def log_message(self, format, *args):
                pass

        class Threads(http.server.ThreadingHTTPServer):
            daemon_threads, request_queue_size = True, 64

            def handle_error(self, request, client_address):
                if not isinstance(sys.exception(), OSError):  # clients hang up on purpose
                    super().handle_error(request, client_address)

        self.server = Threads(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}{path}"

    def handle(self, handler):
        """Answers one request."""
        raise NotImplementedError

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, kwargs=dict(poll_interval=0.01), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()


def read_body(handler):
    """The JSON of a request."""
    return json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))


def send(handler, status, body, headers=()):
    """Answers with bytes, or with a value as JSON."""
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    handler.send_response(status)
    for name, value in ({"Content-Length": str(len(body))} | dict(headers)).items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(body)
