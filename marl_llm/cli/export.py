"""Writes a trained model as a directory that Hugging Face transformers loads: config, safetensors, and what it reads and writes with.

    python -m marl_llm export --run=runs/a --model=planner --out=planner
    python -m marl_llm export --run=runs/a --model=planner --out=planner --step=0 --dtype=bfloat16      as it was before reinforcement
    python -m marl_llm export --run=runs/a --model=planner --out=planner --adapters                    its adapters alone, in PEFT's form

Without `--adapters`, adapters are merged into their base. A model that began from a checkpoint or a GGUF file gets its tokenizer, chat
template and generation settings; one that was made for a game gets the game's sentencepiece model, if it has one, and a tokenizer.json of
the same ids; where there is none, the export and README.md say so. README.md is a model card with the run's config, command and figures;
`--licence=apache-2.0` names the licence that you give the model.
"""

from __future__ import annotations

import pathlib
from typing import Any

from absl import flags, logging

from marl_llm import hints
from marl_llm.runs import trust
from marl_llm.runs.building import opened
from marl_llm.runs.card import run_card
from marl_llm.runs.command import ConfigError

FLAGS = flags.FlagValues()
_RUN = flags.DEFINE_string("run", None, "Run directory.", flag_values=FLAGS)
_MODEL = flags.DEFINE_string("model", None, "Name of the model; may be left out where there is one.", flag_values=FLAGS)
_OUT = flags.DEFINE_string("out", None, "Directory to write; must not exist, or be empty.", flag_values=FLAGS)
_STEP = flags.DEFINE_integer("step", None, "Checkpoint's step; default: the newest.", flag_values=FLAGS)
_LICENCE = flags.DEFINE_string("licence", None, "For the model card, as Hugging Face's hub names it, e.g. apache-2.0.", flag_values=FLAGS)
_ADAPTERS = flags.DEFINE_bool("adapters", False, "Write the adapters alone, which PEFT puts on their base.", flag_values=FLAGS)
_DTYPE = flags.DEFINE_enum("dtype", None, ["float32", "bfloat16"], "On disk; default: as the parameters are kept.", flag_values=FLAGS)


def export(
    run: str,
    model: str | None,
    out: pathlib.Path,
    step: int | None = None,
    dtype: str | None = None,
    licence: str | None = None,
    adapters: bool = False,
    trusted: bool = False,
) -> list[pathlib.Path]:
    """Writes the model, or its `adapters` alone, and returns the tensor files. Raises `ConfigError` for a run, a model or a directory that
    will not do."""
    from marl_llm.models import save_adapters, save_pretrained
    from marl_llm.workflows import Environment

    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out={out} exists; choose a new directory")
    with opened(run, step, trusted) as (_, plan, team, step):
        names = list(plan.shapes)
        model = model or (names[0] if len(names) == 1 else "")
        if model not in names:
            raise ConfigError(f"--model={model!r}: {run} has no such model; {hints.suggestion(model, names)}")
        roles = [role for role, player in plan.assignment.roles.items() if player == model]
        text = run_card(run, model, roles, step, licence)
        learner, path = team.learners[model], plan.options[model].get("path")
        if adapters:
            if learner.base is None:
                raise ConfigError(f"--adapters: {model} of {run} has none; leave the flag out, or train with --config.model.lora_rank=16")
            if dtype:
                raise ConfigError(f"--dtype={dtype} has no effect on --adapters, which are written as they are kept")
            try:
                save_adapters(out, learner.policy.params, learner.spec.lora, path or "")
            except ValueError as error:
                raise ConfigError(f"--adapters: {error}; leave the flag out to merge them") from error
            (out / "README.md").write_text(text, encoding="utf-8")
            return [out / "adapter_model.safetensors"]
        try:
            written = save_pretrained(out, learner.config, learner.params, dtype=dtype, like=path)
        except ValueError as error:
            raise ConfigError(f"{model} of {run} cannot be written as a Hugging Face checkpoint: {error}") from error
        renderer = plan.game.renderer if isinstance(plan.game, Environment) else plan.game
        if missing := _write_tokenizer(path, renderer, out):
            note = f"There is no tokenizer.json, so `AutoTokenizer` cannot read or write for this model: {missing}."
            logging.warning("%s", note)
            text = f"{text.rstrip()}\n\n{note}\n"
        (out / "README.md").write_text(text, encoding="utf-8")
    return written


def _write_tokenizer(path: str | None, renderer: Any, out: pathlib.Path) -> str:
    """What a model that was made for a game, without a checkpoint's `path`, reads with. Returns why `transformers` cannot, or nothing."""
    from marl_llm.text import PieceTokenizer
    from marl_llm.text.word_files import save_words

    if path is not None:  # whose files were copied
        return "" if any((out / name).exists() for name in ("tokenizer.json", "vocab.json")) else f"{path} has none"
    tokenizer = getattr(renderer, "tokenizer", None)
    if not isinstance(tokenizer, PieceTokenizer):
        return f"its vocabulary is {type(tokenizer).__name__}, which marl_llm alone knows" if tokenizer else "its game speaks in ids"
    tokenizer.save(out / "tokenizer.model")
    return save_words(tokenizer, out, tuple(getattr(renderer, "stop_ids", ())))


def main(argv) -> None:
    """Flags to `export`."""
    logging.set_verbosity(logging.WARNING)
    for name, flag in (("run", _RUN), ("out", _OUT)):
        if not flag.value:
            raise ConfigError(f"--{name} is missing, e.g. --run=runs/a --model=planner --out=planner")
    options = (_STEP.value, _DTYPE.value, _LICENCE.value, _ADAPTERS.value, trust.asked())
    for path in export(_RUN.value, _MODEL.value, pathlib.Path(_OUT.value), *options):
        print(path)
