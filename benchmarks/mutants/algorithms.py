"""Faults in equations: groups, returns, advantages, losses, ratios, recipes."""

A, T = "marl_llm/algorithms/", "tests/algorithms/"

FAULTS = {
    (A + "groups.py", T + "test_groups.py " + T + "test_conventions.py"): {
        "columns in the order of the arguments": ("for name in sorted(axes)]", "for name in axes]"),
        "masked rows get a group": (
            "ids.astype(jnp.int32))\n    return jnp.where(where, ids, NO_GROUP)", "ids.astype(jnp.int32))\n    return ids"
        ),
        "statistics count masked rows": ("return stats_of(values, slots_of(ids, as_mask(where, ids.shape)), None, ddof)", "return stats_of(values, slots_of(ids, as_mask(None, ids.shape)), None, ddof)"),
        "the variance forgets ddof": ("/ positive(votes - ddof))", "/ positive(votes))"),
        "groups are compared in their first token only": (
            "jnp.any(prompts != reference, axis=1)", "(prompts != reference)[:, 0]"
        ),
        "the share of mixed groups is a share of rows": (
            "jnp.sum(mixed) / jnp.maximum(jnp.sum(in_use), 1)", "jnp.sum(mixed) / jnp.maximum(mixed.shape[0], 1)"
        ),
    },
    (A + "distillation.py", T + "test_distillation.py"): {
        "each token of a span has its whole gap": (" / jnp.maximum(count, 1)\n    return jnp.where(where, jnp.take", "\n    return jnp.where(where, jnp.take"),
        "a span has its teacher's last log-prob": ("total_of = spans > 0, functools.partial(jax.ops.segment_sum,", "total_of = spans > 0, functools.partial(jax.ops.segment_max,"),
    },
    (A + "_arrays.py", T + "test_groups.py " + T + "test_advantages.py " + T + "test_edges.py"): {
        "negative ids count": ("where & (ids >= 0), ids", "where, ids"),
        "a difference of rounding is no tie": ("return 4 * jnp.finfo", "return 0 * jnp.finfo"),
        "tiny numbers have a floor of their own": ("jnp.maximum(magnitude, 1)", "magnitude"),
        "only the extremes make a tie": ("(high - low <= tolerance) | (spread <= tolerance)", "(high - low <= tolerance)"),
        "a mean of equals is rounded": ("jnp.where(low == high, low, ", "jnp.where(low > high, low, ", T + "test_returns.py"),
    },
    (A + "returns.py", T + "test_returns.py"): {
        "the past is paid too": ("(decay, earned), reverse=True)", "(decay, earned), reverse=False)"),
        "gaps cost no discount": ("** gap, 0)", "** (gap > 0), 0)"),
        "a joint reward counts once per agent": ('if scope == "joint" else', 'if scope == "none" else'),
        "trajectories run into each other": (
            "follows = (slot_trajectory[1:] == slot_trajectory[:-1]) & (rows[1:] > 0)", "follows = rows[1:] > 0"
        ),
        "scope agent keeps the trajectory whole": (
            "        trajectory = group_ids(group_keys(agent=agent, trajectory=trajectory))", "        trajectory = group_ids(group_keys(trajectory=trajectory))"
        ),
        "the last outcome is the first": (
            "last = per_group_max(turn, jnp.where(counted, slots, slots.shape[0]), jnp.iinfo(turn.dtype).min)",
            "last = per_group_min(turn, jnp.where(counted, slots, slots.shape[0]), jnp.iinfo(turn.dtype).max)",
        ),
        "the outcome ignores who was paid": ("counted = where if paid is None else", "counted = where if True else"),
        "the first score pays nothing": ("jnp.where(follows, score[:-1], 0)", "jnp.where(follows, score[:-1], score[1:])"),
        "stopped samples are paid": ("if stopped is not None:", "if stopped is None and False:"),
        "the KL is given, not taken": ("out = out - jnp.where(where, kl_coef", "out = out + jnp.where(where, kl_coef"),
        "the reward lies on the first token": (
            "last = where & (jnp.cumsum(where[:, ::-1], axis=1)[:, ::-1] == 1)", "last = where & (jnp.cumsum(where, axis=1) == 1)"
        ),
        "token returns decay over holes": (
            "carried = jnp.where(valid, reward + gamma * carried, carried)", "carried = jnp.where(valid, reward, 0) + gamma * carried"
        ),
        "GAE without lambda": ("gamma * gae_lambda * next_advantage", "gamma * next_advantage"),
        "GAE bootstraps over holes": (
            "carried = (jnp.where(valid, value, next_value), ", "carried = (value, "
        ),
    },
    (A + "advantages.py", T + "test_advantages.py " + T + "test_conventions.py"): {
        "rounding is a preference": ("> rounding_of(jnp.abs(ranked)))", "> 0)", T + "test_trust_regions.py " + T + "test_advantages.py"),
        "a preference counts its ties": ("= jax.ops.segment_max(place, group, len(place) + 1)[group] - jax.ops.segment_max(place, value, len(place))[value]", "= jax.ops.segment_max(place, group, len(place) + 1)[group] - place", T + "test_trust_regions.py"),
        "the rounding of a running mean is an advantage": ("jnp.where(jnp.abs(above) <= rounding_of(jnp.abs(returns)), 0, above)", "above"),
        "the standard deviation is a variance": ("divisor = stats.std + epsilon", "divisor = stats.variance + epsilon"),
        "epsilon stands under the root": ("divisor = stats.std + epsilon", "divisor = jnp.sqrt(stats.std**2 + epsilon)"),
        "the sample's estimate whatever ddof": ("stats = stats_of(returns, slots, weights, ddof)", "stats = stats_of(returns, slots, weights, 1)"),
        "weights do not weigh": ("stats = stats_of(returns, slots, weights, ddof)", "stats = stats_of(returns, slots, None, ddof)"),
        "a batch's scale is a group's": ("deviation = jnp.where(used, returns - jnp.sum(votes * returns) / positive(total), 0)", "deviation = jnp.where(used, returns - gather(stats.mean, slots), 0)"),
        "a group of one is paid its return": ('if singleton == "raw":\n        alone', 'if singleton:\n        alone'),
        "an agent's calls have one vote each": ("weights = None if trajectory is None else trajectory_weights", "weights = None if True else trajectory_weights"),
        "agents share a baseline": ("group_ids(group_keys(instance=instance, agent=agent), where=where)", "group_ids(group_keys(instance=instance), where=where)"),
        "leave one out leaves none out": ("size / jnp.maximum(size - 1, 1)), slots)", "size / jnp.maximum(size, 1)), slots)"),
        "decoupled rewards are not weighted": ("* jnp.asarray(coefficients).astype(rewards.dtype), axis=1)", "* 1.0, axis=1)"),
        "whitening divides by the variance": ("jax.lax.rsqrt(jnp.where(varied, variance, 1) + epsilon)", "1 / (jnp.where(varied, variance, 1) + epsilon)"),
        "whitening over one device": ("mean = nan_if_infinite(psum(jnp.sum(weights * x), axis_name) / divisor)", "mean = nan_if_infinite(jnp.sum(weights * x) / divisor)", T + "test_rl_properties.py " + T + "test_advantages.py"),
    },
    (A + "losses.py", T + "test_losses.py " + T + "test_conventions.py"): {
        "the ratio is upside down": ("log_ratio = new - masked(old_log_probs, where)\n    if level", "log_ratio = masked(old_log_probs, where) - new\n    if level"),
        "the sequence ratio is a product": ('if level != "product":', 'if level == "none":'),
        "masked tokens count in the mean": ("total / jnp.maximum(jnp.sum(where, axis=1), 1)", "total / where.shape[1]"),
        "the clip takes the better arm": ("jnp.where(clipped > unclipped, clipped, unclipped)", "jnp.where(clipped < unclipped, clipped, unclipped)"),
        "the clip is symmetric": ("bounded = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)", "bounded = jnp.clip(ratio, 1 - clip_low, 1 + clip_low)"),
        "the dual clip bounds gains too": ("(advantages < 0) & (loss > -dual_clip", "(loss > -dual_clip"),
        "the advantage has a gradient": ("advantages = jax.lax.stop_gradient(as_float(advantages))", "advantages = as_float(advantages)"),
        "NaN behind the mask reaches the gradient": ("return masked(advantages, where), jnp.broadcast_to", "return jnp.broadcast_to(advantages, where.shape), jnp.broadcast_to"),
        "k3 is not limited": ("jnp.clip(d, -log_ratio_limit, log_ratio_limit)", "d"),
        "a tie of the arms does not learn": ("-advantages * jax.lax.stop_gradient(bounded)", "-advantages * bounded * (1 + 1e-7)"),
        "cispo's weight has a gradient": ("weight = jax.lax.stop_gradient(jnp.clip(", "weight = (jnp.clip("),
        "reinforce climbs down": ("jnp.where(where, -advantages * log_probs, 0)", "jnp.where(where, advantages * log_probs, 0)"),
        "k1 with the other sign": ("value = -d\n", "value = d\n"),
        "k2 without its half": ("value = 0.5 * d**2\n    else", "value = d**2\n    else"),
        "k3+ has k3's gradient": ('if kind.endswith("+"):', 'if kind.endswith("1+"):'),
        "the KL controller is not bounded": ("jnp.clip(as_float(kl) / target - 1, -0.2, 0.2)", "(as_float(kl) / target - 1)"),
        "the KL controller turns negative": ("jnp.maximum(1 + error * samples / horizon, 0.2)", "(1 + error * samples / horizon)"),
        "the entropy of the untempered policy": ("jax.nn.log_softmax(as_float(logits) / temperature, axis=-1)\n    possible", "jax.nn.log_softmax(as_float(logits), axis=-1)\n    possible"),
        "the smaller value error": ("error = jnp.maximum(error,", "error = jnp.minimum(error,"),
        "the value loss without its half": ("jnp.where(where, 0.5 * error, 0)", "jnp.where(where, error, 0)"),
        "empty rows count": ("if empty_rows else jnp.sum(tokens > 0)", "if True else jnp.sum(tokens > 0)"),
        "the constant is not multiplied": ("rows = rows * max_length", "rows = rows * 1"),
        "rows are not divided by their tokens": ('if how == "sequence_mean_token_mean":', 'if how == "none":'),
    },
    (A + "gated.py", T + "test_conventions.py " + T + "test_losses.py " + T + "test_oracle_parity.py"): {
        "one temperature for both signs": ("jnp.where(advantages > 0, temperature_positive, temperature_negative)", "jnp.where(advantages > 0, temperature_positive, temperature_positive)"),
        "the gate is steeper": ("loss = -4 / temperature", "loss = -4 * temperature"),
        "vespo weighs tokens, not responses": ("jnp.clip(jnp.sum(log_ratio, axis=1, keepdims=True), *VESPO_LIMITS)", "jnp.clip(log_ratio, *VESPO_LIMITS)"),
    },
    (A + "ratios.py", T + "test_ratios.py"): {
        "top-p before top-k": ("jnp.where(keep, ranked, -jnp.inf), axis=-1)", "ranked, axis=-1)"),
        "the nucleus misses its last token": ("jnp.cumsum(mass, axis=-1) - mass < top_p", "jnp.cumsum(mass, axis=-1) < top_p"),
        "log-probs outside the kept set": ("z = jnp.where(as_mask(kept, z.shape), z, -jnp.inf)\n    chosen", "z = z\n    chosen"),
        "truncation also masks": ('if how == "truncate" else', 'if how == "mask" else'),
        "the log mass is taken off": ("as_float(sampler_log_probs) + as_float(log_mass)", "as_float(sampler_log_probs) - as_float(log_mass)"),
    },
    (A + "joint.py", T + "test_joint.py"): {
        "aborted joints count": ("where[:, None].astype(jnp.int32))", "jnp.ones_like(where)[:, None].astype(jnp.int32))"),
        "joints are drawn with repeats": ("replace=False)", "replace=True)"),
        "the first agent is paired with itself": ("places = (jnp.arange(group_size)[None, :, None] + shifts[:, None, :])", "places = (jnp.arange(group_size)[None, :, None] + 0 * shifts[:, None, :])"),
    },
    (A + "policy_terms.py", T + "test_recipes.py " + T + "test_edges.py"): {
        "the correction is not applied": ("weights * policy.reshape(len(policy), -1)", "1.0 * policy.reshape(len(policy), -1)"),
    },
    (A + "apply.py", T + "test_recipes.py " + T + "test_edges.py"): {
        "the outcome is read from all rows": ('paid = None if recipe.rewards == "local" else samples.team_where', "paid = None"),
        "the reward is not charged the KL": ("_returns(recipe, samples, rewards - penalty, played)", "_returns(recipe, samples, rewards, played)"),
        "an outcome is charged the last turn's KL": ('    if recipe.returns in ("outcome", "outcome_plus_local", "counterfactual"):\n        return jnp.where(where, _returns(recipe, samples, rewards, played) - penalty, 0)\n', "", T + "test_recipe_fields.py"),
        "the last turn's own pay is everybody's": ("            rewards - own, samples.trajectory", "            rewards, samples.trajectory", T + "test_pay.py"),
        "own pay beside an outcome is dropped": ("return outcome + own", "return outcome", T + "test_pay.py"),
        "the KL beside own pay is lost": ('if recipe.returns in ("outcome", "outcome_plus_local", "counterfactual"):', 'if recipe.returns == "outcome":', T + "test_pay.py"),
        "tied rows are not reported": ("advantages, metrics, tied = _group_advantages(", "advantages, metrics, _ = _group_advantages("),
        "the KL is rewarded": ("total = total + kl_coef * parts(divergence)[0]", "total = total - kl_coef * parts(divergence)[0]"),
        "entropy is punished": ("total = total - recipe.entropy_coef *", "total = total + recipe.entropy_coef *"),
        "aborted rows are paid": ("rewards = jnp.where(_played(samples, where), _rewards(recipe, samples), 0)\n    metrics", "rewards = _rewards(recipe, samples)\n    where = jnp.ones_like(where)\n    metrics"),
        "gamma is dropped": ("gamma=recipe.gamma, where=where, agent", "gamma=1.0, where=where, agent"),
    },
    (A + "published.py", T + "test_recipes.py"): {
        "AT-GRPO groups whole plays": ('returns="immediate", group_by=("env", "agent", "turn")', 'returns="immediate", group_by=("env", "agent")'),
        "MAGRPO with the token's ratio": ('importance_level="product", kl_coef=0.02,', 'importance_level="token", kl_coef=0.02,'),
        "another loss keeps a recipe's clips": ("if field not in CLIPS}", "}", T + "test_recipe_fields.py"),
    },
    (A + "functions.py", T + "test_recipes.py"): {
        "masked rows have advantages of one's own": ("return jnp.where(where, as_float(_checked(recipe.advantages(samples, earned), earned.shape, \"advantages\")), 0)", "return as_float(_checked(recipe.advantages(samples, earned), earned.shape, \"advantages\"))"),
        "a loss of another shape passes": ("    if jnp.shape(result) != shape:", "    if False:"),
    },
    (A + "recipes.py", T + "test_recipes.py"): {
        "a model changes what is the team's": ("check_known(\"recipe field of a model\", field, LOSS_FIELDS)", "check_known(\"recipe field of a model\", field, FIELDS)"),
        "an option without effect passes": ("if idle and field in overrides:", "if False:"),
    },
    (A + "recipe_rules.py", T + "test_recipes.py"): {
        "cispo is clipped as the ratio": ('"cispo": (1.0, 4.0)', '"cispo": (0.2, 0.2)', T + "test_recipe_fields.py"),
        "running means follow advantages of one's own": ('and r.advantage_estimator == "ema",', 'and r.advantage_estimator == "none",'),
        "a tree may wait for its outcome": ('r.sampling == "tree" and r.returns in (', 'r.sampling == "none" and r.returns in ('),
    },
}
