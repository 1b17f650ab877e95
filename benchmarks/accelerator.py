"""Does everything work on this accelerator, and how fast? One command, with a page; it needs no other library and no network.

    python -m benchmarks.accelerator [--tiny] [--output=docs/accelerators.md] [--parts=attention,log_probs,engine,update,adapters,runs]

Where JAX finds a GPU or a TPU the shapes are those of SmolLM2-135M and of Qwen3 with 0.6e9 and 1.7e9 parameters, with random weights. On a
CPU, and with --tiny, everything takes about four minutes of one core, less once programs are cached. Each size is a flag. One device is
measured.
Parts, each in a process of its own:

    attention   output and gradients of every attention path in every dtype against float32 products of XLA
    log_probs   the sampler's, the engine's and the scorer's log-probs of a whole model against a float32 scorer
    engine      tokens/s, and the share of the memory's bandwidth, at several batch sizes and lengths
    update      time, MFU and memory of an optimizer step beside what `marl_llm.cli.plan` predicts
    adapters    a whole step of adapters, sampling included, beside TRL with PEFT where this interpreter has them
    runs        a mini run of Plan-Path and of workflow A by `experiments.train`

Prints JSON lines and writes a Markdown page. What fails is a line with `failed`, the other rows go on, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import shlex
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator

from benchmarks.accelerator_parts import LARGE, PARTS, ROOT, Sizes

FIELDS = dataclasses.fields(Sizes)


def rows_of_process(part: str, sizes: Sizes, limit_s: float, quick: bool) -> Iterator[dict]:
    """The rows of a part that runs in a process of its own, and one more if that ends badly. `quick`: see `serve`."""
    flags = ["--quick"] * quick + [f"--{name}={value}" for name, value in dataclasses.asdict(sizes).items()]
    with tempfile.TemporaryFile("w+") as errors:
        command = [sys.executable, "-m", "benchmarks.accelerator", f"--part={part}", *flags]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True)
        watch = threading.Timer(limit_s, process.kill)
        watch.start()
        try:
            for line in process.stdout:
                if line.startswith('{"part"'):
                    yield json.loads(line)
            code = process.wait()
        finally:
            watch.cancel()
            process.kill()
        if code:
            errors.seek(0)
            yield {"part": part, "failed": f"the process ended with {code}: {' / '.join(errors.read().strip().splitlines()[-3:])[-500:]}"}


def serve(part: str, sizes: Sizes, quick: bool) -> None:
    """Computes a part in this process and prints its rows. `quick`: what is not timed is compiled faster for a CPU, and runs slower."""
    measured = PARTS[part]
    if part not in ("runs", "adapters"):  # their own processes need the device
        import jax

        from marl_llm.runs.building import CACHE
        from marl_llm.training import compile_quickly, use_cpu_devices

        use_cpu_devices(1)
        if quick and part in ("attention", "log_probs"):
            compile_quickly()
        jax.config.update("jax_compilation_cache_dir", str(pathlib.Path(CACHE).expanduser()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
    for row in measured(sizes):
        print(json.dumps(row), flush=True)


# ---------------------------------------------------------------------------------------------------- the page
def shown(value) -> str:
    """A figure as it stands in a table."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value).replace("|", "/")


def gib(value) -> str:
    """Bytes in MiB or GiB."""
    return "–" if value is None else f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.1f} MiB"


def percent(value) -> str:
    """A share."""
    return "–" if value is None else f"{value:.1%}"


