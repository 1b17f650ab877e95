"""Trains the team of a workflow: host games with real tools. `experiments.train` calls it for configs that have a `world`.

    python -m experiments.train --config=experiments/configs/search_parallel.py --workdir=runs/a
    python -m experiments.train --config=experiments/configs/plan_code_reflect.py --workdir=runs/d --config.recipe.name=ppo

The run directory holds what `experiments.train` writes, and beside it graph.svg, trajectories.jsonl (whole plays as graphs, to be replayed)
and before_after.md.
"""

from __future__ import annotations

import json
import pathlib
import sys
import time

from experiments.base import MICROBATCH, ConfigError
from experiments.common import Alarms, TrainingError, check_finite, hardware_of, start_jax
from experiments.team_base import TeamPlan, check_team, parse_sources, resolve_team
from experiments.workdir import open_workdir, write_json


def describe(config) -> str:
    """What `--dry_run` prints."""
    plan = resolve_team(config)
    with plan.world:
        return plan.table(config)


def model_specs(plan: TeamPlan, config, mesh) -> dict:
    """How each model of the team begins: random parameters, the same for equal shapes, or a checkpoint's."""
    import jax

    from marl_llm.models import LoraConfig, init_params, load_pretrained, make_model_config
    from marl_llm.text import load_chat
    from marl_llm.training import ModelSpec

    made: dict = {}  # what equal sections share: teams of one base begin from one array
    specs = {}
    for name in plan.assignment.policies:
        o = dict(plan.options[name])
        lora = LoraConfig(o["lora_rank"], o["lora_alpha"]) if o.get("lora_rank") else None
        shape = {key: value for key, value in o.items() if key not in ("kind", "preset", "path", "lora_rank", "lora_alpha")}
        key = json.dumps([o.get("path"), o.get("preset"), shape], sort_keys=True)
        if key not in made and "path" in o:
            try:
                made[key] = (*load_pretrained(o["path"], mesh=mesh, stacked=config.stacked_layers, **shape), load_chat(o["path"]))
            except ValueError as error:
                raise ConfigError(f"config.models.{name}.path={o['path']!r}: {error}") from error
        elif key not in made:
            model = make_model_config(o["preset"], plan.world.speech.tokenizer.vocab_size, **shape)
            made[key] = (model, init_params(model, jax.random.key(config.seed), stacked=config.stacked_layers), plan.world.speech)
        specs[name] = ModelSpec(*made[key], lora)
    return specs


def build_team(plan: TeamPlan, config, mesh):
    """The team of a config, at its start. Whoever builds it closes it."""
    from marl_llm.training import LearnerOptions, PlayOptions, Team, make_optimizer

    o, r = config.optimizer, config.rollout
    tokens = o.microbatch_tokens
    if tokens is None:
        tokens = max(MICROBATCH, o.row_tokens) if mesh.devices.flat[0].platform == "cpu" else 0
    optimizer = make_optimizer(o.max_grad_norm, b2=o.b2, weight_decay=o.weight_decay)
    options = LearnerOptions(plan.recipe, optimizer, o.row_tokens, o.minibatch, o.epochs, tokens, o.critic)
    play = PlayOptions(r.slots, r.chunk, r.attempts, r.timeout_s, r.concurrency)
    specs = model_specs(plan, config, mesh)
    permute = config.control.permute_rewards
    return Team(plan.world, plan.assignment, specs, options, mesh, play=play, seed=config.seed, permute_rewards=permute)


def success_of(figures: dict, headline: str, roles) -> dict:
    """Figures of an evaluation as reports read them."""
    shares = {role: {"well_formed": figures[f"role/{role}/legal_share"]} for role in roles}
    team = {name.removeprefix("team/"): x for name, x in figures.items() if name.startswith("team/")}
    return {"success": team[headline], "turns": figures["turns"], "episodes": int(figures["episodes"]), "roles": shares, "team": team}


