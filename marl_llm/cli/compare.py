"""Variants of one config side by side, over seeds: runs of `experiments.train` with a few keys changed, and a table of them.

    python -m marl_llm compare --config=experiments/configs/quickstart.py --seeds=0,1,2 --output=runs/compare
    python -m marl_llm compare --config=experiments/configs/search_parallel.py --seeds=0,1 --output=runs/ab \\
        --variant=separate:assignment=per_role --variant=shared:assignment=shared

A variant is NAME:key=value,key=value, keys of the config. Without --variant, those of Stronger-MAS (tables 1 and 2) are run on games and
environments that have the option `agents`, and on others a model per role against one for all; `imitation` can be named for every config:

    single, team               one agent, or the team, as the supervised warm-up leaves them
    single_grpo, team_grpo     GRPO: K whole plays per task, the play's total reward, groups by (instance, agent)
    at_grpo_shared             AT-GRPO, one model plays both roles
    at_grpo_per_role           AT-GRPO, a model per role
    imitation                  the control: as many CPU seconds as the first other variant took to learn, spent on imitation

--table=4, 6, 7 or figure5 runs those of another table of that paper, or of its Figure 5 (`marl_llm.runs.variants`).

Every run lies in OUTPUT/VARIANT-SEED, and can be continued, evaluated and exported like any other; finished ones are not run again. Equal
seeds give equal random parameters and equal test tasks; each variant imitates its own team's traces. Minibatches hold the same number of
samples in every variant. The table is also written to OUTPUT/table.md; `python -m marl_llm collect` draws its curves.
"""

from __future__ import annotations

import pathlib
import statistics
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from absl import flags, logging
from ml_collections import config_flags

from marl_llm import hints
from marl_llm.runs.command import ConfigError
from marl_llm.runs.variants import IMITATION, TABLES, Changes, check_variants, placed, same_samples, usual

FLAGS = flags.FlagValues()
_CONFIG = config_flags.DEFINE_config_file("config", None, "A training config; variants change some of its keys.", flag_values=FLAGS)
_SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds.", flag_values=FLAGS)
_VARIANTS = flags.DEFINE_multi_string(
    "variant", [], "NAME of a known variant, or NAME:key=value,key=value; may be given many times.", flag_values=FLAGS
)
_TABLE = flags.DEFINE_enum(
    "table", None, TABLES, "Which table of Stronger-MAS; default: 1, where the game has the option `agents`.", flag_values=FLAGS
)
_OUTPUT = flags.DEFINE_string(
    "output", "runs/compare", "Directory of the runs; finished ones found there are not run again.", flag_values=FLAGS
)
TIED_STEPS = 10
INTERRUPTED = "interrupted; the same command goes on with the run that was cut short"


def variants_of(config, texts: list[str], table: str | None = None) -> dict[str, Changes]:
    """Variant -> keys and values. Raises `ConfigError` for an unknown name, or text that is no list of keys and values."""
    of_table = usual(config, table)
    known, out = {**of_table, IMITATION: {}}, {}
    for text in texts:
        name, _, changes = text.partition(":")
        if not changes and name not in known:
            raise ConfigError(f"--variant={text!r}: {hints.suggestion(name, known)}, or write NAME:key=value,key=value")
        pairs = [part.partition("=") for part in filter(None, changes.split(","))]
        if any(not key or not equal for key, equal, _ in pairs):
            raise ConfigError(f"--variant={text!r} is not like 'shared:assignment=shared,steps=100'")
        out[name] = {key: value for key, _, value in pairs} if changes else known[name]
    out = out or dict(of_table)
    if set(out) == {IMITATION}:
        raise ConfigError("imitation is measured against another variant's compute; name one beside it")
    return out


def imitation(config, example: pathlib.Path) -> dict[str, str]:
    """The control's changes: no reinforcement, and imitation for the CPU seconds that the run `example` took to learn."""
    from marl_llm.reporting import read_metrics

    lines = read_metrics(example)
    warm = [line for line in lines if line["phase"] == "sft"]
    train = [line for line in lines if line["phase"] == "train"]
    if not warm or not train:
        raise ConfigError(f"imitation: {example} has no supervised warm-up or took no step, so there is nothing to match")
    # from the second line on, because the first step compiles
    each = (warm[-1]["cpu_s"] - warm[0]["cpu_s"]) / max(warm[-1]["step"] - warm[0]["step"], 1)
    learning = sum(line["time/sample"] + line["time/update"] for line in train[1:])
    share = (train[-1]["cpu_s"] - warm[-1]["cpu_s"]) / max(train[-1]["wall_s"] - warm[-1]["wall_s"], 1e-9)
    more = round(learning * share / max(each, 1e-9))
    return {"steps": "0", "sft.steps": str(config.sft.steps + max(more, 1))}


def launch(arguments: list[str]) -> None:
    """One run, in a process of its own, which takes its compiled programs with it when it ends. Raises `ConfigError` if it fails."""
    done = subprocess.run([sys.executable, "-m", "marl_llm", "train", *arguments])  # finds this package's `experiments` from any folder
    if done.returncode:
        raise ConfigError(f"python -m experiments.train {' '.join(arguments)} ended with {done.returncode}; see above")


