"""Who answers a prompt: a team of models, the game's scripted player, or uniformly random tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from marl_llm.games import Game, role_of
from marl_llm.models import ModelConfig, serving_layout
from marl_llm.rollout.play import Player
from marl_llm.sampling import Responses, SamplingParams, sample


def model_player(
    game: Game, assignment: dict[str, str], configs: dict[str, ModelConfig], params: dict[str, dict], how: SamplingParams | float
) -> Player:
    """A team of models: role `i` is played by model `assignment[i]`. `how` they draw: settings, or a temperature alone."""
    params = {m: serving_layout(p) for m, p in params.items()}  # once, outside the loop over turns
    settings = how if isinstance(how, SamplingParams) else SamplingParams(float(how))

    def respond(role, states, prompt, keys):
        model, most = assignment[role], role_of(game, role).response_tokens
        over = jax.vmap(game.done)(states)  # such a response counts for nothing: one token of it is enough
        return sample(
            configs[model],
            params[model],
            prompt.ids,
            prompt.where,
            keys,
            max_tokens=most,
            stop=game.stop_id,
            pad_id=game.tokenizer.pad_id,
            settings=settings,
            budgets=jnp.broadcast_to(jnp.where(over, 1, most)[:, None], keys.shape),
        )

    return respond


def _as_responses(game: Game, tokens, where) -> Responses:
    zero = jnp.zeros(tokens.shape, jnp.float32)
    return Responses(tokens, where, zero, zero, zero, ~jnp.any(where & (tokens == game.stop_id), axis=-1))


def scripted_player(game: Game, **options) -> Player:
    """The game's scripted noisy player, K independent responses per state."""

    def respond(role, states, prompt, keys):
        def one(state, key):
            return game.script(state, role, key, **options)

        return _as_responses(game, *jax.vmap(jax.vmap(one, (None, 0)))(states, keys))

    return respond


def random_player(game: Game) -> Player:
    """The random player: every token uniform over the vocabulary, up to and with the first stop token."""

    def respond(role, states, prompt, keys):
        r = role_of(game, role).response_tokens
        tokens = jax.vmap(jax.vmap(lambda k: jax.random.randint(k, (r,), 1, game.tokenizer.vocab_size)))(keys)
        stop = tokens == game.stop_id
        return _as_responses(game, tokens, jnp.cumsum(stop, axis=-1) - stop == 0)

    return respond
