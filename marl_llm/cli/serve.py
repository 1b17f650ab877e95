"""Serves the models of a run, or a checkpoint, on this machine as OpenAI's chat completions and completions.

    python -m marl_llm serve --run=runs/a --role=coder                     a role of a trained team; without --role all of them, by name
    python -m marl_llm serve --path=Qwen2.5-1.5B-Instruct --name=coach     a checkpoint of Hugging Face's form

Clients send requests to http://127.0.0.1:PORT/v1 with the role's (or `--name`'s) name as the model. With `--record=FILE`, requests to
http://127.0.0.1:PORT/episodes/ID/v1 are written down with the ids that were drawn and their log-probs; see docs/serving.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from absl import flags, logging

from marl_llm import hints
from marl_llm.runs import trust
from marl_llm.runs.building import opened
from marl_llm.runs.command import ConfigError, given_flags, refuse_idle

FLAGS = flags.FlagValues()
SLOTS = 16
_RUN = flags.DEFINE_string("run", None, "Run directory.", flag_values=FLAGS)
_ROLE = flags.DEFINE_multi_string("role", [], "Role to serve; may be given many times; default: every trained one.", flag_values=FLAGS)
_STEP = flags.DEFINE_integer("step", None, "Checkpoint's step; default: the newest. Step 0 is the supervised warm-up.", flag_values=FLAGS)
_PATH = flags.DEFINE_string("path", None, "Directory of a Hugging Face checkpoint, in place of a run.", flag_values=FLAGS)
_NAME = flags.DEFINE_string("name", "model", "What clients call the model of --path.", flag_values=FLAGS)
_MAX_PROMPT = flags.DEFINE_integer(
    "max_prompt",
    None,
    "Most tokens of a prompt, for --path; a run's roles keep theirs. Default: 8192, or what the model's positions leave.",
    lower_bound=1,
    flag_values=FLAGS,
)
_MAX_TOKENS = flags.DEFINE_integer(
    "max_tokens", 1024, "Most tokens of a reply, for --path; a run's roles keep theirs.", lower_bound=1, flag_values=FLAGS
)
_SLOTS = flags.DEFINE_integer(
    "max_num_seqs",
    None,
    "Replies that are sampled at once, for --path; a run's config says its own. Default: 16, of `chat` 1.",
    lower_bound=1,
    flag_values=FLAGS,
)
_THINKING = flags.DEFINE_enum(
    "thinking", None, ["on", "off"], "How the chat opens; default: as the checkpoint's template.", flag_values=FLAGS
)
_PORT = flags.DEFINE_integer("port", 8000, "0: a free one.", lower_bound=0, upper_bound=65535, flag_values=FLAGS)
_KEY_ENV = flags.DEFINE_string(
    "key_env", None, "Environment variable with a key that clients must send as a bearer token.", flag_values=FLAGS
)
_OVER_BUDGET = flags.DEFINE_enum(
    "over_budget",
    "cap",
    ["cap", "refuse"],
    "What becomes of a request for more tokens than a reply may have: it is cut to them, or refused.",
    flag_values=FLAGS,
)
_RECORD = flags.DEFINE_string("record", None, "JSONL file for the replies to requests under /episodes/ID.", flag_values=FLAGS)


def slots_asked() -> int | None:
    """What `--max_num_seqs` says."""
    return _SLOTS.value


@contextlib.contextmanager
def answers_of_run(run: str | pathlib.Path, roles: list[str], step: int | None = None, trusted: bool = False) -> Iterator[dict]:
    """Role -> how it answers (`marl_llm.serving.Answer`), with the parameters of a checkpoint; the engine closes with the context.

    Raises `ConfigError` for a run whose models read no text, and a role that there is not or that no model of the run plays.
    """
    from marl_llm.workflows import Environment

    with opened(run, step, trusted) as (_, plan, team, _):
        if not isinstance(plan.game, Environment):
            raise ConfigError(f"{run} trained on a compiled game, whose models read numbered words and no chat; a workflow's can be served")
        answer_of_role = team.answers()
        if strange := [role for role in roles if role not in answer_of_role]:
            raise ConfigError(f"--role={strange[0]!r}: {hints.suggestion(strange[0], answer_of_role)}")
        yield {role: answer_of_role[role] for role in roles or answer_of_role}


@contextlib.contextmanager
def answers_of_checkpoint(
    path: str, name: str, max_prompt: int | None = None, max_tokens: int = 1024, max_num_seqs: int = 16, thinking: str | None = None
) -> Iterator[dict]:
    """The same of a Hugging Face checkpoint, as `{name: answer}`. Raises `ConfigError` for a directory that holds none."""
    from marl_llm.serving.local import LocalModel

    try:
        model = LocalModel(path, max_prompt=max_prompt, max_tokens=max_tokens, max_num_seqs=max_num_seqs, thinking=thinking)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--path={path!r}: {error}") from error
    with model:
        yield {name: model.answers}


def answers(max_num_seqs: int) -> contextlib.AbstractContextManager[dict]:
    """Of what the flags name, a checkpoint with so many slots. Raises `ConfigError` unless that is a run or a checkpoint."""
    if bool(_RUN.value) == bool(_PATH.value):
        raise ConfigError("one of --run=runs/a and --path=CHECKPOINT is needed")
    if _RUN.value:
        refuse_idle(given_flags(FLAGS, ("name", "max_prompt", "max_tokens", "thinking")), "the roles of --run keep their own")
        return answers_of_run(_RUN.value, _ROLE.value, _STEP.value, trust.asked())
    refuse_idle(given_flags(FLAGS, ("role", "step")), "a checkpoint (--path) is one model; a run has roles and steps")
    return answers_of_checkpoint(_PATH.value, _NAME.value, _MAX_PROMPT.value, _MAX_TOKENS.value, max_num_seqs, _THINKING.value)


def main(argv) -> None:
    """Serves until it is interrupted."""
    logging.set_verbosity(logging.WARNING)
    from marl_llm.serving import ChatServer
    from marl_llm.tools.chat import read_key

    try:
        key = read_key(_KEY_ENV.value)
    except ValueError as error:
        raise ConfigError(f"--key_env: {error}") from error
    max_num_seqs = slots_asked() or SLOTS
    with answers(max_num_seqs) as models:
        if _OVER_BUDGET.value != "cap":
            models = {name: dataclasses.replace(model, over_budget=_OVER_BUDGET.value) for name, model in models.items()}
        try:
            server = ChatServer(models, _PORT.value, concurrency=2 * max_num_seqs, record=_RECORD.value, key=key)
        except (ValueError, OSError) as error:
            raise ConfigError(str(error)) from error
        with server:
            _serve(server, models)


def _serve(server: Any, models: Iterable[str]) -> None:
    print(f"serving {', '.join(models)} at {server.url}", flush=True)
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        print("stopped", flush=True)
