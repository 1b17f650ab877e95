"""Sokoban (Stronger-MAS, Appendix B.5): a Tool proposes moves, a Planner makes them; or a single agent does both jobs.

A board game, see `kit.board`. A list is made until it ends, a move is illegal (which stops it) or all boxes are on goals.
"""

from __future__ import annotations

import dataclasses
import functools
from types import ModuleType
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from marl_llm.games.kit import lists
from marl_llm.games.kit.board import BoardGame, check_options, repeat_now_and_then
from marl_llm.games.kit.board_pay import by_outcome
from marl_llm.games.kit.grids import FAR, MOVES
from marl_llm.games.protocol import Prompt, Rewards
from marl_llm.games.sokoban import language as words
from marl_llm.games.sokoban import prose
from marl_llm.games.sokoban import rewards as pay
from marl_llm.games.sokoban.rooms import MAX_PLACES, Room, Size, cornered, potential, random_room, rows_of, step, tables

DISCOUNT = 0.9  # worth of a place that is one move further from the solution, with potential='power'


class SokobanAction(NamedTuple):
    """The latest macro-action of the turn: what `rewards` needs."""

    moves: Int[Array, "M"]  # indices into `UDLR`, -1 past the end
    well_formed: Bool[Array, ""]
    legal: Bool[Array, ""]
    end: Int[Array, ""]  # the place where the moves end (the Tool's: in simulation)
    status: Int[Array, ""]


class SokobanState(NamedTuple):
    """One state, a value. `claims` holds, per role, the worth of the place where its latest macro-action ended."""

    room: Room
    place: Int[Array, ""]
    turn: Int[Array, ""]
    status: Int[Array, ""]  # of the last list that was made
    proposal: SokobanAction
    acted: SokobanAction
    claims: Float[Array, "N"]


