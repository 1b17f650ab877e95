"""Two writers in a small world: a post is a list of facts in three words, and both write down some of them, unseen by each other.

    post   p3 v1 q7 ; p0 v4 q2 ; ...        first   p3 v1 q7 p0 v4 q2        second   thus the p3 v1 q7 ; also p9 v0 q1 ...

The reward is that of `reward`, with lengths in words and a post of 18 to 30 words. The scripted player restates a random number of facts
with at most two connectives, so that the two lengths seldom fit. Which split a fact belongs to follows from its two names.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from collections.abc import Callable

from marl_llm.games.kit.miniature import SHARES, kinds_of_split, word_renderer
from marl_llm.games.writing.reward import PAPER, Band, Constants
from marl_llm.games.writing.team import TASKS, Shown, two_parts, writing_team
from marl_llm.games.writing.transitions import CATEGORIES
from marl_llm.hints import check_word
from marl_llm.text import PieceTokenizer, train_pieces
from marl_llm.workflows import Environment, PlainText, Role, ScriptTurn, Task, plain
from marl_llm.workflows.errors import WorkflowError
from marl_llm.workflows.splits import drawn_tasks

FIRST, SECOND, VERBS = 24, 24, 16
FACTS = (6, 10)
STOPS = ("the", "a", "and", "of", "with", "for", "by", "as")
CONNECTIVES = tuple(next(phrase for phrase in phrases if " " not in phrase) for phrases in CATEGORIES.values())  # one of each
SPLIT_MARK = "|"
CONSTANTS = Constants(
    own=((4, 24), (8, 64)), length=Band(1.1, 1.6, 3.2, 5.0), unique=Band(1.3, 2.0, math.inf, math.inf), cap=0.03, log_factor=0.6,
    length_in="words", grounding=0.7, copied=1.0,
)  # fmt: skip
CONSTANTS_OF = {  # arXiv's two parts are about equally long, which is what an answer at once can gain most from
    "tldr": CONSTANTS,
    "arxiv": dataclasses.replace(PAPER["arxiv"], own=((8, 40), (8, 40)), length_in="words", grounding=0.7, copied=1.0),
}
Fact = tuple[str, str, str]


@functools.cache
def notes_tokenizer() -> PieceTokenizer:
    """One token per word."""
    names = (*(f"p{i}" for i in range(FIRST)), *(f"q{i}" for i in range(SECOND)), *(f"v{i}" for i in range(VERBS)))
    own = (".", ";", SPLIT_MARK, "first:", "second:", "writer:", "mine", "other", "none")
    return train_pieces(tuple(dict.fromkeys((*own, *names, *STOPS, *CONNECTIVES))))


def notes_renderer() -> PlainText:
    """A text ends with `.`."""
    return word_renderer(notes_tokenizer())


@functools.cache
def pairs_of(split: str) -> tuple[tuple[str, str], ...]:
    """The pairs of names whose facts belong to a split, by a hash of the pair. Raises `ValueError` for an unknown split."""
    pairs = [(f"p{i}", f"q{j}") for i in range(FIRST) for j in range(SECOND)]
    return kinds_of_split(split, pairs, " ".join)


def notes_task(split: str, seed: int, number: int) -> Task:
    """A post of 6 to 10 facts. Raises `ValueError` for an unknown split."""
    rng = random.Random(f"notes {split} {seed} {number}")
    facts = [(first, f"v{rng.randrange(VERBS)}", second) for first, second in rng.sample(pairs_of(split), rng.randint(*FACTS))]
    return Task(number, {"post": " ; ".join(map(" ".join, facts))}, {}, split)


def facts_of(post: str) -> list[Fact]:
    """The facts of a post."""
    return [tuple(fact.split()) for fact in post.split(" ; ")]


def notes_roles(style: str, constants: Constants = CONSTANTS) -> dict[str, Role]:
    """Two writers, or one who writes both texts with `|` between them."""
    most = [most for _, most in constants.own]
    if style == "single":
        parts = two_parts(SPLIT_MARK)
        return {"writer": Role("writer", "{post} writer:", parts, {"first": "", "second": ""}, max_tokens=sum(most) + 2, max_prompt=64)}
    longest = {"first": most[0] + 1, "second": most[1] + 1}
    return {
        name: Role(name, f"{{post}} {{seen_{name}}} {name}:", plain(name), {name: ""}, max_tokens=size, max_prompt=160)
        for name, size in longest.items()
    }


def notes_player(
    most_first: int = 8, most_second: int = 10, connectives: int = 2, single: bool = False, constants: Constants = CONSTANTS
) -> Callable[[ScriptTurn], str]:
    """Restates a random number of facts, 1 to `most_*`, each with a chance of a stop word, and up to so many connectives."""

    sizes = [most for _, most in constants.own]

    def text(facts: list[Fact], most: int, longest: int, rng: random.Random) -> str:
        chosen = [list(fact) for fact in rng.sample(facts, min(rng.randint(1, most), len(facts)))]
        for fact in chosen:
            if rng.random() < 0.3:
                fact.insert(0, rng.choice(STOPS))
        for _ in range(rng.randint(0, connectives)):
            rng.choice(chosen).insert(0, rng.choice(CONNECTIVES))
        return " ".join([word for fact in chosen for word in fact][:longest])

    def play(turn: ScriptTurn) -> str:
        rng, facts = turn.random, facts_of(turn.fields["post"])
        if single:
            return f"{text(facts, most_first, sizes[0], rng)} {SPLIT_MARK} {text(facts, most_second, sizes[1], rng)}"
        first = turn.role.name == "first"
        return text(facts, most_first if first else most_second, sizes[0 if first else 1], rng)

    return play


def random_writer(turn: ScriptTurn) -> str:
    """The random player: words of the environment."""
    rng = turn.random
    words = [*STOPS, *CONNECTIVES, *(f"{kind}{i}" for kind, size in (("p", FIRST), ("q", SECOND), ("v", VERBS)) for i in range(size))]

    def draw(low, high):
        return " ".join(rng.choice(words) for _ in range(rng.randint(low, high)))

    if turn.role.name == "writer":
        return f"{draw(4, 20)} {SPLIT_MARK} {draw(8, 60)}"
    return draw(4, 24) if turn.role.name == "first" else draw(8, 64)


def notes(
    notes_seed: int = 0,
    style: str = "parallel",
    grounded: bool = False,
    most_first: int = 8,
    most_second: int = 10,
    connectives: int = 2,
    task: str = "tldr",
) -> Environment:
    """Two writers on generated posts.

    Args:
      style: one of `team.STYLES`.
      grounded: words must occur in the post (70 % of those with content), else the evaluation ends behind level 1.
      most_first, most_second, connectives: habits of the scripted player, see `notes_player`.
      task: whose constants the reward has, "tldr" (the second text is 1.6 to 3.2 times as long) or "arxiv" (1.0 to 1.3 times).

    Raises `WorkflowError` for an unknown word.
    """
    check_word("task", task, TASKS, WorkflowError)
    constants = dataclasses.replace(CONSTANTS_OF[task], grounded=grounded)
    shown = Shown(own=lambda text: f"mine {text or 'none'} ", other=lambda text: f"other {text or 'none'}")
    workflow = writing_team(constants, notes_roles(style, constants), style, shown)
    tasks = drawn_tasks(lambda split, number: notes_task(split, notes_seed, number), SHARES)
    script = notes_player(most_first, most_second, connectives, style == "single", constants)
    return Environment(workflow, tasks, "return", notes_renderer(), script, random_writer)


