"""Plan-Path (Stronger-MAS, Appendix B.4 and D): a Tool proposes a route, a Planner moves; or a single agent does both jobs.

A board game, see `kit.board`. A list is executed until it ends, hits a wall (which stops it) or reaches the goal. The next turn both see
where the agent now stands.
"""

from __future__ import annotations

import dataclasses
import functools
from types import ModuleType
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from marl_llm.games.kit import lists
from marl_llm.games.kit.board import BoardGame, check_options, repeat_now_and_then
from marl_llm.games.kit.board_pay import by_outcome
from marl_llm.games.kit.grids import DELTAS, FAR, MOVES
from marl_llm.games.plan_path import language as words
from marl_llm.games.plan_path import prose
from marl_llm.games.plan_path import rewards as pay
from marl_llm.games.plan_path.maps import Map, random_map, rows_of
from marl_llm.games.protocol import Prompt, Rewards


class PlanPathAction(NamedTuple):
    """The latest macro-action of the turn, measured: what `rewards` needs."""

    moves: Int[Array, "M"]  # indices into `UDLR`, -1 past the end
    well_formed: Bool[Array, ""]
    legal: Bool[Array, ""]
    end: Int[Array, "2"]  # where the moves end (the Tool's: in simulation)
    on_path: Float[Array, ""]
    status: Int[Array, ""]


class PlanPathState(NamedTuple):
    """One state, a value. `claims` holds, per role, the distance at the end of its latest macro-action."""

    map: Map
    position: Int[Array, "2"]
    turn: Int[Array, ""]
    status: Int[Array, ""]  # of the last executed list
    proposal: PlanPathAction
    acted: PlanPathAction
    claims: Float[Array, "N"]


