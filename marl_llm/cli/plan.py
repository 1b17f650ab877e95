"""Will my run fit, and how fast can it be? Compiles a config's real programs with the compiler of a TPU or GPU that need not be there.

    python -m marl_llm plan --config=experiments/configs/plan_path_10x10.py --config.model.preset=qwen3-1.7b \\
        --topology=v5e:16x16 --mesh=64,4 --prompt=8192 --response=4096

A config whose models are checkpoints is planned without one when `--config.model.preset` names the published shape.

TPU topologies need `libtpu` (extra `plan`), GPUs (`a100:1`, `h100:8`, `h200:8`, `rtx4090:1`) JAX's CUDA plugin (extra `cuda`, no GPU);
without that they are answered by arithmetic, as all are with --compile=False. Prints bytes per device by kind, FLOPs, roofline times, and
the verdict with a suggestion. `--topology=cpu` is this machine: memory and minutes, as `--dry_run` says them.
"""

from __future__ import annotations

import json

import jax
from absl import flags
from ml_collections import config_flags

from marl_llm.planning import this_machine
from marl_llm.runs.command import ConfigError, given_flags, refuse_idle

FLAGS = flags.FlagValues()
_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "An experiment config; its model, recipe, assignment and rollout are planned.", flag_values=FLAGS
)
_TOPOLOGY = flags.DEFINE_string(
    "topology",
    "v5e:4x4",
    "chip:shape, e.g. v5e:16x16, v5p:4x4x4, v6e:16x16, tpu7x:2x2x1, h100:8, rtx4090:1; or cpu: this machine.",
    flag_values=FLAGS,
)
_MESH = flags.DEFINE_string(
    "mesh",
    "",
    "fsdp,tensor; data takes the rest. Empty: config.mesh; where that is left at 1 and 1, tensor 4 from 16 devices on, all others fsdp.",
    flag_values=FLAGS,
)
_PROMPT = flags.DEFINE_integer("prompt", 0, "Prompt tokens P; 0 takes the game's longest.", lower_bound=0, flag_values=FLAGS)
_RESPONSE = flags.DEFINE_integer("response", 0, "Response tokens R; 0 takes the game's longest.", lower_bound=0, flag_values=FLAGS)
_GROUPS = flags.DEFINE_integer(
    "groups", 0, "Groups per optimizer step; 0: one per position along data and fsdp.", lower_bound=0, flag_values=FLAGS
)
_COMPILE = flags.DEFINE_bool("compile", True, "False: arithmetic only.", flag_values=FLAGS)
_WHOLE = flags.DEFINE_bool(
    "whole", False, "Compile the engine's programs with all layers, minutes each; False: with one and with two.", flag_values=FLAGS
)
_JSON = flags.DEFINE_bool("json", False, "One JSON line instead of the table.", flag_values=FLAGS)


def main(argv) -> None:
    """The command."""
    from marl_llm.planning.plan_table import table
    from marl_llm.planning.plans import plan

    if _CONFIG.value is None:
        raise ConfigError("--config is missing, e.g. --config=experiments/configs/plan_path_10x10.py")
    if _TOPOLOGY.value == "cpu":
        idle = ("mesh", "prompt", "response", "groups", "compile", "whole", "json")
        refuse_idle(given_flags(FLAGS, idle), "--topology=cpu reads the config alone")
        print(*this_machine.planned(_CONFIG.value), sep="\n")
        return
    if not _COMPILE.value:
        refuse_idle(given_flags(FLAGS, ("whole",)), "--compile=False compiles nothing")
    if not jax.config.jax_platforms:  # whose plugin would otherwise want a GPU before it compiles for one
        jax.config.update("jax_platforms", "cpu")
    out = plan(_CONFIG.value, _TOPOLOGY.value, _MESH.value, _PROMPT.value, _RESPONSE.value, _GROUPS.value, _COMPILE.value, _WHOLE.value)
    print(json.dumps(out) if _JSON.value else table(out))
