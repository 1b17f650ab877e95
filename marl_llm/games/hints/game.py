"""The hints game, a small Hanabi: two players see each other's cards and not their own, and build a pile per colour in order.

A player says one word: `play1` or `drop1` (the card in place 1), a colour or a number. A colour or number costs a hint and marks the
other's cards of it; it may be said where no card has it. A dropped card gives a hint back. A played card that is not the next of its
colour's pile is lost with a life. Any other word, a hint without hints left and a place without a card do nothing. A play ends with the
lives, with the cards in both hands, with full piles, or after `max_turns`; its outcome is the share of the piles that lies.

What a word means beyond its rule is a convention that a team is free to choose, so that teams that were trained apart need not understand
each other (Hu et al. 2020, arXiv:2003.02979). Unlike Hanabi, a pile keeps its cards when the lives are gone, nobody counts a last round,
and dropped cards are not shown.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from marl_llm.games.protocol import SPLITS, GameRole, Prompt, Rewards, split_index
from marl_llm.text import PieceTokenizer, train_pieces

NAMES = ("first", "second")
COLOURS = ("red", "blue", "green", "white", "yellow")
RESIDUES = {"validation": (0, 1), "test": (1, 2), "train": (2, 10)}  # of a deck's hash, modulo 10


class Deal(NamedTuple):
    """The deck in the order of drawing, cards as `colour * numbers + number`, and the second player's place for each colour."""

    deck: Int[Array, "D"]
    renamed: Int[Array, "C"]


class HintsState(NamedTuple):
    """The table.

    Attributes:
      drawn: cards taken off the deck. hands: cards, -1 for an empty place. known: whether colour and number of a card were hinted.
      piles: cards that lie, by colour. hints, lives: how many are left.
      words: what each player said last, an index of `Hints.words` with the first player's colours; -1: nothing, or no word of the game.
      seen: cards that lay after each player's last word.
    """

    deal: Deal
    drawn: Int[Array, ""]
    hands: Int[Array, "2 H"]
    known: Bool[Array, "2 H 2"]
    piles: Int[Array, "C"]
    hints: Int[Array, ""]
    lives: Int[Array, ""]
    words: Int[Array, "2"]
    seen: Int[Array, "2"]


