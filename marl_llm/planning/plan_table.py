"""A plan in words, and what its compiled programs do beside what is needed."""

from __future__ import annotations


def table(out: dict) -> str:
    """The plan in words."""
    def gib(x):
        return f"{x / 2**30:8.2f} GiB"

    m, w = out["mesh"], out["work"]
    how = f"compiled in {out['compile_seconds']:.0f} s" if out["compiled"] else "by arithmetic, nothing compiled"
    pool = []
    if "kv_pool" in out:
        pool = [f"  of which the engine holds   {gib(out['kv_pool'])}, {out['requests_at_their_longest']} requests at their longest"]
    lines = [
        f"{out['topology']}: data {m['data']} x fsdp {m['fsdp']} x tensor {m['tensor']}"
        f"{', engine on tensor ' + str(out['served']) if out['served'] != m['tensor'] else ''}; {out['models']} models of "
        f"{out['parameters'] / 1e9:.2f}e9 parameters; P={out['prompt']} R={out['response']} K={out['branches']} "
        f"E={out['environments']}, {out['groups_per_step']} groups per optimizer step ({how})",
        f"  parameters, all models      {gib(out['parameters_bytes'])}",
        f"  optimizer, all models       {gib(out['optimizer_bytes'])}",
        *(f"  {name:<28}{gib(size)}" for name, size in out["beside"].items() if size),
        *phase_lines(out),
        f"  activations of the update   {gib(out['update']['temporary'])}",
        f"  KV cache                    {gib(out['kv_cache'])}",
        *pool,
        *([f"  peak in the warm-up         {gib(out['moments']['sft'])}"] if "sft" in out["moments"] else []),
        f"  peak in the update          {gib(out['peak_update'])}",
        f"  peak in the sampler         {gib(out['peak_sampler'])}",
        f"  of                          {gib(out['device_memory'])}",
    ]
    lines += measured_lines(out)
    for name, x in w.items():
        lines.append(f"  {name:<12} {x['flops'] / 1e12:10.3f} TFLOP  {x['bytes'] / 1e9:8.2f} GB   at least {x['seconds'] * 1e3:10.2f} ms")
    lines.append(f"  1,000 responses, played and learned from: at least {out['chip_hours']:.3g} chip-hours, tools and waiting not counted")
    lines += placement_lines(out) if "placement" in out else []
    lines += [f"  {out[p]['error']}" for p in ("update", "sampler") if "error" in out.get(p, {})]
    lines.append("  fits" if out["fits"] else f"  DOES NOT FIT: {out['suggestion']}")
    return "\n".join(lines)


def phase_lines(out: dict) -> list[str]:
    """What is alive in each phase: in bytes per parameter too, where all of them are trained. 12 are parameters and moments."""
    split, lines = out["mesh"]["fsdp"] * out["mesh"]["tensor"], ["  arrays alive, without activations and pages"]
    for name, size in out["phases"].items():
        share = "" if out["beside"]["bases"] else f", {size * split / (out['models'] * out['parameters']):.1f} bytes per trained parameter"
        lines.append(f"    in {name:<23} {size / 2**30:8.2f} GiB{share}")
    return lines


def placement_lines(out: dict) -> list[str]:
    """The times of `config.placement`, for a team that speaks in one order or the other."""
    times, mesh = out["placement"], out["mesh"]
    lines = ["  placement    roles in sequence     in parallel      optimizer step of all models   (seconds at least; decoding one turn)"]
    for name in ("shared", "split"):
        if name in times:
            x = times[name]
            lines.append(f"    {name:<10} {x['sequence']:16.3f} {x['parallel']:15.3f} {x['update']:21.3f}")
    if not times["part"]:
        lines.append(f"    split: {out['models']} models divide neither data={mesh['data']} nor fsdp={mesh['fsdp']}")
    elif times["part"][1] != mesh["fsdp"]:
        part = f"fsdp={times['part'][1]}, tensor={mesh['tensor']}"
        lines.append(f"    split: with mesh {part} and config.devices={mesh['data'] * out['models']}, for parts are cut along data")
    return lines


def measured_lines(out: dict) -> list[str]:
    """What the compiled programs do beside what is needed."""
    lines = []
    if "engine" in out:
        e = out["engine"]
        names = [name for name in ("decode", "admit", "verify", "swap") if name in out["moments"]]
        peaks = ", ".join(f"{name} {out['moments'][name] / 2**30:.2f}" for name in names)
        lines.append(f"  peak while the engine runs, GiB: {peaks}")
        gathered = f"weights gathered in its loop: {e['gathered'] / 1e9:.2f} GB"
        if "read" in e:
            lines.append(
                f"  a decode step reads {e['read'] / 1e9:.2f} GB where weights and cache of running requests are {e['needed'] / 1e9:.2f} "
                f"({e['read'] / e['needed']:.2f} x; {int(e['groups'])} prompts with their responses); {gathered}"
            )
        else:
            lines.append(
                f"  a decode step needs {e['needed'] / 1e9:.2f} GB of weights and cache of running requests "
                f"({int(e['groups'])} prompts with their responses); {gathered}"
            )
    if out.get("update_flops", {}).get("compiled"):
        f = out["update_flops"]
        lines.append(
            f"  an update computes {f['compiled'] / 1e12:.1f} TFLOP where {f['needed'] / 1e12:.1f} are needed and {f['again'] / 1e12:.1f} "
            f"computed again ({(f['compiled'] - f['again']) / f['needed']:.2f} x the needed, without what is computed again)"
        )
    return lines
