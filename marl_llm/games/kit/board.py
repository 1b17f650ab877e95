"""What the board games of Stronger-MAS share (Appendices B.3 to B.5).

A Tool proposes a list and a Planner carries it out, or one agent does both.

Inside a turn the Tool speaks first; its list is simulated and shown to the Planner with its status. The Planner's list is then carried out
and ends the turn, of which there are at most `max_turns`. A response is a list of words, as `lists` has them. All methods are pure `jnp` on
one state.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from marl_llm.games.kit import lists
from marl_llm.games.protocol import GameRole, State
from marl_llm.hints import check_word
from marl_llm.text import PieceTokenizer, train_pieces

SPEAKERS = ("tool", "planner", "solo")


def check_options(game: Any, words: Mapping[str, Sequence[Any]], bounds: Mapping[str, tuple[int, int]]) -> None:
    """Raises `ValueError` for an option that is none of its words, or not within its bounds."""
    for field, allowed in words.items():
        check_word(f"{game.name}.{field}", getattr(game, field), allowed)
    for field, (low, high) in bounds.items():
        if not low <= getattr(game, field) <= high:
            raise ValueError(f"{game.name}.{field}={getattr(game, field)} is not in [{low}, {high}]")


class BoardLanguage:
    """Ids of the words of a game. A frozen dataclass has `max_turns` and says its own words."""

    max_turns: int

    def protocol(self, *own: str) -> list[str]:
        """Words of every board game: the stop word, a bar, the game's `own`, statuses, speakers, turns."""
        words = [lists.STOP, "|", *own, *lists.STATUS, *("+" + status for status in lists.STATUS), *SPEAKERS]
        return [*words, *(f"t{turn}" for turn in range(self.max_turns))]

    def words(self) -> list[str]:
        """All words, in the order of their ids."""
        raise NotImplementedError

    @functools.cached_property
    def tokenizer(self) -> PieceTokenizer:
        """One sentencepiece piece per word of the protocol."""
        return train_pieces(tuple(self.words()))

    def ids(self, *words: str) -> np.ndarray:
        """Ids of words, int32 `[len(words)]`."""
        return self.tokenizer.ids_of(words)

    def meanings(self, ids: np.ndarray) -> np.ndarray:
        """`[V]`: the place of a word among these ids, -1 for any other word."""
        means = np.full(self.tokenizer.vocab_size, -1, np.int32)
        means[ids] = np.arange(len(ids))
        return means


class BoardGame:
    """The base of a frozen dataclass of options, which has `language`, `sizes` and the methods of `protocol.Game` that are not here.

    A state has `turn`, `status` (of the last list that was carried out), `proposal` and `acted` (measured lists), and `claims`: per role,
    what its latest list came to.
    """

    name: ClassVar[str]
    device: ClassVar[bool] = True
    prose: ClassVar[ModuleType]  # whose `prompt` says what a role reads, in ordinary text
    agents: str  # 'team' (tool, planner) or 'single' (solo)
    max_turns: int
    language: BoardLanguage

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Words of a list at most, and tokens of what the Tool sees, and of what the Planner and the single agent see."""
        raise NotImplementedError

    @functools.cached_property
    def roles(self) -> tuple[GameRole, ...]:
        """Tool and Planner, or the single agent. A Planner reads the Tool's list behind a bar, and its status."""
        longest, tool_sees, others_see = self.sizes
        if self.agents == "single":
            return (GameRole("solo", others_see + 1, longest + 1),)
        return (GameRole("tool", tool_sees + 1, longest + 1), GameRole("planner", others_see + longest + 2 + 1, longest + 1))

    @functools.cached_property
    def stages(self) -> tuple[tuple[str, ...], ...]:
        """One role after the other."""
        return tuple((role.name,) for role in self.roles)

    @property
    def tokenizer(self) -> PieceTokenizer:
        """The protocol's tokenizer, one piece per fact."""
        return self.language.tokenizer

    @functools.cached_property
    def stop_id(self) -> int:
        """The token that ends a response."""
        return int(self.language.ids(lists.STOP)[0])

    def index(self, role: str) -> int:
        """The place of a role among the roles."""
        return [game_role.name for game_role in self.roles].index(role)

    def outcome(self, state: State) -> Float[Array, ""]:
        """1 when the task is solved, else 0."""
        return self.done(state).astype(jnp.float32)

    # --- prompts ---------------------------------------------------------------------------------------------------------

    def turn_and_status(self, state: State) -> list[Int[Array, ""]]:
        """How every prompt begins."""
        turns = jnp.asarray(self.language.ids(*(f"t{turn}" for turn in range(self.max_turns))))
        statuses = jnp.asarray(self.language.ids(*lists.STATUS))
        return [turns[jnp.minimum(state.turn, self.max_turns - 1)], statuses[state.status]]

    def proposed(self, listed: Int[Array, "M"], words: np.ndarray, status: Int[Array, ""]) -> list[Any]:
        """The Tool's list and its simulated status, as a Planner's prompt ends. `words`: id of each meaning."""
        bar, *results = self.language.ids("|", *("+" + status for status in lists.STATUS))
        return [bar, jnp.where(listed >= 0, jnp.asarray(words)[listed], self.tokenizer.pad_id), jnp.asarray(results)[status]]

    def text(self, state: State, role: str) -> str:
        """The role's prompt as ordinary text, of host values; see the game's `prose.py`."""
        return self.prose.prompt(self, state, role)

    # --- actions ---------------------------------------------------------------------------------------------------------

    def act(self, state: State, role: str, tokens: Int[Array, "R"], where: Bool[Array, "R"]) -> State:
        """The Tool's list is simulated and noted; the Planner's (or single agent's) is carried out and ends the turn."""
        listed, well_formed = self.parse(role, jnp.where(where, tokens, self.tokenizer.pad_id))
        acted = self.simulate(state, listed, well_formed)
        index = self.index(role)
        # what does not parse claims nothing: the claim before it stands, so that what is paid telescopes through it
        claim = jnp.where(well_formed, self.claim(state, acted), state.claims[index])
        claims = state.claims.at[index].set(claim)
        if role == "tool":
            return state._replace(proposal=acted, acted=acted, claims=claims)
        return self.carried_out(state, acted)._replace(turn=state.turn + 1, status=acted.status, acted=acted, claims=claims)

    def parse(self, role: str, tokens: Int[Array, "R"]) -> tuple[Int[Array, "M"], Bool[Array, ""]]:
        """What a response lists, -1 past its end, and whether it parses; one that does not lists nothing."""
        return lists.read_list(tokens, self.language.meaning, self.sizes[0], self.stop_id)

    def status_of(self, solved: Bool[Array, ""], stopped: Bool[Array, ""], well_formed: Bool[Array, ""]) -> Int[Array, ""]:
        """What became of a list."""
        status = jnp.where(solved, lists.SOLVED, jnp.where(stopped, lists.ILLEGAL, lists.DONE))
        return jnp.where(well_formed, status, lists.MALFORMED).astype(jnp.int32)


def repeat_now_and_then(
    own: Int[Array, "M"], proposal: Int[Array, "M"], key: jax.Array, chance: float | Float[Array, ""]
) -> Int[Array, "M"]:
    """A scripted Planner's list: the proposal, if there is one, with this chance, else its own. `key` is consumed."""
    usable = (proposal[0] >= 0) & (jax.random.uniform(key) < chance)
    return jnp.where(usable, proposal, own)
