"""The process that renders chat templates for `rendering.py`: a script, started without site packages, that knows nothing of the library.

    python -I -S template_child.py MEMORY PARENT FOLDER ...

Requests and replies are JSON behind four bytes of length, both on the socket that is its standard input. It ends when that is closed, or
its parent is gone. What a template may spend is bounded by the kernel: MEMORY bytes beyond the start, and the seconds that a
request names.
"""

import datetime
import functools
import json
import os
import random
import resource
import select
import signal
import socket
import struct
import sys

sys.path += sys.argv[3:]

import jinja2
import jinja2.ext
import jinja2.sandbox

LOOK_S = 10.0  # between two looks whether the parent is still there


class Generation(jinja2.ext.Extension):
    """`{% generation %}`, which marks an assistant's words for masks; we know them without it, so that it renders its body."""

    tags = {"generation"}

    def parse(self, parser):
        """The statements within."""
        next(parser.stream)
        return parser.parse_statements(["name:endgeneration"], drop_needle=True)


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    """JSON as `transformers` has it in templates: Jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message):
    """How a template refuses."""
    raise jinja2.exceptions.TemplateError(message)


def make_environment():
    """The environment of `transformers.apply_chat_template`, without `lipsum`."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"], cache_size=0
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    del environment.globals["lipsum"]
    return environment


ENVIRONMENT = make_environment()


@functools.lru_cache(maxsize=8)
def compiled(source):
    """A template's code."""
    return ENVIRONMENT.from_string(source)


def answer(request):
    """`{"text": ...}`, or `{"error": ...}` with what the template said and `syntax`, the line, where it is no Jinja."""
    try:
        template = compiled(request["source"])
        if request["variables"] is None:
            return {"text": ""}
        random.seed(0)  # the filter `random` gives the same every time
        now = datetime.datetime.fromisoformat(request["now"])
        text = template.render(request["variables"] | {"strftime_now": now.strftime})
        if len(text) > request["most"]:
            return {"error": f"its text has {len(text):,} characters, {request['most']:,} are the most", "limit": True}
        return {"text": text}
    except jinja2.exceptions.TemplateSyntaxError as error:
        return {"error": str(error.message)[:500], "syntax": error.lineno}
    except MemoryError:
        return {"error": "it needs more memory than a template is given", "limit": True}
    except Exception as error:  # a template may raise whatever Python does; it is a value for whoever asked
        return {"error": f"{type(error).__name__}: {str(error)[:500]}"}


def receive(link, size):
    """So many bytes; none if the parent has gone."""
    parts = []
    while size:
        part = link.recv(min(size, 1 << 16))
        if not part:
            return b""
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def send(link, reply):
    """A reply with its length."""
    data = json.dumps(reply).encode()
    link.sendall(struct.pack("<I", len(data)) + data)


def give_up_rights(memory):
    """No files, no processes, no memory beyond this; what a template needs is loaded by now."""
    with open("/proc/self/statm" if os.path.exists("/proc/self/statm") else os.devnull) as file:
        used = int((file.read().split() or [1 << 18])[0]) * resource.getpagesize()
    limits = {"AS": used + memory, "NOFILE": 3, "NPROC": 0, "FSIZE": 0, "CORE": 0}
    for name, limit in limits.items():
        try:
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
        except (ValueError, OSError, AttributeError):
            pass  # not on this system, or the limit is lower already; the deadline holds everywhere


def main():
    """Answers until there is nobody to answer."""
    memory, parent = int(sys.argv[1]), int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a key that ends the parent ends the socket too
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    link = socket.socket(fileno=0)
    answer({"source": "{% for m in x %}{{ m | trim | tojson }}{{ strftime_now('%d %b %Y') }}{% endfor %}{{ 1 / 0 }}",
            "variables": {"x": ["é"]}, "now": "2000-01-01", "most": 99})  # fmt: skip
    give_up_rights(memory)
    send(link, {"text": "ready"})
    while os.getppid() == parent:
        if not select.select([link], [], [], LOOK_S)[0]:
            continue
        head = receive(link, 4)
        data = receive(link, struct.unpack("<I", head)[0]) if head else b""
        if not data:
            return
        request = json.loads(data)
        signal.setitimer(signal.ITIMER_PROF, request["seconds"])  # its end is the end of this process
        reply = answer(request)
        signal.setitimer(signal.ITIMER_PROF, 0)
        send(link, reply)


if __name__ == "__main__":
    main()