@dataclasses.dataclass(frozen=True)
class Hints:
    """Options of the game. Raises `ValueError` naming one that is out of range.

    Attributes:
      colours, numbers: of the cards. There are three cards of the lowest number, one of the highest, two of all others.
      hand: cards that each player holds.
      hints, lives: at the start; a drop gives no more hints than these.
      max_turns: words of each player.
      other_play: in training the second player's colours are renamed at random, so that no convention can rest on a colour
        (Hu et al. 2020, Other-Play). Evaluations are played as they are.
    """

    name: ClassVar[str] = "hints"
    device: ClassVar[bool] = True
    random_player: ClassVar[dict[str, float]] = {}
    stages: ClassVar = (("first",), ("second",))

    colours: int = 2
    numbers: int = 3
    hand: int = 1
    hints: int = 3
    lives: int = 2
    max_turns: int = 8
    other_play: bool = False

    def __post_init__(self):
        for name, low, high in (("colours", 1, len(COLOURS)), ("numbers", 2, 5), ("hand", 1, 3), ("hints", 1, 9), ("lives", 1, 9)):
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"hints.{name}={getattr(self, name)} is not in [{low}, {high}]")
        if self.max_turns < 1:
            raise ValueError(f"hints.max_turns={self.max_turns} must be at least 1")

    @functools.cached_property
    def cards(self) -> np.ndarray:
        """All cards of a deck, sorted."""
        copies = [3, *[2] * (self.numbers - 2), 1]
        return np.repeat(np.arange(self.colours * self.numbers), copies * self.colours).astype(np.int32)

    @functools.cached_property
    def words(self) -> tuple[str, ...]:
        """What may be said: plays, drops, colours, numbers."""
        places = range(1, self.hand + 1)
        actions = (*(f"play{place}" for place in places), *(f"drop{place}" for place in places))
        return (*actions, *COLOURS[: self.colours], *map(str, range(1, self.numbers + 1)))

    @functools.cached_property
    def tokenizer(self) -> PieceTokenizer:
        """The words of the game, counts, `?` for what is not known, `none` for what is not there, and a stop word, which says nothing."""
        counts = (str(n) for n in range(max(10, len(self.cards) + 1)))
        return train_pieces((*self.words, *(n for n in counts if n not in self.words), "?", "none", ";"))

    @functools.cached_property
    def stop_id(self) -> int:
        """No word of the game; a response is one token anyway."""
        return self._id(";")

    @functools.cached_property
    def roles(self) -> tuple[GameRole, ...]:
        """Two equal players."""
        return tuple(GameRole(name, 4 + self.colours + 6 * self.hand, 1) for name in NAMES)

    def _id(self, word: str) -> int:
        return int(self.tokenizer.ids_of([word])[0])

    def _ids(self, words) -> Int[Array, "W"]:
        return jnp.asarray(self.tokenizer.ids_of(list(words)), jnp.int32)

    # --- deals -----------------------------------------------------------------------------------------------------------
    def instance(self, key: jax.Array, split: str | Int[Array, ""]) -> Deal:
        """A shuffled deck; a hash of its order says to which split it belongs. `key` is consumed."""
        index = jnp.asarray(split_index(split))
        low, high = jnp.asarray([RESIDUES[name] for name in SPLITS])[index]
        weights = jnp.asarray(np.random.default_rng(0).integers(1, 2**16, len(self.cards)), jnp.uint32)

        def wrong(carry):
            residue = jnp.sum(weights * (carry[1].astype(jnp.uint32) + 1)) // 8 % 10
            return (residue < low) | (residue >= high)

        def shuffled(carry):
            shuffle, after = jax.random.split(carry[0])
            return after, jax.random.permutation(shuffle, jnp.asarray(self.cards))

        name_key, deck_key = jax.random.split(key)
        _, deck = jax.lax.while_loop(wrong, shuffled, shuffled((deck_key, None)))
        colours = jnp.arange(self.colours)
        renamed = self.other_play & (index == SPLITS.index("train"))
        return Deal(deck, jnp.where(renamed, jax.random.permutation(name_key, colours), colours))

    def valid(self, instance: Deal) -> Bool[Array, ""]:
        """Every card is there, and every colour has a name."""
        whole = jnp.all(jnp.sort(instance.deck) == jnp.asarray(self.cards))
        return whole & jnp.all(jnp.sort(instance.renamed) == jnp.arange(self.colours))

    def _card(self, card: int) -> str:
        return "none" if card < 0 else f"{COLOURS[card // self.numbers]} {card % self.numbers + 1}"

    def task(self, instance: Deal) -> dict:
        """The deck, and the second player's names of the colours."""
        return {"deck": [self._card(int(card)) for card in instance.deck], "second": [COLOURS[int(i)] for i in instance.renamed]}

    def picture(self, state: HintsState) -> list[str]:
        """Both hands, the piles and the counts."""
        hands = [f"{name}: {', '.join(self._card(int(card)) for card in hand)}" for name, hand in zip(NAMES, state.hands)]
        piles = ", ".join(f"{colour} {int(pile)}" for colour, pile in zip(COLOURS, state.piles))
        return [*hands, f"piles: {piles}", f"hints {int(state.hints)}, lives {int(state.lives)}"]

    def reset(self, instance: Deal) -> HintsState:
        """Both hands are dealt."""
        taken = 2 * self.hand
        nothing, none = jnp.zeros((2,), jnp.int32), jnp.full((2,), -1, jnp.int32)
        hands, known = instance.deck[:taken].reshape(2, self.hand), jnp.zeros((2, self.hand, 2), bool)
        counts = (jnp.int32(self.hints), jnp.int32(self.lives))
        return HintsState(instance, jnp.int32(taken), hands, known, jnp.zeros((self.colours,), jnp.int32), *counts, none, nothing)

    # --- what is read and said -------------------------------------------------------------------------------------------
    def _place_of_colour(self, state: HintsState, role: str) -> Int[Array, "C"]:
        """The role's name of each colour, as a place in `COLOURS`."""
        return state.deal.renamed if role == "second" else jnp.arange(self.colours)

    def observe(self, state: HintsState, role: str) -> Prompt:
        """The other's last word, hints, lives, cards in the deck, piles, what is known of the own cards, the other's cards, what it knows.

        A card is its colour and its number, `?` what is not known and `none` an empty place. Colours have the role's names.
        """
        me, other = (0, 1) if role == "first" else (1, 0)
        place = self._place_of_colour(state, role)
        colours, numbers = (self._ids(words) for words in (COLOURS[: self.colours], map(str, range(1, self.numbers + 1))))
        counts = self._ids(map(str, range(max(10, len(self.cards) + 1))))
        words = self._ids((*self.words, "none"))
        first_colour = 2 * self.hand
        word = state.words[other]
        hinted = (word >= first_colour) & (word < first_colour + self.colours)
        word = jnp.where(hinted, first_colour + place[jnp.clip(word - first_colour, 0, self.colours - 1)], word)

        def card_ids(cards: Int[Array, "H"], known: Bool[Array, "H 2"]) -> Int[Array, "2*H"]:
            ids = jnp.stack([colours[place[cards // self.numbers]], numbers[cards % self.numbers]], axis=-1)
            ids = jnp.where(known, ids, self._id("?"))
            return jnp.where((cards < 0)[:, None], self._id("none"), ids).ravel()

        own_cards, partner_cards = card_ids(state.hands[me], state.known[me]), card_ids(state.hands[other], state.known[other])
        shown = card_ids(state.hands[other], jnp.ones_like(state.known[other]))
        table = counts[jnp.stack([state.hints, state.lives, len(self.cards) - state.drawn])]
        piles = counts[state.piles[jnp.argsort(place)]]
        ids = jnp.concatenate([words[word][None], table, piles, own_cards, shown, partner_cards])
        return Prompt(ids, jnp.ones(ids.shape, bool))

    def act(self, state: HintsState, role: str, tokens: Int[Array, "R"], where: Bool[Array, "R"]) -> HintsState:
        """The table after the word."""
        meaning = np.full(self.tokenizer.vocab_size, -1, np.int32)
        meaning[self.tokenizer.ids_of(list(self.words))] = np.arange(len(self.words))
        word = jnp.where(where[0], jnp.asarray(meaning)[tokens[0]], -1)
        me, other = (0, 1) if role == "first" else (1, 0)
        hand, numbers = self.hand, self.numbers
        colour = word - 2 * hand
        of_colour = (colour >= 0) & (colour < self.colours)
        colour = jnp.argsort(self._place_of_colour(state, role))[jnp.clip(colour, 0, self.colours - 1)]
        word = jnp.where(of_colour, 2 * hand + colour, word)

        # a card leaves the hand
        place = jnp.where((word >= 0) & (word < 2 * hand), word % hand, 0)
        card = state.hands[me, place]
        leaves = (word >= 0) & (word < 2 * hand) & (card >= 0)
        plays, drops = leaves & (word < hand), leaves & (word >= hand)
        pile = jnp.maximum(card, 0) // numbers
        fits = plays & (state.piles[pile] == card % numbers)
        new = jnp.where(state.drawn < len(self.cards), state.deal.deck[jnp.minimum(state.drawn, len(self.cards) - 1)], -1)
        hands = state.hands.at[me, place].set(jnp.where(leaves, new, card))
        known = state.known.at[me, place].set(state.known[me, place] & ~leaves)
        drawn = jnp.minimum(state.drawn + leaves, len(self.cards)).astype(jnp.int32)

        # a hint
        number = word - 2 * hand - self.colours
        hint = (of_colour | (number >= 0)) & (state.hints > 0)
        theirs = state.hands[other]
        match = jnp.stack([of_colour & (theirs // numbers == colour), ~of_colour & (theirs % numbers == number)], axis=-1)
        known = known.at[other].set(known[other] | (match & hint & (theirs >= 0)[:, None]))

        piles = state.piles.at[pile].add(fits)
        hints = jnp.minimum(state.hints - hint + drops, self.hints).astype(jnp.int32)
        words, seen = state.words.at[me].set(word), state.seen.at[me].set(jnp.sum(piles))
        return HintsState(state.deal, drawn, hands, known, piles, hints, (state.lives - (plays & ~fits)).astype(jnp.int32), words, seen)

    # --- pay -------------------------------------------------------------------------------------------------------------
    def rewards(self, before: HintsState, after: HintsState, role: str) -> Rewards:
        """Team: the share of the piles that was laid since the role's last word, by whomever. A play's sum is at most 1."""
        me = NAMES.index(role)
        laid = (jnp.sum(after.piles) - before.seen[me]) / (self.colours * self.numbers)
        laid = laid.astype(jnp.float32)
        return Rewards(laid, jnp.float32(0), {"laid": laid}, after.words[me] >= 0)

    def done(self, state: HintsState) -> Bool[Array, ""]:
        """No lives, no cards in the hands, or full piles."""
        return (state.lives <= 0) | jnp.all(state.hands < 0) | jnp.all(state.piles == self.numbers)

    def outcome(self, state: HintsState) -> Float[Array, ""]:
        """The share of the piles that lies."""
        return (jnp.sum(state.piles) / (self.colours * self.numbers)).astype(jnp.float32)

    def script(self, state: HintsState, role: str, key: jax.Array) -> tuple[Int[Array, "R"], Bool[Array, "R"]]:
        """A uniformly random word of the game, so that a warm-up teaches no convention. `key` is consumed."""
        return self._ids(self.words)[jax.random.randint(key, (1,), 0, len(self.words))], jnp.ones((1,), bool)
