"""Deterministic players of Plan-Path, honest and not, for the tests: what each would say in a state, as tokens."""

import jax
import jax.numpy as jnp
import numpy as np

from marl_llm.games.kit.grids import DELTAS, FAR
from marl_llm.sampling import Responses

BACK = np.asarray([1, 0, 3, 2])  # the move that undoes U, D, L, R


def tokens_of(game, role, moves):
    """Moves (indices into UDLR, -1 past the end) as the role would write them, with the stop word. `[R]` and where."""
    names = jnp.asarray(game.language.ids(*"UDLR"))[jnp.maximum(moves, 0)]
    if role == "tool":
        steps = jnp.where((moves >= 0)[:, None], jnp.asarray(DELTAS)[jnp.maximum(moves, 0)], 0)
        cell = jnp.cumsum(steps, axis=0)
        size = 2 * game.width - 1
        index = (cell[:, 0] + game.height - 1) * size + cell[:, 1] + game.width - 1
        names = jnp.asarray(game.language.cells(""))[jnp.clip(index, 0, (2 * game.height - 1) * size - 1)]
    count = jnp.sum(moves >= 0)
    place = jnp.arange(game.max_moves + 1)
    ids = jnp.concatenate([names, jnp.asarray([game.stop_id])])
    ids = jnp.where(place < count, ids, jnp.where(place == count, game.stop_id, game.tokenizer.pad_id))
    return ids.astype(jnp.int32), place <= count


def targets(game, state, cell):
    """The four neighbours of a cell: distance to the goal (`FAR` when blocked) and the cell `[4, 2]`."""
    near = cell[None] + jnp.asarray(DELTAS)
    inside = jnp.all((near >= 0) & (near < jnp.asarray([game.height, game.width])), axis=-1)
    safe = jnp.clip(near, 0, jnp.asarray([game.height - 1, game.width - 1]))
    return jnp.where(inside, state.map.distance[safe[:, 0], safe[:, 1]], FAR), safe


def shortest(game, state, at_most):
    """The first moves of a shortest path."""

    def step(carry, i):
        cell, on = carry
        distance, cells = targets(game, state, cell)
        move = jnp.argmin(distance)
        on = on & (i < at_most) & ~jnp.all(cell == state.map.goal)
        return (jnp.where(on, cells[move], cell), on), jnp.where(on, move, -1)

    _, moves = jax.lax.scan(step, (state.position, jnp.bool_(True)), jnp.arange(game.max_moves))
    return moves.astype(jnp.int32)


def listed(game, *moves):
    """A list of moves, padded."""
    moves = jnp.stack([jnp.asarray(m, jnp.int32) for m in moves]) if moves else jnp.zeros(0, jnp.int32)
    return jnp.concatenate([moves, jnp.full(game.max_moves - moves.shape[0], -1, jnp.int32)])


def loiter(game, state):
    """To a free cell that is not the goal, as far as one can choose, and back."""
    distance, _ = targets(game, state, state.position)
    away = jnp.argmax(jnp.where(distance < FAR, distance, -1))
    return listed(game, away, jnp.asarray(BACK)[away])


def bump(game, state):
    """Into a wall or the border; where there is none, once around."""
    distance, _ = targets(game, state, state.position)
    return listed(game, jnp.argmax(distance))


def retreat(game, state):
    """Away on even turns, closer on odd ones, to be paid for the same cells twice."""
    distance, _ = targets(game, state, state.position)
    away, closer = jnp.argmax(jnp.where(distance < FAR, distance, -1)), jnp.argmin(distance)
    return listed(game, jnp.where(state.turn % 2 == 0, away, closer))


def late(game, state):
    """Back and forth until the last turns, then a shortest path."""
    return jnp.where(state.turn < game.max_turns - 2, loiter(game, state), shortest(game, state, game.max_moves))


MOVES = {
    "optimal": lambda game, state: shortest(game, state, game.max_moves),
    "dawdle": lambda game, state: shortest(game, state, 1),
    "still": lambda game, state: listed(game),
    "loiter": loiter,
    "bump": bump,
    "retreat": retreat,
    "late": late,
}


def speak(game, role, name, state):
    """What the named player says, `[R]` and where."""
    r = game.max_moves + 1
    if name == "overlong":
        ids, _ = tokens_of(game, role, MOVES["optimal"](game, state))
        move = ids[0]  # a sensible first word, again and again, and never the stop word
        return jnp.full((r,), move), jnp.ones((r,), bool)
    if name == "unparsable":
        word = game.language.ids("|")[0]
        return jnp.where(jnp.arange(r) == r - 1, game.stop_id, word).astype(jnp.int32), jnp.ones((r,), bool)
    return tokens_of(game, role, MOVES[name](game, state))


SCRIPTS = ("optimal", "dawdle", "still", "loiter", "bump", "retreat", "late", "overlong", "unparsable")


def player(game, who, names=SCRIPTS):
    """A `Player` for which `who[role] [E]` holds, per environment, the index into `names` of the role's player."""

    def respond(role, states, prompt, keys):
        said = [jax.vmap(lambda s, name=name: speak(game, role, name, s))(states) for name in names]
        rows = jnp.arange(keys.shape[0])
        ids, where = (jnp.stack(x)[who[role], rows][:, None] for x in zip(*said, strict=True))
        zero = jnp.zeros(ids.shape, jnp.float32)
        return Responses(ids, where, zero, zero, zero, ~jnp.any(ids == game.stop_id, axis=-1))

    return respond
