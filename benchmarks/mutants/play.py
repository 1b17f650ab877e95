"""Faults in play and its figures: rollout, evaluation."""

R, E = "marl_llm/rollout/", "marl_llm/evaluation/"

FAULTS = {
    (R + "credit.py", "tests/rollout/test_credit.py"): {
        "credit is a loss": ("last_team_reward(game, rollout).reshape(rows) - without, 0)", "without - last_team_reward(game, rollout).reshape(rows), 0)"),
        "nothing is exchanged": ("jnp.where(this, other[:, None], keys)", "keys"),
        "silence reaches every response": ("jnp.where(this[..., None], new, old)", "jnp.where(True, new, old)"),
        "calls that were never made are replayed": ("jnp.argsort(jnp.where(alive, place, 2.0), axis=0)", "jnp.argsort(place, axis=0)"),
        "the reward of the first call is the last": ("last = jnp.max(", "last = jnp.min("),
        "a larger team weighs as a smaller one": ("share[len(team)]", "share[0]"),
    },
    (R + "play.py", "tests/rollout/test_play.py"): {
        "instances that cannot be played are trained": ("alive = valid & ~jax.vmap(game.done)(before)", "alive = ~jax.vmap(game.done)(before)"),
        "all environments draw with one key": ("map(jnp.asarray, (step, env, agent, request_number))]", "map(jnp.asarray, (step, 0 * env, agent, request_number))]"),
        "all turns and roles draw alike": ("map(jnp.asarray, (step, env, agent, request_number))]", "map(jnp.asarray, (step, env, 0 * agent, 0 * request_number))]"),
        "greedy takes the worst": ("return jnp.argmax(rewards, axis=-1).astype(jnp.int32)", "return jnp.argmin(rewards, axis=-1).astype(jnp.int32)"),
        "the pick forgets alpha": ("pick_branch(alpha * rewards.team", "pick_branch(rewards.team"),
        "the pick adds what the recipe leaves out": ("+ local_weight * rewards.local", "+ rewards.local"),
        "the first branch goes on whatever was picked": ("x[jnp.arange(e * b), chosen], after)", "x[jnp.arange(e * b), 0 * chosen], after)"),
        "a game that is over goes on": ("state = _where(alive, picked, state)", "state = picked"),
        "roles at once are paid one by one": ("if len(stage) == 1 or branches > 1:", "if True:"),
        "turns count after the end": ("turns = turns + (valid & ~jax.vmap(game.done)(state))", "turns = turns + valid"),
    },
    (R + "players.py", "tests/rollout/test_play.py"): {
        "episodes that are over are sampled to the end": ("jnp.where(over, 1, most)", "jnp.where(over, most, most)"),
    },
    (R + "table.py", "tests/rollout/test_play.py tests/training/test_update.py"): {
        "prompts are padded on the right": ('pad(ids, left, "left", pad_id)', 'pad(ids, left, "right", pad_id)'),
    },
    (E + "outcomes.py", "tests/evaluation/test_outcomes.py"): {
        "aborted plays count": ("for outcome in self.outcomes if not outcome.aborted)", "for outcome in self.outcomes)"),
        "the interval takes plays of one task for independent": (
            "return clustered(list(groups.values()))", "return clustered([[outcome.score] for outcome in self.played])"
        ),
        "a task's mean is its sum": ("task: float(np.mean(scores_of_task)) for", "task: float(np.sum(scores_of_task)) for"),
        "the difference is turned around": ("append(b[task] - a[task])", "append(a[task] - b[task])"),
    },
    ("marl_llm/training/compiled.py", "tests/training/test_team.py"): {
        "models off the schedule are trained": ("table.where[:] &= trains[table.agent]", "table.where[:] &= True"),
        "a half success is one": ("float(outcome >= 1.0)", "float(outcome >= 0.5)"),
    },
    (E + "elo.py", "tests/evaluation/test_elo.py"): {
        "a draw is a whole win": ("return wins + draws / 2", "return wins + draws"),
        "the prior pulls up": ("prior * (1 - 2 * alone)", "prior * (1 - alone)"),
        "intervals are of ratings that nothing anchors": ("centred @ np.linalg.pinv(information) @ centred", "np.linalg.pinv(information)"),
        "who is always beaten has no chance": ("else np.full(rates.size, 1 / rates.size)", "else weights"),
    },
    (E + "intervals.py", "tests/evaluation/test_intervals.py"): {
        "Wilson's centre is the rate": ("centre = (p + z * z / (2 * n)) / (1 + z * z / n)", "centre = p"),
        "the spread over seeds is the population's": ("/ (n - 1) / n)", "/ n / n)"),
        "Student's quantile is one off": ("stdtrit(n - 1, 0.975)", "stdtrit(n, 0.975)"),
    },
    (E + "intervals.py", "tests/evaluation/test_outcomes.py"): {
        "the clustered spread is the population's": ("* groups / (groups - 1) /", "/"),
        "agreeing clusters are certain": ("variance, count**2 / sum(n * n for n in sizes))", "variance, 1e9)"),
        "agreeing differences are certain": ("((squares + 1) / (groups + 2)", "(squares / (groups + 2)"),
        "differences beyond 1 are cut": ("unit = max([1.0, *(abs(score) for cluster in scores for score in cluster)])", "unit = 1.0"),
    },
}
