"""Faults in play and its figures: rollout, evaluation."""

R, E = "marl_llm/rollout/", "marl_llm/evaluation/"

FAULTS = {
    (R + "play.py", "tests/rollout/test_play.py"): {
        "instances that cannot be played are trained": ("alive = valid & ~jax.vmap(game.done)(before)", "alive = ~jax.vmap(game.done)(before)"),
        "all environments draw with one key": ("map(jnp.asarray, (step, env, agent, place))]", "map(jnp.asarray, (step, 0 * env, agent, place))]"),
        "all turns and roles draw alike": ("map(jnp.asarray, (step, env, agent, place))]", "map(jnp.asarray, (step, env, 0 * agent, 0 * place))]"),
        "greedy takes the worst": ("return jnp.argmax(rewards, axis=-1).astype(jnp.int32)", "return jnp.argmin(rewards, axis=-1).astype(jnp.int32)"),
        "the pick forgets alpha": ("pick_branch(alpha * rewards.team + rewards.local", "pick_branch(rewards.team + rewards.local"),
        "the first branch goes on whatever was picked": ("x[jnp.arange(e * b), chosen], after)", "x[jnp.arange(e * b), 0 * chosen], after)"),
        "a game that is over goes on": ("state = _where(alive, picked, state)", "state = picked"),
        "roles at once are paid one by one": ("if len(stage) == 1 or branches > 1:", "if True:"),
        "turns count after the end": ("turns = turns + (valid & ~jax.vmap(game.done)(state))", "turns = turns + valid"),
    },
    (R + "table.py", "tests/rollout/test_play.py tests/training/test_update.py"): {
        "prompts are padded on the right": ('pad(ids, left, "left", pad_id)', 'pad(ids, left, "right", pad_id)'),
    },
    (E + "teams.py", "tests/evaluation/test_teams.py"): {
        "void episodes may win": ("((ended.outcome >= 1.0) & played).sum()", "(ended.outcome >= 1.0).sum()"),
        "void episodes count as lost": ("n, wins = int(played.sum()),", "n, wins = len(played),"),
        "a half success is one": ("ended.outcome >= 1.0", "ended.outcome >= 0.5"),
        "swapped plays the team as it is": ("after[models[(i + 1) % len(models)]]", "after[models[i]]"),
        "the trained one is exchanged for the untrained": ("m: after[m] if m == trained else before[m]", "m: before[m] if m == trained else after[m]"),
        "rows after the end count as well-formed": ("(formed & where).sum()", "formed.sum()"),
    },
    (E + "intervals.py", "tests/evaluation/test_intervals.py"): {
        "Wilson's centre is the rate": ("centre = (p + z * z / (2 * n)) / (1 + z * z / n)", "centre = p"),
        "the spread over seeds is the population's": ("/ (n - 1) / n)", "/ n / n)"),
        "Student's table is one off": ("T95[n - 2] if n - 2 < len(T95)", "T95[n - 1] if n - 1 < len(T95)"),
    },
}
