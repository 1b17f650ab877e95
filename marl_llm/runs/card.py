"""The model card of an exported model: what it was trained for, how, and which figures its run measured. Markdown for Hugging Face's hub.

Every figure is read from the run directory; nothing is computed anew, and nothing is claimed of a checkpoint that was not measured.
"""

from __future__ import annotations

import html
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from marl_llm.old_names import convert_evaluation
from marl_llm.runs.command import ConfigError
from marl_llm.untrusted import read_json_file

UNKNOWN_LICENCE = "unknown"
MEASURED = ("before", "after")


def run_card(run: str | pathlib.Path, model: str, roles: Sequence[str], step: int, licence: str | None = None) -> str:
    """The card of a model of a run directory. Raises `ConfigError` for a record or an evaluation.json that cannot be read."""
    from marl_llm.runs.workdir import read_record

    path = pathlib.Path(run) / "evaluation.json"
    try:
        record = read_record(pathlib.Path(run))
        figures = convert_evaluation(read_json_file(path)) if path.exists() else None
        return card(record, figures, model, roles, step, licence)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} cannot be read ({type(error).__name__}: {error}); move it away to export without figures") from error


def card(
    record: Mapping[str, Any], figures: Mapping[str, Any] | None, model: str, roles: Sequence[str], step: int, licence: str | None = None
) -> str:
    """Markdown.

    Args:
      record: what the run's config.json holds.
      figures: what its evaluation.json holds; None: the run has measured nothing yet.
      roles: that the model plays in the team.
      step: of the checkpoint.
      licence: an identifier of the hub, e.g. "apache-2.0"; None: the card says that it is unknown.
    """
    config = record["config"]
    base = config["models"].get(model, {}).get("path") or config["model"].get("path")
    head = {"license": licence or UNKNOWN_LICENCE, "tags": ["marl_llm", "reinforcement-learning"], "base_model": base}
    head = {key: value for key, value in head.items() if value is not None}
    front = [f"{key}: {json.dumps(value)}" for key, value in head.items()]
    who = " and ".join(f"`{role}`" for role in roles) or "no role"
    trained = "before reinforcement" if step == 0 else f"after step {step} of {config['steps']}"
    facts = {
        "team": record["name"], "game": config["game"]["name"], "plays": who, "recipe": config["recipe"]["name"], "checkpoint": trained,
        "began from": f"`{base}`" if base else "random parameters", "seed": record["seed"], "date": record["date"],
        "commit": record["commit"], "hardware": record["hardware"], "command": f"`{record['command']}`",
    }  # fmt: skip
    rows = [f"| {name} | {_cell(value)} |" for name, value in facts.items()]
    licence_text = f"Licence: {licence}." if licence else (
        "No licence was given (`--licence`). A model that began from a checkpoint is bound by that checkpoint's licence."
    )
    parts = [
        "\n".join(["---", *front, "---"]),
        f"# {model}, of the team {_cell(record['name'])}",
        "One model of a team of language models that was trained with reinforcement learning by `marl_llm`.",
        "\n".join(["| | |", "|---|---|", *rows]),
        "## Figures",
        _figures(figures, step),
        "## Config",
        f"```json\n{json.dumps(config, indent=1)}\n```",
        "## Licence",
        licence_text,
    ]
    return "\n\n".join(parts) + "\n"


def _figures(figures: Mapping[str, Any] | None, step: int) -> str:
    """The whole team's figures before and after, with their intervals, or why there are none."""
    if figures is None:
        return "The run has not been evaluated on held-out tasks."
    rows = []
    for name in MEASURED:
        if part := figures.get(name):
            interval = ", ".join(f"{100 * end:.1f}" for end in part["interval"])
            counts = f"{_cell(part['tasks'])} | {_cell(part['aborted'])}"
            rows.append(f"| {name} | {100 * part['success']:.1f} % | [{interval}] | {counts} |")
    about = f"The whole team on the {_cell(figures['split'])} split, {_cell(figures['headline'])}, before reinforcement and after step "
    about += f"{_cell(figures['steps'])}."
    other = "" if step in (0, figures["steps"]) else f" This checkpoint, of step {step}, was not measured."
    return "\n".join([about + other, "", "| team | mean | 95 % interval | tasks | aborted plays |", "|---|---|---|---|---|", *rows])


def _cell(value: Any) -> str:
    """A value in a table."""
    return html.escape(" ".join(str(value).split()), quote=False).replace("|", "\\|")