@dataclasses.dataclass(frozen=True)
class PlanPath(BoardGame):
    """The game's options. All are static; two games with equal options are equal.

    `rewards_form="progress"`, the default, on which the published figures stand, pays the Tool for cells that the Planner came closer since
    the Tool's last readable proposal; "safe" does not. See `rewards.py`.

    Raises `ValueError` with the field's name on an impossible value, or on an option that would have no effect.
    """

    name: ClassVar[str] = "plan_path"
    prose: ClassVar[ModuleType] = prose
    random_player: ClassVar[dict[str, float]] = {"noise": 1.0, "repeat": 0.0}

    height: int = 6
    width: int = 6
    wall_density: float = 0.15
    min_distance: int = 4
    max_distance: int = 16
    max_moves: int = 5  # M, per list
    max_turns: int = 4  # T
    agents: str = "team"  # 'team' (tool, planner) or 'single' (solo)
    view: str = "full"  # 'split': only the Tool sees walls and the own row and column
    rewards_form: str = "progress"  # 'progress', 'safe', 'paper' (B.4) or 'outcome' (B.6)
    distance: str = "bfs"  # what all but 'outcome' measure: 'bfs' or 'manhattan'
    strict: bool | None = None  # paper only: '>' in the Tool's shaping term instead of the printed '>='
    max_walls: int | None = None  # maps with more walls are not drawn; default mean + 2.5 standard deviations

    def __post_init__(self):
        words = dict(agents=("team", "single"), view=("full", "split"), rewards_form=pay.FORMS, distance=("bfs", "manhattan"))
        cells = self.height * self.width
        bounds = dict(height=(2, 32), width=(2, 32), max_moves=(1, 32), max_turns=(1, 32), min_distance=(1, cells))
        check_options(self, words, bounds | dict(max_distance=(self.min_distance, cells)))
        if not 0 <= self.wall_density < 0.6:
            raise ValueError(f"plan_path.wall_density={self.wall_density} is not in [0, 0.6): few such maps can be solved")
        if self.strict is not None and self.rewards_form != "paper":
            raise ValueError("plan_path.strict has no effect unless rewards_form='paper'; remove it")
        if self.max_walls is not None and not 0 <= self.max_walls < self.height * self.width - 1:
            raise ValueError(f"plan_path.max_walls={self.max_walls} is not in [0, {self.height * self.width - 2}]")

    @functools.cached_property
    def wall_cap(self) -> int:
        """The most walls a map may have, and so the length of a prompt's wall list."""
        if self.max_walls is not None:
            return self.max_walls
        cells, p = self.height * self.width, self.wall_density
        return min(cells - 2, int(np.ceil(cells * p + 2.5 * np.sqrt(cells * p * (1 - p)))))

    @property
    def sizes(self) -> tuple[int, int, int]:
        """As `BoardGame`."""
        blind = 3  # turn, status, goal
        sees = blind + 2 + self.wall_cap  # row, column; walls
        return self.max_moves, sees, sees if self.view == "full" else blind

    @functools.cached_property
    def language(self) -> words.PlanPathLanguage:
        """All roles' words, the same vocabulary for team and single agent, so that one supervised warm-up serves both."""
        return words.PlanPathLanguage(self.height, self.width, self.max_turns)

    # --- instances and states --------------------------------------------------------------------------------------------

    def instance(self, key: jax.Array, split: str | Int[Array, ""]) -> Map:
        """A random solvable map of the split, or one that is not `valid` when none was found. `key` is folded."""
        bounds = {name: getattr(self, name) for name in ("height", "width", "wall_density", "min_distance", "max_distance")}
        map_, good = random_map(key, **bounds, max_walls=self.wall_cap, split=split)
        return map_._replace(distance=jnp.where(good, map_.distance, FAR))

    def valid(self, instance: Map) -> Bool[Array, ""]:
        """The goal can be reached within the distance bounds (not so when the settings contradict each other)."""
        d = instance.distance[instance.start[0], instance.start[1]]
        return (d >= self.min_distance) & (d <= self.max_distance)

    def task(self, instance: Map) -> dict:
        """The map as text rows, and its distance."""
        rows = rows_of(instance.walls, instance.start, instance.goal)
        return {"map": rows, "distance": int(instance.distance[tuple(instance.start)])}

    def picture(self, state: PlanPathState) -> list[str]:
        """The map with the agent where it stands, `*` when on the goal."""
        return rows_of(state.map.walls, state.position, state.map.goal)

    def reset(self, instance: Map) -> PlanPathState:
        """The agent stands at the start; nothing has been said."""
        none, true = jnp.full((self.max_moves,), -1, jnp.int32), jnp.bool_(True)
        nothing = PlanPathAction(none, true, true, instance.start, jnp.float32(0), jnp.int32(lists.NONE))
        claims = jnp.full((len(self.roles),), self._measure(instance, instance.start))
        return PlanPathState(instance, instance.start, jnp.int32(0), jnp.int32(lists.NONE), nothing, nothing, claims)

    def done(self, state: PlanPathState) -> Bool[Array, ""]:
        """The agent is at the goal."""
        return jnp.all(state.position == state.map.goal)

    def _measure(self, map_: Map, cell: Int[Array, "2"]) -> Float[Array, ""]:
        if self.distance == "bfs":
            return map_.distance[cell[0], cell[1]].astype(jnp.float32)
        return jnp.sum(jnp.abs(cell - map_.goal)).astype(jnp.float32)

    # --- prompts ---------------------------------------------------------------------------------------------------------

    def observe(self, state: PlanPathState, role: str) -> Prompt:
        """The role's prompt; the language is described in `language.py`."""
        lang = self.language
        goal = jnp.asarray(lang.cells("@"))[self._offset(state.position, state.map.goal)]
        parts = self.turn_and_status(state)
        sees = self.view == "full" or role == "tool"
        if sees:
            rows = jnp.asarray(lang.ids(*(f"r{r}" for r in range(self.height))))
            columns = jnp.asarray(lang.ids(*(f"c{c}" for c in range(self.width))))
            parts += [rows[state.position[0]], columns[state.position[1]]]
        parts.append(goal)
        if sees:
            parts.append(self._wall_list(state))
        if role == "planner":
            parts += self.proposed(state.proposal.moves, lang.ids(*MOVES), state.proposal.status)
        return lists.left_padded([*parts, lang.ids(role)], self.tokenizer.pad_id)

    def read(self, state: PlanPathState, role: str, text: str) -> tuple[int, ...]:
        """The response in the protocol's ids that says what a text says, by the grammar of `prose.py`.

        A text that says nothing, or more than `max_moves` moves, gives ids without a stop word, which do not parse.
        """
        spoken = prose.spoken(prose.listed(text), role)
        known = self.language.cells_by_name if role == "tool" else self.language.moves_by_name
        if spoken is None or len(spoken) > self.max_moves or not all(word in known for word in spoken):
            return lists.unreadable(self.max_moves, self.tokenizer.pad_id)
        return (*(known[word] for word in spoken), self.stop_id)

    def _offset(self, origin, cell):
        """Index of the offset from one cell to another in the language's order."""
        d = cell - origin
        return (d[..., 0] + self.height - 1) * (2 * self.width - 1) + d[..., 1] + self.width - 1

    def _wall_list(self, state: PlanPathState) -> Int[Array, "cap"]:
        """Ids of the walls, nearest first; padding where there are fewer than the cap."""
        cells = np.stack(np.meshgrid(np.arange(self.height), np.arange(self.width), indexing="ij"), -1).reshape(-1, 2)
        cells = jnp.asarray(cells, jnp.int32)
        away = jnp.sum(jnp.abs(cells - state.position), axis=-1)
        rank = jnp.where(state.map.walls.reshape(-1), -away, -FAR)
        value, index = jax.lax.top_k(rank, self.wall_cap)
        names = jnp.asarray(self.language.cells("#"))[self._offset(state.position, cells[index])]
        return jnp.where(value > -FAR, names, self.tokenizer.pad_id)

    # --- actions ---------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def _tables(self) -> tuple[np.ndarray, np.ndarray]:
        """Per id: the move it names (-1: none), and the row and column offset it names (FAR: none)."""
        size = self.tokenizer.vocab_size
        moves, offsets = np.full(size, -1, np.int32), np.full((size, 2), FAR, np.int32)
        moves[self.language.ids(*"UDLR")] = np.arange(4)
        reach = np.arange(1 - self.height, self.height), np.arange(1 - self.width, self.width)
        grid = np.stack(np.meshgrid(*reach, indexing="ij"), -1)
        offsets[self.language.cells("")] = grid.reshape(-1, 2)
        return moves, offsets

    def parse(self, role: str, tokens: Int[Array, "R"]) -> tuple[Int[Array, "M"], Bool[Array, ""]]:
        """Moves (indices into UDLR, -1 past the end) and whether the response parses.

        It must be words of the role's language, then the stop word. A route's cells must each neighbour the one before. What does
        not parse, is cut off before its stop word or is longer than `max_moves` yields no moves.
        """
        moves_of, offset_of = (jnp.asarray(t) for t in self._tables)
        body = tokens[: self.max_moves]
        if role == "tool":
            cells = offset_of[body]
            steps = cells - jnp.concatenate([jnp.zeros((1, 2), jnp.int32), cells[:-1]])
            match = jnp.all(steps[:, None, :] == jnp.asarray(DELTAS)[None], axis=-1)
            moves = jnp.where(jnp.any(match, axis=-1), jnp.argmax(match, axis=-1), -1)
        else:
            moves = moves_of[body]
        return lists.accepted(tokens, moves.astype(jnp.int32), self.stop_id)

    def simulate(self, state: PlanPathState, moves: Int[Array, "M"], well_formed: Bool[Array, ""]) -> PlanPathAction:
        """Makes the moves until the list ends, a wall or the border stops it, or the goal is reached."""
        map_ = state.map
        size = jnp.asarray([self.height, self.width])

        def step(carry, move):
            cell, stopped, arrived, on_path = carry
            active = (move >= 0) & ~stopped & ~arrived
            target = cell + jnp.asarray(DELTAS)[move]
            inside = jnp.all((target >= 0) & (target < size))
            safe = jnp.clip(target, 0, size - 1)
            free = inside & ~map_.walls[safe[0], safe[1]]
            moved = active & free
            closer = map_.distance[safe[0], safe[1]] < map_.distance[cell[0], cell[1]]
            new = jnp.where(moved, safe, cell)
            stopped = stopped | (active & ~free)
            arrived = arrived | (moved & jnp.all(new == map_.goal))
            return (new, stopped, arrived, on_path + (moved & closer)), None

        start = (state.position, jnp.bool_(False), jnp.all(state.position == map_.goal), jnp.int32(0))
        (end, stopped, arrived, on_path), _ = jax.lax.scan(step, start, moves)
        count = jnp.sum(moves >= 0)
        status = self.status_of(arrived, stopped, well_formed)
        legal = well_formed & (count > 0) & ~stopped
        return PlanPathAction(moves, well_formed, legal, end, (on_path / jnp.maximum(count, 1)).astype(jnp.float32), status)

    def claim(self, state: PlanPathState, acted: PlanPathAction) -> Float[Array, ""]:
        """The distance at the end of a list."""
        return self._measure(state.map, acted.end)

    def carried_out(self, state: PlanPathState, acted: PlanPathAction) -> PlanPathState:
        """The agent stands where the list ended."""
        return state._replace(position=acted.end)

    def rewards(self, before: PlanPathState, after: PlanPathState, role: str) -> Rewards:
        """What the role's macro-action earned, by `rewards_form`."""
        acted = after.acted
        index = self.index(role)
        facts = pay.PlanPathFacts(
            well_formed=acted.well_formed,
            legal=acted.legal,
            at_goal=jnp.all(acted.end == before.map.goal),
            before=self._measure(before.map, before.position),
            after=self._measure(before.map, acted.end),
            previous_claim=before.claims[index],
            initial=jnp.maximum(self._measure(before.map, before.map.start), 1.0),
            on_path=acted.on_path,
        )
        if self.rewards_form == "paper":
            return pay.paper(facts, executes=role != "tool", strict=bool(self.strict))
        if self.rewards_form == "outcome":
            return by_outcome(facts.well_formed, facts.at_goal)
        return pay.progress(facts) if self.rewards_form == "progress" else pay.safe(facts)

    # --- the scripted player ---------------------------------------------------------------------------------------------

    def script(
        self, state: PlanPathState, role: str, key: jax.Array, *, noise: float = 0.4, sighted: float = 0.25, repeat: float = 0.3
    ) -> tuple[Int[Array, "R"], Bool[Array, "R"]]:
        """A noisy walker's response: the supervised warm-up's teacher. `key` is consumed.

        With probability `sighted` its good moves follow a shortest path, else they merely come closer by Manhattan distance and
        ignore walls; each move is random with probability `noise`. The Planner repeats the proposal with probability `repeat`.
        """
        kinds, walk, copies = jax.random.split(key, 3)
        map_, size = state.map, jnp.asarray([self.height, self.width])
        follows = jax.random.uniform(kinds) < sighted

        def step(cell, step_key):
            noise_key, tie_key, random_key = jax.random.split(step_key, 3)
            target = cell[None] + jnp.asarray(DELTAS)
            inside = jnp.all((target >= 0) & (target < size), axis=-1)
            safe = jnp.clip(target, 0, size - 1)
            bfs = jnp.where(inside, map_.distance[safe[:, 0], safe[:, 1]], FAR)
            straight = jnp.where(inside, jnp.sum(jnp.abs(safe - map_.goal), axis=-1), FAR)
            cost = jnp.where(follows, bfs, straight) + 0.5 * jax.random.uniform(tie_key, (4,))
            dice = jnp.where(inside, jax.random.uniform(random_key, (4,)), -1.0)
            move = jnp.where(jax.random.uniform(noise_key) < noise, jnp.argmax(dice), jnp.argmin(cost))
            arrived = jnp.all(cell == map_.goal)
            new = jnp.where(arrived, cell, safe[move])
            return new, (jnp.where(arrived, -1, move), new)

        _, (moves, cells) = jax.lax.scan(step, state.position, jax.random.split(walk, self.max_moves))
        if role == "tool":
            words_of, means = self.language.cells(""), jnp.where(moves >= 0, self._offset(state.position, cells), -1)
        else:
            if role == "planner":
                moves = repeat_now_and_then(moves, state.proposal.moves, copies, repeat)
            words_of, means = self.language.ids(*MOVES), moves
        return lists.write_list(means, words_of, self.stop_id, self.tokenizer.pad_id)
