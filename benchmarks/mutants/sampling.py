"""Faults in draws, stops, the sampler and the engine's device programs."""

S, T = "marl_llm/sampling/", "tests/sampling/"

FAULTS = {
    (S + "draws.py", T + "test_draw.py"): {
        "the log-prob is the sampler's": (
            "return Drawn(token, _pick(raw, token), jnp.where(greedy", "return Drawn(token, _pick(tempered, token), jnp.where(greedy"
        ),
        "the temperature multiplies": (
            "z = logits / jnp.where(greedy, 1.0, settings.temperature)", "z = logits * jnp.where(greedy, 1.0, settings.temperature)"
        ),
        "top-p sees what top-k dropped": ("jax.nn.softmax(jnp.where(keep, z, -jnp.inf), axis=-1)", "jax.nn.softmax(z, axis=-1)"),
        "min-p is absolute": ("settings.min_p[..., None] * jnp.max(p, axis=-1, keepdims=True)", "settings.min_p[..., None]"),
        "all tokens of a tie are kept": ("jnp.any(jnp.sum(at, axis=-1) > wanted)", "jnp.any(jnp.sum(at, axis=-1) < 0)"),
        "the entropy is the tempered one": (
            "_pick(tempered, token)), entropy, ids", "_pick(tempered, token)), -jnp.sum(jnp.where(jnp.exp(tempered) > 0, jnp.exp(tempered) * tempered, 0.0), axis=-1), ids"
        ),
        "a token of probability 0 can be drawn": (
            "jnp.argmax(cumulative > threshold[..., None], axis=-1)", "jnp.argmax(cumulative >= threshold[..., None], axis=-1)"
        ),
    },
    (S + "draws.py", "tests/games/test_hosted.py"): {
        "hosted play picks at random by another key": ("random_pick(identity_key(root, identity, identity.shape[0]), count)", "random_pick(root, count)"),
    },
    (S + "sampler.py", T + "test_sampler.py"): {
        "positions begin one late": ("start[:, None] + step - 1, token.shape)", "start[:, None] + step, token.shape)"),
        "a response sees its next column": ("jnp.arange(max_tokens) < step, (e", "jnp.arange(max_tokens) <= step, (e"),
        "the stop token is left out": ("put(out.where, alive)", "put(out.where, alive & ~ended)"),
        "all steps draw with one key": ("draw(logits, fold(keys, step), settings)", "draw(logits, fold(keys, 0 * step), settings)"),
        "budgets are one too large": ("(step + 1 < budgets)", "(step < budgets)"),
        "a stopped response counts as cut": ("out.truncated & ~ended", "out.truncated"),
        "log-probs after the end": ("put(out.log_probs, drawn.log_prob * keep)", "put(out.log_probs, drawn.log_prob)"),
        "only the first stop token stops": ("    for i in stop:\n", "    for i in stop[:1]:\n"),
    },
    (S + "stops.py", T + "test_stops.py"): {
        "a string inside another is missed": ("if fail[state] in final:", "if False:"),
        "a stop does not last": ("np.full((1, 256), accept, np.int32)", "np.full((1, 256), 0, np.int32)"),
        "a failed match begins anew": ("fail[child] = go[fail[state], byte]", "fail[child] = 0"),
    },
    (S + "slots.py", T + "test_engine.py"): {
        "all requests share a key": ("jax.vmap(identity_key, (None, 0, 0))(root, a.seeds, a.seed_count)", "jax.vmap(identity_key, (None, 0, 0))(root, 0 * a.seeds, a.seed_count)"),
        "the first token does not count": ("count=at(slots.count, jnp.ones((n,), jnp.int32))", "count=at(slots.count, jnp.zeros((n,), jnp.int32))"),
        "the ring is read from its start": ("(jnp.arange(r)[None] - slots.began[:, None]) % r < count", "jnp.arange(r)[None] % r < count"),
        "a slot goes on after its budget": ("& (count < slots.budget)\n        return", "& (count <= slots.budget)\n        return"),
        "what is taken over stays where it was": ("jnp.roll(cache.keys[source, 0], -slots.began[source], axis=-1)", "cache.keys[source, 0]"),
        "stopped slots go on": ("slots._replace(alive=slots.alive & ~stop)", "slots._replace(alive=slots.alive)"),
    },
}
