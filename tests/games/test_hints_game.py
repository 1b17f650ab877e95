"""The hints game against a reference of lists and dictionaries; what a prompt hides; renamed colours; disjoint decks; bad options."""

import dataclasses
import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.configs import hints as config_file
from marl_llm.games import Game, make_game, split_index
from marl_llm.games.hints import Deal, Hints
from marl_llm.runs.command import ConfigError
from marl_llm.runs.resolve import resolve

GAMES = {"small": Hints(max_turns=12), "large": Hints(colours=3, numbers=4, hand=2, hints=4, lives=3, max_turns=20)}
COLOURS = ["red", "blue", "green"]


class Reference:
    """The rules once more, of words alone. Cards are pairs (colour, number); `second` reads and says its colours by `names`."""

    def __init__(self, game, deck, names):
        self.game, self.deck = game, list(deck)
        self.names = {"first": {c: c for c in COLOURS}, "second": names}
        self.hands = {role: [self.deck.pop(0) for _ in range(game.hand)] for role in ("first", "second")}
        self.marks = {role: [set() for _ in range(game.hand)] for role in self.hands}
        self.piles = dict.fromkeys(COLOURS[: game.colours], 0)
        self.hints, self.lives = game.hints, game.lives
        self.last = {"first": None, "second": None}
        self.paid = {"first": 0, "second": 0}

    def say(self, role, word):
        other = "second" if role == "first" else "first"
        back = {name: colour for colour, name in self.names[role].items()}
        word = back.get(word, word)
        known = word in self.game.words
        self.last[role] = word if known else None
        if known and word[:4] in ("play", "drop"):
            place = int(word[4:]) - 1
            card = self.hands[role][place]
            if card is not None:
                self.hands[role][place] = self.deck.pop(0) if self.deck else None
                self.marks[role][place] = set()
                if word.startswith("drop"):
                    self.hints = min(self.hints + 1, self.game.hints)
                elif self.piles[card[0]] == card[1] - 1:
                    self.piles[card[0]] += 1
                else:
                    self.lives -= 1
        elif known and self.hints:
            self.hints -= 1
            for card, marks in zip(self.hands[other], self.marks[other]):
                if card is not None:
                    marks |= {word} & {card[0], str(card[1])}
        reward = (sum(self.piles.values()) - self.paid[role]) / self.size
        self.paid[role] = sum(self.piles.values())
        return reward, known

    @property
    def size(self):
        return self.game.colours * self.game.numbers

    @property
    def over(self):
        empty = all(card is None for hand in self.hands.values() for card in hand)
        return self.lives == 0 or empty or set(self.piles.values()) == {self.game.numbers}

    def prompt(self, role):
        other, names = "second" if role == "first" else "first", self.names[role]

        def card_words(hand, marks):
            for card, known in zip(hand, marks):
                if card is None:
                    yield from ("none", "none")
                else:
                    yield names[card[0]] if card[0] in known else "?"
                    yield str(card[1]) if str(card[1]) in known else "?"

        by_name = {names[colour]: pile for colour, pile in self.piles.items()}
        words = [names.get(self.last[other], self.last[other]) or "none", self.hints, self.lives, len(self.deck)]
        words += [by_name[name] for name in COLOURS[: self.game.colours]]
        words += card_words(self.hands[role], self.marks[role])
        words += card_words(self.hands[other], [set(map(str, card or ())) for card in self.hands[other]])
        words += card_words(self.hands[other], self.marks[other])
        return " ".join(map(str, words))


@functools.cache
def compiled(game, role):
    """(observe, act with its rewards), jitted."""

    def step(state, token):
        after = game.act(state, role, token[None], jnp.ones((1,), bool))
        return after, game.rewards(state, after, role), game.done(after), game.outcome(after)

    return jax.jit(lambda state: game.observe(state, role).ids), jax.jit(step)


@functools.cache
def dealer(game):
    return jax.jit(lambda seed, split: game.instance(jax.random.key(seed), split))