COLUMNS = {  # part -> title, key, how it is written
    "device": (
        ("dtype", "dtype", shown), ("matrix product, GFLOP/s", "gflops", shown), ("reading, GB/s", "gb_per_s", shown),
        ("data sheet (bfloat16), GFLOP/s", "sheet_gflops", shown), ("data sheet, GB/s", "sheet_gb_per_s", shown),
    ),
    "attention": (
        ("path", "path", shown), ("mask", "mask", shown), ("dtype", "dtype", shown), ("length", "length", shown),
        ("output", "output", shown), ("gradients", "gradient", shown), ("bound", "bound", shown), ("taken by `auto`", "auto", shown),
    ),
    "log_probs": (
        ("source", "source", shown), ("dtype", "dtype", shown), ("largest, nats", "largest_nats", shown),
        ("mean, nats", "mean_nats", shown), ("bound", "bound", shown),
    ),
    "engine": (
        ("model", "model", shown), ("batch", "batch", shown),
        ("prompt", "prompt", shown), ("response", "response", shown), ("tokens/s", "tokens_per_s", shown),
        ("decode step, ms", "step_ms", shown), ("of the bandwidth", "share", percent), ("of the data sheet's", "share_of_sheet", percent),
        ("prefill, s", "prefill_s", shown), ("compiling, s", "compile_s", shown), ("cache", "cache_bytes", gib),
    ),
    "update": (
        ("model", "model", shown), ("groups", "groups", shown), ("branches", "branches", shown),
        ("prompt", "prompt", shown), ("response", "response", shown),
        ("seconds", "seconds", shown), ("at least, by `plan`", "least_s", shown), ("MFU", "mfu", percent),
        ("MFU by the data sheet", "mfu_of_sheet", percent), ("memory counted by `plan`", "counted_bytes", gib),
        ("`plan`'s program compiled here", "compiled_bytes", gib), ("most seen", "seen_bytes", gib),
    ),
    "adapters": (
        ("model", "model", shown), ("prompts", "prompts", shown), ("samples", "samples", shown), ("prompt", "prompt", shown),
        ("response", "response", shown), ("dtype", "dtype", shown), ("whole, s", "ours_whole", shown), ("sampling", "ours_sample", shown),
        ("training", "ours_seconds", shown), ("GiB", "ours_gib", shown), ("TRL whole, s", "trl_whole", shown),
        ("TRL sampling", "trl_sample", shown), ("TRL training", "trl_seconds", shown), ("TRL GiB", "trl_gib", shown),
        ("ratio", "ratio_whole", shown), ("of sampling", "ratio_sample", shown), ("of training", "ratio_seconds", shown),
        ("sampling of the roofline", "sample_share", percent), ("training of the roofline", "train_share", percent),
    ),
    "runs": (
        ("run", "run", shown), ("config", "config", shown), ("steps", "steps", shown), ("updates", "updates", shown),
        ("success before", "before", percent), ("after", "after", percent), ("sampler – scorer, nats", "log_prob_gap", shown),
        ("bound", "bound", shown), ("sampled tokens/s", "sampled_tokens_per_s", shown), ("trained tokens/s", "trained_tokens_per_s", shown),
        ("whole run, s", "seconds", shown),
    ),
}  # fmt: skip
TEXTS = {
    "device": "What one device was measured to do: the best of five. Shares below are of these figures.",
    "attention": "Largest difference from float32 products of XLA (`jax_default_matmul_precision=highest`) on the same inputs, over the "
    "largest value. *float32* runs at that precision too, *float32, default precision* as a run does.",
    "log_probs": "Log-probs of a whole model with random weights against a scorer in float32 with dense attention, which scores the same "
    "tokens. *sampler* and *engine* decode with cached keys; *scorer* is what updates compute.",
    "engine": "As many distinct prompts as slots; no response ends early. Decode steps and shares count the bytes that a step must read "
    "(weights once, keys and values half way through the response). tokens/s include the prefill.",
    "update": "One GRPO step on packed rows, the whole minibatch at once. MFU counts needed products only, nothing that is computed again. "
    "`plan` counts for bfloat16 and `remat=full`, with 96 MiB of logits, which decide where models are small; *most seen* is the "
    "device's own peak, which a CPU does not keep.",
    "adapters": "One GRPO step of an adapter of rank 16 on all matrices, by `benchmarks.adapters`, in turns with TRL and PEFT on the same "
    "device where they are installed. Memory is the most that the device held.",
    "runs": "By `experiments.train`, in a few steps; nothing is learned in so few, the rows show that all of it runs.",
}
TITLES = {
    "device": "The device", "attention": "Attention", "log_probs": "Log-probs", "engine": "Engine", "update": "Update",
    "adapters": "Adapters", "runs": "Mini runs",
}  # fmt: skip

NAMES = ("path", "mask", "source", "dtype", "length", "model", "batch", "groups", "branches", "prompt", "response", "run")  # of a row