@dataclasses.dataclass(frozen=True)
class Sokoban(BoardGame):
    """The game's options. All are static; two games with equal options are equal.

    Raises `ValueError` with the field's name on an impossible value, or on an option that would have no effect.
    """

    name: ClassVar[str] = "sokoban"
    prose: ClassVar[ModuleType] = prose
    random_player: ClassVar[dict[str, float]] = {"noise": 1.0, "noisy": 1.0, "repeat": 0.0}

    height: int = 6  # of the room, its border included (a reading: the paper says 6x6)
    width: int = 6
    boxes: int = 1
    min_walls: int = 1  # inside the border
    max_walls: int = 3  # inside the border
    min_length: int = 4  # moves of a shortest solution
    max_length: int = 20  # moves of a shortest solution
    max_moves: int = 6  # M, per list
    max_turns: int = 4  # T
    agents: str = "team"  # 'team' (tool, planner) or 'single' (solo)
    view: str = "full"  # 'split': only the Tool sees the walls inside the border
    frame: str = "room"  # cells are named by 'room' (row and column) or from the 'player' (offsets)
    rewards_form: str = "safe"  # 'safe', 'paper' (B.5) or 'outcome' (B.6)
    potential: str | None = None  # safe only: worth of a place e moves from the solution: 'power' 0.9^e (default), 'length' 1 - e/longest

    def __post_init__(self):
        words = dict(agents=("team", "single"), view=("full", "split"), frame=("room", "player"), rewards_form=pay.FORMS)
        half = (self.height - 2) * (self.width - 2) // 2
        bounds = dict(height=(4, 10), width=(4, 10), boxes=(1, 2), min_walls=(0, half), max_walls=(self.min_walls, half))
        bounds |= dict(min_length=(2, FAR - 1), max_length=(self.min_length, FAR - 1), max_moves=(1, 32), max_turns=(1, 32))
        check_options(self, words | dict(potential=(None, "power", "length")), bounds)
        if self.size.places > MAX_PLACES:
            raise ValueError(f"sokoban.boxes={self.boxes}: a room of this size has {self.size.places} places, more than {MAX_PLACES}")
        if self.potential is not None and self.rewards_form != "safe":
            raise ValueError("sokoban.potential has no effect unless rewards_form='safe'; remove it")

    @functools.cached_property
    def size(self) -> Size:
        """The room's size inside its border."""
        return Size(self.height - 2, self.width - 2, self.boxes)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """As `BoardGame`."""
        blind = 2 + 1 + 2 * self.boxes  # turn, status; player; boxes, goals
        sees = blind + self.max_walls
        return self.max_moves, sees, sees if self.view == "full" else blind

    @functools.cached_property
    def language(self) -> words.SokobanLanguage:
        """All roles' words, the same vocabulary for team and single agent."""
        return words.SokobanLanguage(self.size.rows, self.size.columns, self.max_turns, self.frame)

    # --- instances and states --------------------------------------------------------------------------------------------

    def instance(self, key: jax.Array, split: str | Int[Array, ""]) -> Room:
        """A random solvable room of the split, or one that is not `valid` when none was found. `key` is folded."""
        bounds = {name: getattr(self, name) for name in ("min_walls", "max_walls", "min_length", "max_length")}
        room, good = random_room(key, self.size, **bounds, split=split)
        return room._replace(distance=jnp.where(good, room.distance, FAR))

    def valid(self, instance: Room) -> Bool[Array, ""]:
        """The room can be solved (not so when the settings contradict each other) and is not solved yet."""
        length = instance.distance[instance.place]
        return (length > 0) & (length < FAR)

    def task(self, instance: Room) -> dict:
        """The room as text rows, and the length of its shortest solution."""
        rows = rows_of(self.size, instance.walls, instance.goals, instance.place)
        return {"room": rows, "length": int(instance.distance[int(instance.place)])}

    def picture(self, state: SokobanState) -> list[str]:
        """The room as it stands."""
        return rows_of(self.size, state.room.walls, state.room.goals, state.place)

    def reset(self, instance: Room) -> SokobanState:
        """Nothing has been said."""
        none, true = jnp.full((self.max_moves,), -1, jnp.int32), jnp.bool_(True)
        nothing = SokobanAction(none, true, true, instance.place, jnp.int32(lists.NONE))
        claims = jnp.full((len(self.roles),), self._worth(instance, instance.place))
        return SokobanState(instance, instance.place, jnp.int32(0), jnp.int32(lists.NONE), nothing, nothing, claims)

    def done(self, state: SokobanState) -> Bool[Array, ""]:
        """All boxes are on goals."""
        return state.room.distance[state.place] == 0

    def _worth(self, room: Room, place: Int[Array, ""]) -> Float[Array, ""]:
        """In [0, 1]: 1 when solved, 0 when the room cannot be solved any more."""
        length = room.distance[place].astype(jnp.float32)
        if self.potential == "length":
            return 1.0 - jnp.minimum(length, 2 * self.max_length) / (2 * self.max_length)
        return jnp.where(length >= FAR, 0.0, DISCOUNT**length)

    # --- prompts ---------------------------------------------------------------------------------------------------------

    def observe(self, state: SokobanState, role: str) -> Prompt:
        """The role's prompt; the language is described in `language.py`."""
        lang, pad = self.language, self.tokenizer.pad_id
        player, boxes = self._holders(state.place)

        def named(mark, cells):
            return jnp.asarray(lang.cells[mark])[player, cells]

        parts = [
            *self.turn_and_status(state),
            jnp.asarray(lang.players)[player],
            named(words.BOX, boxes),
            named(words.GOAL, state.room.goals),
        ]
        if self.view == "full" or role == "tool":
            away = jnp.asarray(tables(self.size).apart)[player]
            rank, cells = jax.lax.top_k(jnp.where(state.room.walls, -away, -FAR), self.max_walls)
            parts.append(jnp.where(rank > -FAR, named(words.WALL, cells), pad))  # nearest first
        if role == "planner":
            parts += self.proposed(state.proposal.moves, lang.moves, state.proposal.status)
        return lists.left_padded([*parts, lang.ids(role)], pad)

    def _holders(self, place: Int[Array, ""]) -> tuple[Int[Array, ""], Int[Array, "boxes"]]:
        """Cells of the player and of the boxes."""
        holders = jnp.asarray(tables(self.size).holders)[place]
        return holders[0], holders[1:]

    def read(self, state: SokobanState, role: str, text: str) -> tuple[int, ...]:
        """The response in the protocol's ids that says what a text says, by the grammar of `prose.py`."""
        moves = prose.moves_in(text)
        if moves is None or len(moves) > self.max_moves:
            return lists.unreadable(self.max_moves, self.tokenizer.pad_id)
        return (*(int(self.language.moves[MOVES.index(move)]) for move in moves), self.stop_id)

    # --- actions ---------------------------------------------------------------------------------------------------------

    def simulate(self, state: SokobanState, moves: Int[Array, "M"], well_formed: Bool[Array, ""]) -> SokobanAction:
        """Makes the moves until the list ends, one is illegal, or all boxes are on goals."""
        room = state.room

        def make(carry, move):
            place, stopped = carry
            active = (move >= 0) & ~stopped & (room.distance[place] > 0)
            new, legal = step(self.size, room.walls, place, jnp.maximum(move, 0))
            return (jnp.where(active, new, place), stopped | (active & ~legal)), None

        (end, stopped), _ = jax.lax.scan(make, (state.place, jnp.bool_(False)), moves)
        status = self.status_of(room.distance[end] == 0, stopped, well_formed)
        return SokobanAction(moves, well_formed, well_formed & (moves[0] >= 0) & ~stopped, end, status)

    def claim(self, state: SokobanState, acted: SokobanAction) -> Float[Array, ""]:
        """The worth of the place where a list ended."""
        return self._worth(state.room, acted.end)

    def carried_out(self, state: SokobanState, acted: SokobanAction) -> SokobanState:
        """Player and boxes stand where the list left them."""
        return state._replace(place=acted.end)

    def rewards(self, before: SokobanState, after: SokobanState, role: str) -> Rewards:
        """What the role's macro-action earned, by `rewards_form`."""
        room, acted = before.room, after.acted
        start, boxes = self._holders(before.place)[1], self._holders(acted.end)[1]
        off_goal = ~jnp.any(boxes[:, None] == room.goals[None], axis=-1)
        facts = pay.SokobanFacts(
            well_formed=acted.well_formed,
            legal=acted.legal,
            solved=room.distance[acted.end] == 0,
            on_goals=jnp.mean(1.0 - off_goal),
            deadlock=jnp.any(off_goal & cornered(self.size, room.walls)[boxes]),
            dead=room.distance[acted.end] >= FAR,
            before=potential(self.size, room.goals, start).astype(jnp.float32),
            after=potential(self.size, room.goals, boxes).astype(jnp.float32),
            previous_worth=jnp.maximum(before.claims[self.index(role)], self._worth(room, before.place)),
            worth=self._worth(room, acted.end),
            initial_worth=self._worth(room, room.place),
        )
        if self.rewards_form == "paper":
            return pay.paper(facts, executes=role != "tool")
        return pay.safe(facts) if self.rewards_form == "safe" else by_outcome(facts.well_formed, facts.solved)

    # --- the scripted player ---------------------------------------------------------------------------------------------

    def script(
        self, state: SokobanState, role: str, key: jax.Array, *,
        noise: float | Float[Array, ""] = 0.4, noisy: float | Float[Array, ""] = 0.25,
        repeat: float | Float[Array, ""] = 0.3,
    ) -> tuple[Int[Array, "R"], Bool[Array, "R"]]:
        """A noisy solver's response: the supervised warm-up's teacher. `key` is consumed.

        Its moves follow a shortest solution; with probability `noisy` the list is one in which each move is a random legal one with
        probability `noise`. The Planner repeats the proposal with probability `repeat`. In a room that is lost all moves are random.
        """
        kinds, walk, copies = jax.random.split(key, 3)
        errs = jax.random.uniform(kinds) < noisy
        room = state.room

        def choose(place, step_key):
            noise_key, tie_key, random_key = jax.random.split(step_key, 3)
            to, legal = jax.vmap(lambda move: step(self.size, room.walls, place, move))(jnp.arange(4))
            cost = jnp.where(legal, room.distance[to], 2 * FAR) + 0.5 * jax.random.uniform(tie_key, (4,))
            dice = jnp.where(legal, jax.random.uniform(random_key, (4,)), -1.0)
            wanders = errs & (jax.random.uniform(noise_key) < noise)
            move = jnp.where(wanders | (room.distance[place] >= FAR), jnp.argmax(dice), jnp.argmin(cost))
            over = (room.distance[place] == 0) | ~jnp.any(legal)
            return jnp.where(over, place, to[move]), jnp.where(over, -1, move)

        _, moves = jax.lax.scan(choose, state.place, jax.random.split(walk, self.max_moves))
        if role == "planner":
            moves = repeat_now_and_then(moves, state.proposal.moves, copies, repeat)
        return lists.write_list(moves.astype(jnp.int32), self.language.moves, self.stop_id, self.tokenizer.pad_id)
