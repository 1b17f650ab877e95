"""The variants of Stronger-MAS (tables 1 and 2) side by side, over seeds, at matched optimisation steps and at matched sampled tokens.

    python -m experiments.compare --config=experiments/configs/quickstart.py --seeds=0,1,2 --output=runs/compare
    python -m experiments.compare --config=experiments/configs/quickstart.py --config.game.view=split \
        --variants=single_grpo,at_grpo_per_role --output=runs/compare_split

    random                     uniformly random well-formed play: the floor
    single, team               after the warm start, before any reinforcement
    single_grpo, team_grpo     GRPO: K whole plays per map, the play's total reward, groups by (instance, agent)
    at_grpo_shared             AT-GRPO, one model plays both roles
    at_grpo_per_role           AT-GRPO, a model per role
    imitation                  the control: as many CPU seconds as at_grpo_per_role (else the costliest variant), all spent on imitation

All variants of a seed start from one base, which imitated traces of both the team and the single agent, and are measured on the
same maps of the test split, greedily. A step is one rollout of E instances with K responses and one update of each model;
minibatches hold the same number of samples in every variant. Finished (variant, seed) pairs are kept in OUTPUT/results.jsonl and
not run again.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
import time

from absl import flags, logging
from ml_collections import config_flags

from experiments import command
from experiments.common import hardware_of, start_jax

VARIANTS = ("single_grpo", "team_grpo", "at_grpo_shared", "at_grpo_per_role", "imitation")

_CONFIG = config_flags.DEFINE_config_file("config", None, "A training config of Plan-Path; its recipe fields serve AT-GRPO.")
_SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds.")
_VARIANTS = flags.DEFINE_list("variants", list(VARIANTS), f"Trained variants, of {', '.join(VARIANTS)}.")
_EVERY = flags.DEFINE_integer("every", 25, "Steps between evaluations.", lower_bound=1)
_OUTPUT = flags.DEFINE_string("output", "runs/compare", "Directory of the results; finished pairs found there are not run again.")


@dataclasses.dataclass
class Variant:
    """One way of training, compiled once and run for every seed."""

    name: str
    plan: object
    rollout: object
    update: object
    team: object


def build(name: str, config, mesh) -> Variant:
    """Compiles what a variant needs. The GRPO variants take their loss fields from the config's recipe, as AT-GRPO does."""
    from experiments.base import resolve
    from marl_llm import evaluation, training
    from marl_llm.algorithms import make_recipe

    config = config.copy_and_resolve_references()
    config.assignment = "shared" if name in ("at_grpo_shared", "single_grpo") else "per_role"
    config.game.agents = "single" if name == "single_grpo" else "team"
    plan = resolve(config)
    k = plan.recipe.branches
    if name.endswith("_grpo") and name != "at_grpo":
        fields = ("branches", "alpha", "scale", "reduce", "skip_tied", "entropy_coef")
        same = {f: getattr(plan.recipe, f) for f in fields}
        same |= {"tied_in_denominator": plan.recipe.tied_in_denominator} if plan.recipe.skip_tied else {}
        recipe = make_recipe("grpo", rewards="mixed", returns="trajectory", **same)
        plan = dataclasses.replace(plan, recipe=recipe)
    o = config.optimizer
    optimizer = training.make_optimizer(o.max_grad_norm, b2=o.b2, weight_decay=o.weight_decay)
    # rows of a tree hold K samples, rows of whole plays one: the same number of samples per optimizer step
    minibatch = o.minibatch * (1 if plan.recipe.sampling == "tree" else k)
    return Variant(
        name,
        plan,
        training.make_rollout(
            plan.game, plan.recipe, plan.assignment, plan.configs, mesh, environments=config.rollout.environments
        ),
        training.make_update(plan.recipe, plan.model, optimizer, mesh, minibatch=minibatch, epochs=o.epochs),
        evaluation.TeamEvaluation(
            plan.game, plan.assignment, plan.configs, mesh, chunk=config.evaluation.episodes, seed=config.evaluation.seed
        ),
    )