def start_of(start):
    """The checkpoints of the run that a config starts from. Raises `ConfigError` if the one it asks for is not there."""
    from marl_llm.training import Checkpoints

    checkpoints = Checkpoints(pathlib.Path(start.run) / "checkpoints")
    if start.step not in (there := checkpoints.steps()):
        found = ", ".join(map(str, there)) or "none"
        raise ConfigError(f"config.warm_start.run={start.run!r} has no checkpoint {start.step}; it has {found}")
    return checkpoints


def policies_of(start, like: dict) -> dict:
    """The policies that a config starts from, in the shapes of `like`. Raises `ConfigError` if the other run's are not of this kind."""
    from marl_llm.training import CheckpointError

    checkpoints, sources = start_of(start), parse_sources(start.models)
    try:
        return {name: checkpoints.restore(start.step, {sources.get(name, name): policy}).popitem()[1] for name, policy in like.items()}
    except CheckpointError as error:
        folder = checkpoints.directory / str(start.step) / "policies"
        there = ", ".join(sorted(path.name for path in folder.glob("*"))) or "none"
        why = f"{error.__cause__}. It has {there}; config.warm_start.models can name another, e.g. {next(iter(like))}=..."
        raise ConfigError(f"config.warm_start.run={start.run!r} cannot begin this team: {why}") from error


def train_team(config, workdir: pathlib.Path, config_file: str, cache: str) -> dict:
    """Runs a config to its end and returns the final evaluation. See the module's text for what it writes."""
    from marl_llm.training import Checkpoints
    from marl_llm.workflows import RolloutError

    started, cpu_started = time.time(), time.process_time()
    check_team(config)
    mesh = start_jax(config, cache, divide=False)  # before the world: its index would start JAX with one device
    plan = resolve_team(config)
    with plan.world:
        if config.warm_start.run and not Checkpoints(workdir / "checkpoints").steps():
            start_of(config.warm_start)  # before a directory is made for a run that cannot begin
        continues = open_workdir(workdir, config, config_file, hardware_of(mesh))
        if continues and (workdir / "evaluation.json").exists() and (workdir / "report.html").exists():
            print(f"{workdir} is complete; its report is {workdir / 'report.html'}", file=sys.stderr)
            return json.loads((workdir / "evaluation.json").read_text())
        with build_team(plan, config, mesh) as team:
            try:
                return _Run(plan, config, workdir, team, started, cpu_started, continues).to_the_end()
            except RolloutError as error:
                raise TrainingError(f"{error}. The same command goes on from the last checkpoint") from error


