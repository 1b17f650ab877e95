"""Plays board games by hand for the tests: what a text is paid, and what whole episodes of scripts earn."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from marl_llm.games import role_of


@functools.cache
def compiled(game, role):
    """(observe, act and be paid) of a role, compiled once for all tests."""

    def act(state, tokens, where):
        after = game.act(state, role, tokens, where)
        return after, game.rewards(state, after, role), game.done(after)

    return jax.jit(lambda state: game.observe(state, role)), jax.jit(act)


def say_ids(game, state, role, ids):
    """(state, rewards as floats, done) after a role said ids."""
    size = role_of(game, role).response_tokens
    ids = list(ids)[:size]
    tokens = jnp.asarray(ids + [game.tokenizer.pad_id] * (size - len(ids)), jnp.int32)
    after, rewards, done = compiled(game, role)[1](state, tokens, jnp.arange(size) < len(ids))
    return after, jax.tree.map(float, rewards), bool(done)


def say(game, state, role, text):
    """The same for words of the protocol."""
    return say_ids(game, state, role, game.tokenizer.encode(text) if text else [])


def read(game, state, role):
    """The compact prompt as text."""
    return game.tokenizer.decode(compiled(game, role)[0](state).ids)


def episode(game, instance, scripts):
    """Plays one episode; scripts: role -> function of a state that gives words. Returns (role -> α team + local summed, solved, turns)."""
    state = jax.jit(game.reset)(instance)
    earned, done, turn = {role.name: 0.0 for role in game.roles}, False, 0
    while turn < game.max_turns and not done:
        for role in game.roles:
            if not done:
                state, rewards, done = say(game, state, role.name, scripts[role.name](state))
                earned[role.name] += rewards.team + rewards.local
        turn += 1
    return earned, bool(game.outcome(state)), turn


def law_1_holds(game, states):
    """Every prompt of the states encodes to its very ids, padded on the left to the role's budget. Returns the prompts' texts."""
    texts = set()
    for role in game.roles:
        prompts = jax.jit(jax.vmap(lambda s, role=role: game.observe(s, role.name)))(states)
        ids, where = np.asarray(prompts.ids), np.asarray(prompts.where)
        assert ids.shape[1] == role.prompt_tokens
        for row, real in zip(ids, where, strict=True):
            text = game.tokenizer.decode(row)
            assert game.tokenizer.encode(text) == row[real].tolist()
            assert np.all(np.diff(real.astype(int)) >= 0)
            assert np.all(row[~real] == game.tokenizer.pad_id)
            assert text.endswith(role.name)
            texts.add(text)
    return texts