def run_all(config, flags_given: list[str], variants: Mapping[str, Changes], seeds: list[int], output: pathlib.Path) -> dict[str, list]:
    """Runs what is missing; variant -> directories of its runs."""
    runs: dict[str, list[pathlib.Path]] = {}
    for seed in seeds:
        for name, changes in sorted(variants.items(), key=lambda item: item[0] == IMITATION):
            folder = output / f"{name}-{seed}"
            if name == IMITATION:
                changes = imitation(config, next(iter(runs.values()))[-1]) if not (folder / "config.json").exists() else {}
            if not (folder / "evaluation.json").exists():
                changed = [f"--config.{key}={value}" for key, value in placed(same_samples(config, changes), output, seed).items()]
                again = name == IMITATION and (folder / "config.json").exists()
                flags_of = [f"--resume={folder}"] if again else [*flags_given, *changed, f"--config.seed={seed}", f"--workdir={folder}"]
                print(f"{name}, seed {seed}: python -m experiments.train {' '.join(flags_of)}", file=sys.stderr)
                launch(flags_of)
            runs.setdefault(name, []).append(folder)
    return runs


def columns(groups: Mapping[str, list[dict]], table: str | None) -> dict[str, dict[str, str]]:
    """What a table has beside the usual columns: title -> a text per variant; figures are sampled where that is measured."""
    paths = {
        "4": {"swapped": ("swapped", "success")},
        "figure5": {"majority": ("after", "team", "majority"), "any correct": ("after", "team", "any_correct")},
    }.get(table or "", {})
    added = {title: {name: mean_at(runs, *path) for name, runs in groups.items()} for title, path in paths.items()}
    if table == "4":
        for title, page in (("well-formed", "after"), ("well-formed, swapped", "swapped")):
            added[title] = {name: well_formed(runs, page) for name, runs in groups.items()}
    if table == "6":
        added[f"tied groups, first {TIED_STEPS} steps"] = {name: mean_tied(runs) for name, runs in groups.items()}
    return added


def figure_at(run: dict, *path: str) -> Any:
    """What lies at a path in a run's evaluation, the sampled one where there is one; an empty dictionary where nothing does."""
    value = run["evaluation"].get("sampled", run["evaluation"])
    for key in path:
        value = value.get(key, {})
    return value


def mean_at(runs: list[dict], *path: str) -> str:
    """The mean over runs of a figure of their evaluation, empty where one has none."""
    figures = [figure_at(run, *path) for run in runs]
    return "" if {} in figures else f"{statistics.mean(figures):.3f}"


def well_formed(runs: list[dict], page: str) -> str:
    """Each role's share of well-formed answers in a table of seats."""
    return ", ".join(f"{role} {mean_at(runs, page, 'roles', role, 'well_formed')}" for role in figure_at(runs[0], page, "roles"))


def mean_tied(runs: list[dict]) -> str:
    """The share of groups whose rewards are all equal, over all models; empty where no step was taken."""
    lines = [line for run in runs for line in run["metrics"] if line["phase"] == "train" and line["step"] <= TIED_STEPS]
    shares = [value for line in lines for name, value in line.items() if name.startswith("model/") and name.endswith("/tied_share")]
    return f"{statistics.mean(shares):.2f}" if shares else ""


def main(argv) -> None:
    """Runs what is missing and prints the table."""
    from marl_llm.cli.collect import LEGEND, headline, read_run, table
    from marl_llm.runs.reported import reported
    from marl_llm.runs.workdir import RECORD_BOUNDS, differences, plain, write_json
    from marl_llm.untrusted import read_json_file

    logging.set_verbosity(logging.WARNING)
    config = _CONFIG.value
    if config is None:
        raise ConfigError("--config is missing, e.g. --config=experiments/configs/quickstart.py")
    if any(not seed.strip().isdecimal() for seed in _SEEDS.value) or not _SEEDS.value:
        raise ConfigError(f"--seeds={','.join(_SEEDS.value)} must be whole numbers with commas between, e.g. --seeds=0,1,2")
    variants, output = variants_of(config, _VARIANTS.value, _TABLE.value), pathlib.Path(_OUTPUT.value)
    check_variants(config, variants, output)
    record, now = output / "config.json", {"config": plain(config), "variants": variants}
    output.mkdir(parents=True, exist_ok=True)
    if record.exists():
        before = read_json_file(record, bounds=RECORD_BOUNDS, error=ConfigError)
        if not all(isinstance(before.get(key), dict) for key in now):
            raise ConfigError(f"{record} is no record of a comparison: it lacks its config or its variants; choose another --output")
        changed = differences(before["config"], now["config"])
        changed += [f"variant {n}" for n in variants if before["variants"].get(n, variants[n]) != variants[n]]
        if changed:
            raise ConfigError(f"{output} holds runs of another config; choose another --output:\n  " + "\n  ".join(changed))
        now["variants"] = before["variants"] | variants
    write_json(record, now)
    given = [arg for arg in sys.argv[1:] if arg.lstrip("-").removeprefix("no").startswith("config")]
    runs = run_all(config, given, variants, [int(seed) for seed in _SEEDS.value], output)
    groups = {name: [read_run(folder) for folder in folders] for name, folders in runs.items()}
    paper = {name: reported(config.game.name, name, _TABLE.value) for name in runs}
    text = f"{headline(groups)}\n\n" + table(groups, {**columns(groups, _TABLE.value), "the paper reports": paper})
    text += f"\n\n{LEGEND}"
    (output / "table.md").write_text(text + "\n")
    print(text)
