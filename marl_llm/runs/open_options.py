"""What the options that a config leaves open come to: they depend on whether a team begins with checkpoints or with random models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ml_collections import config_dict

# random models of 10^5 or 10^6 parameters, which learn in minutes and play hundreds of tasks in seconds
RANDOM = {"optimizer.learning_rate": 1.5e-3, "warm_start.learning_rate": 2e-3, "evaluation.tasks": 128, "evaluation.final_tasks": 500}
# checkpoints: all parameters at the papers' rate, adapters at a hundred times that; tasks that two cores play in minutes
WHOLE = {"optimizer.learning_rate": 1e-6, "warm_start.learning_rate": 1e-5, "evaluation.tasks": 32, "evaluation.final_tasks": 64}
ADAPTERS = WHOLE | {"optimizer.learning_rate": 1e-4, "warm_start.learning_rate": 1e-4}


def fill_open_options(config: config_dict.ConfigDict, trained: Sequence[dict[str, Any]]) -> None:
    """Sets what is None, by the options of the trained models: `WHOLE` or `ADAPTERS` where one of them begins with a checkpoint."""
    checkpoints = [one for one in trained if one.get("path")]
    adapters = all(one.get("lora_rank") for one in checkpoints)
    for key, value in (RANDOM if not checkpoints else ADAPTERS if adapters else WHOLE).items():
        section, name = key.split(".")
        if config[section][name] is None:
            config[section][name] = value
