"""What the experiment commands share: starting JAX, naming the hardware, printing final figures."""

from __future__ import annotations

import pathlib


def start_jax(config, cache: str):
    """Starts JAX with one CPU device per core (or the accelerators that there are) and a compilation cache on disk.

    `config.devices` of 0 takes the most devices that the config's environments and minibatches divide over.
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
    data = config.devices or most_devices(config, max(1, jax.device_count() // inner))
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