class _Run:
    """A run under way."""

    def __init__(self, plan: TeamPlan, config, workdir: pathlib.Path, team, started: float, cpu_started: float, continues: bool):
        from marl_llm import reporting, training
        from marl_llm.reporting import files
        from marl_llm.workflows import to_svg
        from marl_llm.workflows.storage import FILE_NAME

        self.plan, self.config, self.workdir, self.team = plan, config, workdir, team
        self.workflow, self.roles = plan.world.workflow, list(plan.world.workflow.roles)
        self.checkpoints = training.Checkpoints(workdir / "checkpoints", keep=config.checkpoint.keep)
        self.done = self.checkpoints.steps() if continues else []
        resume = (self.done[-1] if self.done else -1) if continues else None
        if continues:
            for name in ("episodes.jsonl", FILE_NAME):
                files.keep_lines(workdir / name, lambda play: play.get("step", 2**31) < resume)  # steps from 0: what is played again goes
        self.metrics = reporting.MetricsWriter(workdir, resume_step=resume)
        self.episodes = reporting.EpisodeWriter(workdir, resume_step=resume)
        (workdir / "graph.svg").write_text(to_svg(self.workflow, dict(plan.assignment.roles)))
        self.started, self.cpu_started, self.before = started, cpu_started, (0.0, 0.0)

    def clock(self) -> dict[str, float]:
        """Wall and CPU seconds of the run, those of processes before this one included."""
        wall, cpu = time.time() - self.started, time.process_time() - self.cpu_started
        return {"wall_s": wall + self.before[0], "cpu_s": cpu + self.before[1]}

    def to_the_end(self) -> dict:
        """Warm start or resume, the loop, what was learned."""
        from marl_llm import reporting

        state = self.begin()
        self.progress = reporting.Progress(self.config.steps, "train", start=state["step"])
        alarms = Alarms(state["silent"], self.progress.note)
        if not self.done:
            self.progress.note(f"step 0: validation {self.plan.world.headline} {self.validate(0):.1%}")
            self.checkpoints.save(0, self.team.policies(), state | self.clock())
        for step in range(state["step"], self.config.steps):
            self.step(step, state, alarms)
        self.progress.close()
        return self.results()

    def begin(self) -> dict:
        """The state at which reinforcement begins or goes on."""
        team, w = self.team, self.config.warm_start
        if self.done:
            like = team.policies()
            start = self.checkpoints.restore(0, like)
            state = self.checkpoints.state(self.done[-1])
            team.restore(start, self.checkpoints.restore(self.done[-1], like))
            now = self.clock()
            self.before = (state["wall_s"] - now["wall_s"], state["cpu_s"] - now["cpu_s"])
            print(f"continuing {self.workdir} after step {state['step']}", file=sys.stderr)
            return state
        from marl_llm import reporting
        from marl_llm.training import linear_decay

        if w.run:
            self.team.start_from(policies_of(w, {name: learner.policy for name, learner in team.learners.items()}))
        elif w.steps:
            with reporting.Progress(w.steps, "warm start") as progress:
                for step in range(w.steps):
                    rate = float(linear_decay(step, w.steps, w.learning_rate, warmup=20, floor=0.1))
                    figures = team.imitate(step % (w.fresh or w.steps), w.tasks, rate)
                    if step == 0 or step % 10 == 9 or step == w.steps - 1:
                        check_finite(figures, step, "of the warm start")
                        self.metrics.write({"phase": "warm_start", "step": step + 1, **self.clock(), **figures})
                        progress.update(step + 1, loss=figures["loss"])
            team.begin()
        return {"step": 0, "sampled_tokens": 0, "samples": 0, "silent": dict.fromkeys(self.plan.assignment.trained, 0)}

    def validate(self, step: int) -> float:
        """A greedy evaluation on the validation split, with its line in metrics.jsonl."""
        figures, _ = self.team.evaluate("validation", self.config.evaluation.tasks, greedy=True)
        record = {"phase": "eval", "step": step, "success": figures[f"team/{self.plan.world.headline}"], "turns": figures["turns"]}
        record |= {name: x for name, x in figures.items() if name.startswith("team/")}
        record |= {f"role/{role}/well_formed": figures[f"role/{role}/legal_share"] for role in self.roles}
        self.metrics.write(record)
        return record["success"]

    def step(self, step: int, state: dict, alarms: Alarms) -> None:
        """One rollout and one update of each model that trains."""
        from marl_llm.training import linear_decay
        from marl_llm.workflows.metrics import rollout_metrics

        c, o, tick = self.config, self.config.optimizer, time.perf_counter()
        schedule = lambda peak: float(linear_decay(step, c.steps, peak, o.warmup, floor=0.05))  # noqa: E731
        rate = schedule(o.learning_rate)
        rollout = self.team.play(step, step * c.rollout.tasks, c.rollout.tasks)
        tock = time.perf_counter()
        models, table = self.team.learn(rollout, rate, schedule(o.critic_learning_rate or o.learning_rate))
        tack = time.perf_counter()
        figures = rollout_metrics(rollout, table)
        record = {"phase": "train", "step": step + 1, "learning_rate": rate, "success": figures[f"team/{self.plan.world.headline}"]}
        record |= figures
        for name, found in models.items():
            check_finite(found, step, name)
            alarms.look(step + 1, name, found)
            found["kl"] = found.get("kl", found.get("old_kl", 0.0))
            found["clip_fraction"] = found.get("clip_low", 0.0) + found.get("clip_high", 0.0)
            record |= {f"model/{name}/{key}": x for key, x in found.items() if not key.startswith("tied_share/")}
            for agent, role in enumerate(self.roles):
                if self.plan.assignment.roles[role] == name:
                    record[f"role/{role}/zero_variance"] = found.get(f"tied_share/{agent}", 0.0)
                    record[f"role/{role}/entropy"] = found.get("entropy", 0.0)
        for name in set(self.plan.assignment.training(step)) - set(models):  # its roles did not speak, or every play was void
            alarms.look(step + 1, name, {"useful_groups": 0, "grad_norm": 0.0, "log_prob_gap": 0.0})
        drawn = [sample for sample in table.samples if sample.call.log_probs is not None]
        state["step"], state["samples"] = step + 1, state["samples"] + len(drawn)
        state["sampled_tokens"] += sum(sample.response_ids.size for sample in drawn)
        record |= {f"role/{role}/well_formed": figures[f"role/{role}/legal_share"] for role in self.roles}
        record |= {"samples": state["samples"], "sampled_tokens": state["sampled_tokens"], **self.clock()}
        record |= {"time/sample": tock - tick, "time/update": tack - tock}
        self.metrics.write(record)
        self.progress.update(step + 1, **{self.plan.world.headline: record["success"], "turns": record["turns"]})
        last = step + 1 == c.steps
        if (step + 1) % c.evaluation.every == 0 or last:
            self.progress.note(f"step {step + 1}: validation {self.plan.world.headline} {self.validate(step + 1):.1%}")
        if (step + 1) % c.checkpoint.every == 0 or last:
            self.record(rollout, 1, "train")
            self.checkpoints.save(step + 1, self.team.policies(), state | self.clock())

    def record(self, rollout, episodes: int, when: str) -> None:
        """The first plays of a rollout, for the report and to be replayed."""
        import dataclasses

        from marl_llm.workflows.samples import sample_table
        from marl_llm.workflows.storage import report_episodes, write_trajectories

        few = dataclasses.replace(rollout, episodes=rollout.episodes[:episodes])
        for play, tokens in report_episodes(few, sample_table(few), when):
            self.episodes.write(play | {"episode": f"{when}-{play['episode']}"}, tokens | {"episode": f"{when}-{play['episode']}"})
        write_trajectories(self.workdir, few)

    def results(self) -> dict:
        """The final evaluation on the test split, greedy and sampled: before, after, and with each role's untrained model put back."""
        from marl_llm import reporting
        from marl_llm.workflows.metrics import before_after

        v, team, headline = self.config.evaluation, self.team, self.plan.world.headline
        trained = [role for role in self.roles if self.plan.assignment.roles[role] in self.plan.assignment.trained]
        results: dict = {"split": "test", "headline": headline, "seed": self.config.seed, "steps": self.config.steps}
        tables = []
        for way, greedy in (("greedy", True), ("sampled", False)):
            after, rollout = team.evaluate("test", v.final_tasks, greedy)
            put_back = [[role] for role in trained] if v.put_back and len(trained) > 1 else []
            before, *mixed = team.evaluate_mixed([trained, *put_back], "test", v.final_tasks, greedy)
            parts = {"before": success_of(before, headline, self.roles), "after": success_of(after, headline, self.roles)}
            parts["pairs"] = {f"{r} untrained": success_of(f, headline, self.roles) for (r,), f in zip(put_back, mixed, strict=True)}
            results |= parts if greedy else {"sampled": parts}
            tables.append(f"## {way}, {v.final_tasks} tasks of the test split\n\n{before_after(before, after)}")
            if greedy and v.transcripts:
                self.record(rollout, v.transcripts, "after")
        results |= {f"train_{name}": x for name, x in self.clock().items()}
        self.metrics.close()
        self.episodes.close()
        (self.workdir / "before_after.md").write_text("\n".join(tables))
        write_json(self.workdir / "evaluation.json", results)
        report = reporting.write_report(self.workdir)
        print("\n".join(tables) + f"\nreport: {report}   total {self.clock()['wall_s']:.0f} s", file=sys.stderr)
        return results