def page(rows: list[dict], sizes: Sizes, command: str, commit: str) -> str:
    """The Markdown page: hardware, versions, what failed, a table per part."""
    machine = next((row for row in rows if "platform" in row), {"platform": "unknown", "kind": "unknown", "devices": 0})
    where = machine["platform"].upper()
    failed, left = [row for row in rows if "failed" in row], [row for row in rows if "left_out" in row]
    versions = ", ".join(f"{name} {version}" for name, version in machine.get("versions", {}).items())
    memory = f", {gib(machine['memory_bytes'])} each" if machine.get("memory_bytes") else ""
    only = " No accelerator was at hand: agreement and counts of memory say something about other machines, rates do not."
    lines = [
        "# Accelerators", "",
        f"This is a **{where} page**.{only if where == 'CPU' else ''} `python -m benchmarks.accelerator` writes it on any machine.", "",
        "| | |", "|---|---|",
        f"| devices | {machine['devices']} x {machine['kind']} ({machine['platform']}){memory}; one is measured |",
        f"| host | {machine.get('host', 'unknown')}; load {machine.get('load', 0.0):.1f} when it began |",
        f"| software | Python {machine.get('python', 'unknown')}, {versions} |",
        f"| models | `{sizes.presets}`, random weights, {sizes.compute_dtype}, remat `{sizes.remat}` |",
        f"| command | `{command}` |", f"| commit | {commit} |", f"| failed | {len(failed)} of {len(rows) - len(left)} rows |", "",
    ]  # fmt: skip
    if failed:
        lines += ["## Failures", ""]
        for row in failed:
            about = ", ".join(str(row[key]) for key in NAMES if key in row)
            lines.append(f"- **{row['part']}**{': ' if about else ''}{about}: {shown(row['failed'])}")
        lines.append("")
    for part, columns in COLUMNS.items():
        shown_rows = [row for row in rows if row["part"] == part and "left_out" not in row and any(key in row for _, key, _ in columns)]
        if not shown_rows:
            continue
        columns = [column for column in columns if any(column[1] in row for row in shown_rows)]
        lines += [f"## {TITLES[part]}", "", TEXTS[part], ""]
        lines += ["| " + " | ".join(title for title, *_ in columns) + " |", "|---" * len(columns) + "|"]
        for row in shown_rows:
            cells = [write(row.get(key)) for _, key, write in columns]
            lines.append("| " + " | ".join(cells) + " |" + (" **failed**" if "failed" in row else ""))
        apart = dict.fromkeys(f"`{row['path']}` {row['left_out']}" for row in left if row["part"] == part)
        lines += ["", *([f"Left out: {'; '.join(apart)}.", ""] if apart else [])]
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------------- the command
def main() -> None:
    """The command, and the parts that it starts itself."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="the sizes of a CPU, wherever this runs")
    parser.add_argument("--parts", default=",".join(name for name in PARTS if name != "device"), help="some of them, separated by commas")
    parser.add_argument("--output", type=pathlib.Path, default=ROOT / "docs" / "accelerators.md", help="the page")
    parser.add_argument("--limit_s", type=float, default=3600.0, help="seconds after which a part is stopped and counts as failed")
    for field in FIELDS:
        help_text = f"{getattr(Sizes(), field.name)} on a CPU, {getattr(LARGE, field.name)} on an accelerator"
        parser.add_argument(f"--{field.name}", type=int if field.type == "int" else str, help=help_text)
    parser.add_argument("--part", default="", help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    given = {field.name: value for field in FIELDS if (value := getattr(args, field.name)) is not None}
    if args.part:
        return serve(args.part, Sizes(**given), args.quick)
    if unknown := set(args.parts.split(",")) - set(PARTS):
        parser.error(f"--parts={args.parts}: there is no {', '.join(sorted(unknown))}; the parts are {', '.join(PARTS)}")
    sys.exit(measure(args.parts.split(","), args.tiny, given, args.output, args.limit_s))


def measure(parts: list[str], tiny: bool, given: dict, output: pathlib.Path, limit_s: float) -> int:
    """Runs the parts, prints their rows, writes the page; returns the exit code."""
    from marl_llm.runs.workdir import commit_of

    rows, sizes = [], dataclasses.replace(Sizes(), **given)
    command = shlex.join(["python", "-m", "benchmarks.accelerator", *sys.argv[1:]])
    commit, platform = commit_of(ROOT), ""  # before the page is written
    for part in ["device", *(name for name in parts if name != "device")]:
        for row in rows_of_process(part, sizes, limit_s, platform == "cpu"):
            rows.append(row)
            print(json.dumps(row), flush=True)
            platform = row.get("platform", platform)
        if part == "device" and platform not in ("", "cpu") and not tiny:
            sizes = dataclasses.replace(LARGE, **given)
        output.write_text(page(rows, sizes, command, commit))  # after each part: a lent machine may go before the last
    print(f"{output}: {sum('failed' in result for result in rows)} of {len(rows)} rows failed", file=sys.stderr)
    return int(any("failed" in result for result in rows))


if __name__ == "__main__":
    main()
