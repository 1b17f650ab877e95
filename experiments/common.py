"""What the experiment commands share: starting JAX, naming the hardware, printing final figures."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Callable

GAP_ALARM = 1e-4  # largest |sampler - scorer| log-prob difference in float32 (law 2)
SILENT_ALARM = 50  # steps without any gradient for a model (law 8)


class TrainingError(RuntimeError):
    """Training cannot go on; the message says what, where and what to do. The last checkpoint is whole."""


def check_finite(figures: dict, step: int, model: str) -> None:
    """Raises `TrainingError` when the loss or the gradient is not finite (law 10)."""
    bad = [name for name in ("loss", "grad_norm", "critic_grad_norm") if not math.isfinite(figures.get(name, 0.0))]
    if bad:
        raise TrainingError(
            f"step {step}, model {model}: {' and '.join(bad)} not finite. Nothing of that step was saved; the last checkpoint is "
            "whole. Lower optimizer.learning_rate, or look at metrics.jsonl for what grew before"
        )


class Alarms:
    """Says aloud what must not pass in silence: a model without a gradient, a sampler that is not what the scorer scores.

    Args:
      silent: model -> steps since its last gradient; kept up to date in place, so that it can be checkpointed.
      say: where a line goes.
    """

    def __init__(self, silent: dict[str, int], say: Callable[[str], None]):
        self.silent, self._say = silent, say

    def look(self, step: int, model: str, figures: dict) -> None:
        """Looks at the metrics of one model's update."""
        self.silent[model] = 0 if figures["useful_groups"] and figures["grad_norm"] else self.silent.get(model, 0) + 1
        if self.silent[model] and self.silent[model] % SILENT_ALARM == 0:
            self._say(f"ALARM step {step}: model {model} got no gradient for {self.silent[model]} steps (all its groups are tied)")
        if not figures["log_prob_gap"] <= GAP_ALARM:  # so that NaN alarms too
            self._say(f"ALARM step {step}: model {model}, sampler and scorer differ by {figures['log_prob_gap']:.1e} nats")


def start_jax(config, cache: str, divide: bool = True):
    """Starts JAX with one CPU device per core (or the accelerators that there are) and a compilation cache on disk.

    `config.devices` of 0 takes the most devices that the config's environments and minibatches divide over, or all if nothing has to
    `divide` (packed rows are dealt to any number of devices).
    """
    import jax

    from experiments.base import most_devices
    from marl_llm.training import compile_quickly, make_mesh, use_cpu_devices

    if config.quick_compile:
        compile_quickly()
    inner = config.mesh.fsdp * config.mesh.tensor
    use_cpu_devices((config.devices * inner) if config.devices else (inner if inner > 1 else None))
    if cache:
        jax.config.update("jax_compilation_cache_dir", str(pathlib.Path(cache).expanduser()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    there = max(1, jax.device_count() // inner)
    data = config.devices or (most_devices(config, there) if divide else there)
    return make_mesh(data, config.mesh.fsdp, config.mesh.tensor)


def hardware_of(mesh) -> str:
    """The devices in words."""
    import os

    device = mesh.devices.flat[0]
    return f"{mesh.devices.size} x {device.device_kind} ({device.platform}), {os.cpu_count()} CPU cores"


def summary_text(results: dict) -> str:
    """The final figures in a few lines."""
    line = lambda name, f: (  # noqa: E731
        f"  {name:<34} success {f['success']:6.1%}  [{f['interval'][0]:.1%}, {f['interval'][1]:.1%}]   turns {f['turns']:.2f}   "
        + "  ".join(f"{r} well-formed {x['well_formed']:.0%}" for r, x in f["roles"].items())
    )
    rows = [f"{results['before']['episodes']} held-out instances of the {results['split']} split:"]
    rows += [line(name, results[name]) for name in ("random", "before", "after", "swapped") if name in results]
    rows += [line(name, f) for name, f in results.get("pairs", {}).items()]
    return "\n".join(rows)