def learn(variant: Variant, base, seed: int, config, optimizer) -> dict:
    """Trains one variant from a base; returns its curve: (step, sampled tokens, CPU seconds, success on the test split)."""
    import jax
    import jax.numpy as jnp

    from marl_llm import training

    plan, episodes = variant.plan, config.evaluation.final_episodes
    _, _, data_key, update_key = jax.random.split(jax.random.key(seed), 4)
    policies = {m: training.make_policy(base, optimizer) for m in plan.models}
    plays = {m: jnp.asarray([plan.assignment[r.name] == m for r in plan.game.roles]) for m in plan.models}
    params = lambda: {m: p.params for m, p in policies.items()}  # noqa: E731
    success = lambda: variant.team.team(params(), "test", episodes)["success"]  # noqa: E731
    curve, tokens, samples, updates, cpu = [[0, 0, 0.0, success()]], 0, 0, 0, 0.0
    for step in range(config.steps):
        tick = time.process_time()
        batch = variant.rollout(params(), jnp.int32(step * config.rollout.environments), data_key)
        rate = training.linear_decay(step, config.steps, config.optimizer.learning_rate, config.optimizer.warmup, floor=0.05)
        for m in plan.models:
            key = jax.random.fold_in(update_key, step)
            policies[m], figures = variant.update(policies[m], None, batch.rows, plays[m], rate, key)
            updates += int(figures["updates"])
        tokens, samples = tokens + int(batch.summary["sampled_tokens"]), samples + int(batch.summary["samples"])
        if step:  # the first step compiles
            cpu += time.process_time() - tick
        if (step + 1) % _EVERY.value == 0 or step + 1 == config.steps:
            curve.append([step + 1, tokens, cpu, success()])
    out = {"curve": curve, "samples": samples, "updates": updates / len(plan.models), "cpu_s": cpu}
    if len(plan.models) > 1:
        a, b = plan.models
        now = params()
        out["swapped"] = variant.team.team({a: now[b], b: now[a]}, "test", episodes)
        out["pairs"] = {m: variant.team.team({x: now[x] if x == m else base for x in plan.models}, "test", episodes) for m in now}
    return out


def run_seed(seed: int, variants: dict[str, Variant], config, mesh, results: dict, save) -> None:
    """All variants of one seed that are not finished."""
    import jax
    import jax.numpy as jnp

    from marl_llm import training
    from marl_llm.games import make_game

    wanted = [n for n in [*variants, *(["imitation"] if "imitation" in _VARIANTS.value else [])] if (n, seed) not in results]
    if not wanted:
        return
    o, w = config.optimizer, config.warm_start
    optimizer = training.make_optimizer(o.max_grad_norm, b2=o.b2, weight_decay=o.weight_decay)
    any_plan = next(iter(variants.values())).plan
    options = dataclasses.asdict(any_plan.game)
    games = [make_game("plan_path", **(options | {"agents": a})) for a in ("team", "single")]
    init_key, warm_key, *_ = jax.random.split(jax.random.key(seed), 4)
    imitate = training.make_imitation(
        games, any_plan.model, optimizer, mesh, environments=w.environments, branches=w.branches, script=any_plan.script
    )
    policy = training.fresh_policy(any_plan.model, init_key, optimizer)
    for step in range(w.steps):
        rate = training.linear_decay(step, w.steps, w.learning_rate, warmup=20, floor=0.1)
        policy, _ = imitate(policy, jnp.int32(step), rate, warm_key)
    base = jax.tree.map(jnp.copy, policy.params)
    for name, variant in variants.items():
        if name in wanted:
            results[name, seed] = learn(variant, base, seed, config, optimizer)
            save(name, seed)
    if "imitation" in wanted:
        costs = {n: results[n, seed]["cpu_s"] for n in variants}
        budget = costs.get("at_grpo_per_role", max(costs.values()))
        more = training.make_policy(base, optimizer)
        spent, step = 0.0, 0
        rate = jnp.float32(0.5 * w.learning_rate)  # constant: nobody knows in advance how many steps the budget buys
        while spent < budget:
            tick = time.process_time()
            more, figures = imitate(more, jnp.int32(w.steps + step), rate, warm_key)
            jax.block_until_ready(figures)
            if step:  # the first step may compile
                spent += time.process_time() - tick
            step += 1
        team = next((v for n, v in variants.items() if n != "single_grpo"), None)
        success = lambda p: team.team.team(  # noqa: E731
            dict.fromkeys(team.plan.models, p), "test", config.evaluation.final_episodes
        )["success"]
        if team is not None:
            curve = [[0, 0, 0.0, success(base)], [step, 0, spent, success(more.params)]]
            results["imitation", seed] = {"curve": curve, "samples": 0, "updates": step, "cpu_s": spent}
            save("imitation", seed)


def at_tokens(curve: list, budget: int) -> float:
    """Success at a token budget, linear between the evaluations around it."""
    for (_, t0, _, s0), (_, t1, _, s1) in zip(curve, curve[1:]):
        if t0 <= budget <= t1:
            return s0 + (s1 - s0) * (budget - t0) / max(t1 - t0, 1)
    return curve[-1][3]


