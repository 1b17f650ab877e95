"""How large a step a team can take: what one step of training does to responses that it was not trained on.

  python -m benchmarks.step_sizes --config=experiments/configs/function_debate.py --run=runs/code --minibatches=8,128 --rates=5e-5,2e-4

Two rollouts of different training tasks are played by the models with which `--run` began its reinforcement. Each setting trains these
models on the first rollout, with a new optimizer, and scores the responses y of the second one again. One line of JSON per setting and
role, in nats per response; d is the change of log π(y), A the advantage:

  gain   mean of A d: what the step is worth, to first order in reward; gain_error is its standard error
  drift  mean of d, which is minus KL(before, after): what the step costs. good, bad: the same for A > 0 and for A < 0
"""

import json

import numpy as np
from absl import app, flags, logging
from ml_collections import config_flags

_CONFIG = config_flags.DEFINE_config_file("config", None, "a config file, perhaps with a variant")
_RUN = flags.DEFINE_string("run", None, "directory of a run of this config, with its checkpoint of step 0")
_TASKS = flags.DEFINE_integer("tasks", 32, "training tasks of each of the two rollouts")
_MINIBATCHES = flags.DEFINE_list("minibatches", ["8", "128"], "prompts per optimizer step")
_RATES = flags.DEFINE_list("rates", ["5e-5", "2e-4", "6e-4"], "learning rates")


def scored(team, mesh, batch) -> np.ndarray:
    """log π of each response of a batch `[S]`, by the model of its role."""
    from marl_llm.training.scoring import make_policy_scorer

    out = np.zeros(len(batch.tokens))
    for agent, role in enumerate(batch.roles):
        learner, mine = team.learners[team.assignment.roles[role]], np.flatnonzero(np.asarray(batch.table.agent) == agent)
        score = make_policy_scorer(team.options.recipe, learner.config, mesh, **team.options.sizes)
        out[mine] = score((learner.params, None), batch.tokens, mine)[mine].sum(axis=1)
    return out


def main(_) -> None:
    from marl_llm.runs.building import build_team, params_of, start_jax
    from marl_llm.runs.resolve import resolve
    from marl_llm.training.update import compute_advantages

    logging.set_verbosity(logging.WARNING)  # orbax tells of every file it reads
    config = _CONFIG.value
    config.sft.run = _RUN.value
    mesh, rollouts = start_jax(config, None), None
    for minibatch in map(int, _MINIBATCHES.value):
        config.optimizer.minibatch = minibatch
        with resolve(config) as plan, build_team(plan, config, mesh) as team:
            team.start_from(params_of(config.sft, team.models()))
            # the second rollout's tasks lie behind those of a usual run
            rollouts = rollouts or (team.play(0, 0, _TASKS.value), team.play(1, 1_000_000, _TASKS.value))
            trained_on, scored_on = rollouts
            advantages = np.asarray(compute_advantages(plan.recipe, scored_on.tokens, scored_on.table).estimates)
            before = scored(team, mesh, scored_on)
            for rate in map(float, _RATES.value):
                team.start_from(params_of(config.sft, team.models()))
                updates = team.learn(trained_on, rate, rate)
                change = scored(team, mesh, scored_on) - before
                for agent, role in enumerate(scored_on.roles):
                    mine = np.asarray(scored_on.table.agent) == agent
                    a, d = advantages[mine], change[mine]
                    parts = {"gain": a * d, "drift": d, "good": d[a > 0], "bad": d[a < 0]}
                    figures = {name: round(float(x.mean()), 4) if x.size else None for name, x in parts.items()}
                    figures["gain_error"] = round(float((a * d).std() / max(len(a), 1) ** 0.5), 4)
                    steps = updates[team.assignment.roles[role]]["updates"]
                    print(json.dumps({"minibatch": minibatch, "rate": rate, "role": role, "updates": steps, **figures}), flush=True)


if __name__ == "__main__":
    flags.mark_flags_as_required(["config", "run"])
    app.run(main)