def draw(game, seed, split="train"):
    """A deal, and the reference of it."""
    deal = dealer(game)(seed, split_index(split))
    deck = [(COLOURS[int(card) // game.numbers], int(card) % game.numbers + 1) for card in np.asarray(deal.deck)]
    names = {COLOURS[c]: COLOURS[name] for c, name in enumerate(np.asarray(deal.renamed))}
    return deal, Reference(game, deck, names)


def lucky(reference, role, rng):
    """Often a card that fits, so that piles grow; otherwise any word, or one that is no word of the game."""
    fits = [i for i, card in enumerate(reference.hands[role]) if card and reference.piles[card[0]] == card[1] - 1]
    if fits and rng.random() < 0.6:
        return f"play{rng.choice(fits) + 1}"
    return rng.choice([*reference.game.words, "?", ";", "0"])


@pytest.mark.parametrize("other_play", [False, True])
@pytest.mark.parametrize("name", GAMES)
def test_plays_agree_with_the_reference_and_pay_sums_to_the_outcome(name, other_play):
    game = dataclasses.replace(GAMES[name], other_play=other_play)
    ends = set()
    for seed in range(12):
        rng = random.Random(seed)
        deal, reference = draw(game, seed)
        state, totals = game.reset(deal), {"first": 0.0, "second": 0.0}
        for role in ("first", "second") * game.max_turns:
            observe, step = compiled(game, role)
            assert game.tokenizer.decode(observe(state)) == reference.prompt(role)
            word = lucky(reference, role, rng)
            state, rewards, over, outcome = step(state, jnp.int32(game.tokenizer.ids_of([word])[0]))
            reward, known = reference.say(role, word)
            assert float(rewards.team) == pytest.approx(reward)
            assert (bool(rewards.well_formed), bool(over)) == (known, reference.over)
            assert 0 <= float(rewards.team) <= 1
            assert float(rewards.local) == 0
            totals[role] += float(rewards.team)
            if over:
                break
        assert totals[role] == pytest.approx(float(outcome), abs=1e-6)  # of who spoke last
        assert float(outcome) == pytest.approx(sum(reference.piles.values()) / reference.size)
        ends.add(reference.lives == 0)
    assert ends == {True, False}


@pytest.mark.parametrize("name", GAMES)
def test_a_prompt_does_not_depend_on_the_players_own_cards_but_for_what_was_hinted(name):
    game = GAMES[name]
    state = game.reset(draw(game, 3)[0])
    for me, role in enumerate(("first", "second")):
        observe, _ = compiled(game, role)
        read = {kind: set() for kind in ("mine", "others")}
        for card in range(game.colours * game.numbers):
            for kind, player in (("mine", me), ("others", 1 - me)):
                read[kind].add(tuple(np.asarray(observe(state._replace(hands=state.hands.at[player].set(card)))).tolist()))
        assert (len(read["mine"]), len(read["others"])) == (1, game.colours * game.numbers)


def test_other_play_renames_colours_in_training_alone_and_leaves_what_is_played():
    game, plain = Hints(colours=3, other_play=True), Hints(colours=3)
    renamed = {
        split: {tuple(draw(game, seed, split)[0].renamed.tolist()) for seed in range(12)} for split in ("train", "validation", "test")
    }
    assert len(renamed["train"]) > 2
    assert renamed["validation"] == renamed["test"] == {(0, 1, 2)}
    assert {tuple(draw(plain, seed)[0].renamed.tolist()) for seed in range(3)} == {(0, 1, 2)}


def test_law_12_decks_of_the_splits_are_disjoint_whole_and_differ():
    game = GAMES["small"]
    deal = jax.vmap(dealer(game), in_axes=(0, None))
    decks = {}
    for split in ("train", "validation", "test"):
        drawn = deal(jnp.arange(150), split_index(split))
        assert jax.vmap(game.valid)(drawn).all()
        decks[split] = {tuple(deck) for deck in np.asarray(drawn.deck).tolist()}
        assert len(decks[split]) > 140
    assert len(set.union(*decks.values())) == sum(map(len, decks.values()))
    assert not bool(game.valid(Deal(jnp.zeros_like(drawn.deck[0]), drawn.renamed[0])))


def test_the_game_has_the_protocols_parts_and_an_aimless_script():
    game = make_game("hints")
    assert isinstance(game, Game)
    assert game.cards.tolist() == [0, 0, 0, 1, 1, 2, 3, 3, 3, 4, 4, 5]
    deal, reference = draw(game, 0)
    assert game.task(deal)["deck"][0] == " ".join(map(str, reference.hands["first"][0]))
    assert game.picture(game.reset(deal))[2:] == ["piles: red 0, blue 0", "hints 3, lives 2"]
    ids = jax.vmap(lambda key: game.script(game.reset(deal), "first", key)[0])(jax.random.split(jax.random.key(0), 300))
    assert {game.tokenizer.decode(row) for row in np.asarray(ids)} == {"play1", "drop1", "red", "blue", "1", "2", "3"}


@pytest.mark.parametrize(("option", "value"), [("colours", 6), ("numbers", 1), ("hand", 0), ("hints", 0), ("lives", 10), ("max_turns", 0)])
def test_a_bad_option_is_named(option, value):
    with pytest.raises(ValueError, match=rf"hints\.{option}={value} (is not in \[|must be at least 1)"):
        make_game("hints", **{option: value})


@pytest.mark.parametrize("arg", [None, "league", "other_play", "smoke"])
def test_the_configs_resolve(arg):
    with resolve(config_file.get_config(arg)) as plan:
        assert plan.assignment.roles == {"first": "shared", "second": "shared"}
        assert (plan.recipe.returns, plan.recipe.scope) == ("to_go", "agent")
    with pytest.raises(ConfigError, match="no variant 'legue'"):
        config_file.get_config("legue")