def table(results: dict, floor: dict, config) -> str:
    """Markdown: mean over seeds with the 95 % Student interval, at the last step and at equal sampled tokens."""
    from marl_llm.evaluation import over_seeds

    names = [n for n in VARIANTS if any(v == n for v, _ in results)]
    seeds = lambda n: sorted(s for v, s in results if v == n)  # noqa: E731
    trained = [n for n in names if n != "imitation"]
    budget = min(results[n, s]["curve"][-1][1] for n in trained for s in seeds(n))
    show = lambda values: "{:.1%} [{:.1%}, {:.1%}]".format(*over_seeds(values)) if len(values) > 1 else f"{values[0]:.1%}"  # noqa: E731
    rows = [
        f"{config.evaluation.final_episodes} test maps, view={config.game.view or 'full'}, {config.steps} steps; "
        f"tokens matched at {budget:,}",
        "",
        "| variant | seeds | success at equal steps | at equal sampled tokens | samples | optimizer steps per model | CPU s |",
        "|---|---|---|---|---|---|---|",
        f"| random legal play | – | {floor['success']:.1%} | | | | |",
    ]
    for label, source in (("single agent, warm start", "single_grpo"), ("team, warm start", "at_grpo_per_role")):
        if source in names:
            start = [results[source, s]["curve"][0][3] for s in seeds(source)]
            rows.append(f"| {label} | {len(start)} | {show(start)} | | | | |")
    for n in names:
        runs = [results[n, s] for s in seeds(n)]
        mean = lambda key, runs=runs: sum(r[key] for r in runs) / len(runs)  # noqa: E731
        tokens = show([at_tokens(r["curve"], budget) for r in runs]) if n != "imitation" else "–"
        rows.append(
            f"| {n} | {len(runs)} | {show([r['curve'][-1][3] for r in runs])} | {tokens} | {mean('samples'):,.0f} | "
            f"{mean('updates'):,.0f} | {mean('cpu_s'):.0f} |"
        )
    return "\n".join(rows)


def main(argv) -> None:
    """Runs what is missing and prints the table."""
    from experiments.base import ConfigError
    from experiments.workdir import commit_of, differences, plain, write_json

    logging.set_verbosity(logging.WARNING)
    try:
        config = _CONFIG.value
        if config is None or config.game.name != "plan_path":
            raise ConfigError("--config must name a Plan-Path config, e.g. --config=experiments/configs/quickstart.py")
        unknown = sorted(set(_VARIANTS.value) - set(VARIANTS))
        if unknown or not _VARIANTS.value:
            raise ConfigError(f"unknown variants {unknown}; the variants are {', '.join(VARIANTS)}")
        if set(_VARIANTS.value) == {"imitation"}:
            raise ConfigError("imitation is measured against another variant's compute; name one beside it")
        mesh = start_jax(config, "~/.cache/marl_llm/xla")
        output = pathlib.Path(_OUTPUT.value)
        output.mkdir(parents=True, exist_ok=True)
        record = output / "config.json"
        if record.exists():
            changed = differences(json.loads(record.read_text())["config"], plain(config))
            if changed:
                raise ConfigError(f"{output} holds results of another config; choose another --output:\n  " + "\n  ".join(changed))
        else:
            write_json(
                record,
                {"config": plain(config), "commit": commit_of(pathlib.Path(__file__).parent), "hardware": hardware_of(mesh)},
            )
        lines = output / "results.jsonl"
        results = {}
        for line in lines.read_text().splitlines() if lines.exists() else []:
            entry = json.loads(line)
            results[entry.pop("variant"), entry.pop("seed")] = entry

        def save(name, seed):
            with lines.open("a") as f:
                f.write(json.dumps({"variant": name, "seed": seed, **results[name, seed]}) + "\n")
            print(f"seed {seed} {name}: {results[name, seed]['curve'][-1][3]:.1%}", file=sys.stderr)

        variants = {n: build(n, config, mesh) for n in VARIANTS if n in _VARIANTS.value and n != "imitation"}
        for seed in _SEEDS.value:
            run_seed(int(seed), variants, config, mesh, results, save)
        floor = next(iter(variants.values())).team.floor("test", config.evaluation.final_episodes)
        text = table(results, floor, config)
        (output / "table.md").write_text(text + "\n")
        print(text)
    except (ConfigError, OSError, ValueError) as error:
        command.fail(error)


if __name__ == "__main__":
    command.run(main)
