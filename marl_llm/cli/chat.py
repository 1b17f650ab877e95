"""Talks with a role of a trained team, or with a checkpoint, in the terminal.

    python -m marl_llm chat --run=runs/a --role=answer
    python -m marl_llm chat --path=Qwen2.5-1.5B-Instruct --system="Answer in one line."
    echo "who wrote it?" | python -m marl_llm chat --run=runs/a --role=answer

A line is a message; `/new` forgets what was said, and the end of the input (Ctrl-D) leaves. A role that reads no conversation (its format
or its budget) says so, and the line is forgotten.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence

from absl import flags, logging

from marl_llm.cli import serve
from marl_llm.runs.command import ConfigError, given_flags, refuse_idle

FLAGS = serve.FLAGS  # a model is named as it is for serving
_SYSTEM = flags.DEFINE_string("system", None, "System message.", flag_values=FLAGS)
_TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0 is greedy.", lower_bound=0.0, flag_values=FLAGS)
_ONCE = flags.DEFINE_bool("once", False, "Every line is a conversation of its own.", flag_values=FLAGS)


def talk(
    answer: Callable,
    lines: Iterable[str],
    say: Callable[[str], None],
    system: str | None = None,
    temperature: float = 0.0,
    once: bool = False,
) -> None:
    """Answers each line with all that was said before; see the module's text."""
    from marl_llm.sampling.requests import RequestError
    from marl_llm.tools.chat import Options

    start: list[dict] = [] if system is None else [{"role": "system", "content": system}]
    history = list(start)
    for line in lines:
        text = line.rstrip("\n")
        if text == "/new":
            history = list(start)
            continue
        if not text:
            continue
        conversation: Sequence[dict] = [*history, {"role": "user", "content": text}]
        try:
            reply = answer(conversation, Options(temperature=temperature))
        except RequestError as error:
            say(f"[{error}]" + (" (/new forgets what was said before)" if len(conversation) > len(start) + 1 else ""))
            continue
        say(reply.text if reply.finish_reason == "stop" else f"{reply.text} [cut off after {reply.completion_tokens} tokens]")
        history = list(start) if once else [*conversation, {"role": "assistant", "content": reply.text}]


def prompted() -> Iterable[str]:
    """The lines of a terminal, each after a sign that it is awaited."""
    while True:
        print("> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line:
            print()
            return
        yield line


def main(argv) -> None:
    """Answers the lines of the terminal, or of a pipe."""
    logging.set_verbosity(logging.WARNING)
    refuse_idle(given_flags(FLAGS, ("port", "key_env", "over_budget", "record", "name")), "it is for `marl serve`; nobody is served here")
    if FLAGS["run"].value:
        refuse_idle(given_flags(FLAGS, ("max_num_seqs",)), "a run's config says its own")
    with serve.answers(serve.slots_asked() or 1) as models:  # one conversation is answered at a time
        if len(models) > 1:
            raise ConfigError(f"--role is missing; the run has {', '.join(models)}")
        lines = prompted() if sys.stdin.isatty() else sys.stdin
        talk(next(iter(models.values())), lines, lambda text: print(text, flush=True), _SYSTEM.value, _TEMPERATURE.value, _ONCE.value)
