"""A small world of films and people: generated pages, and questions whose answers are names never seen in training.

A name is two pieces, `a17 b10`. All pieces occur in training, but a name belongs to one split by its content (a hash), and so do all facts:
no seed can make a test fact a training fact (law 12). Pages are found by a real BM25 index, in which a name is one word. Questions use
other words than pages do (`hometown`, not `born`), so that a decomposer has something to learn.

    film a1 b2 director a3 b4 year y1987 studio a5 b6          person a3 b4 born a7 b8 job pilot made a1 b2
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import random
import re
import tempfile
from typing import Any

from marl_llm.games.kit.miniature import word_renderer
from marl_llm.text import PieceTokenizer, train_pieces
from marl_llm.tools.results import ToolResult
from marl_llm.tools.retriever.interface import MAX_QUERY
from marl_llm.workflows import PlainText, Task
from marl_llm.workflows.splits import check_split, split_of

PIECES = 24
SHARES = {"train": 0.60, "validation": 0.15, "test": 0.25}
YEARS = tuple(f"y{year}" for year in range(1950, 1990))
JOBS = ("pilot", "baker", "nurse", "judge", "miner", "tailor", "singer", "farmer")
PAGE_WORDS = ("film", "person", "director", "year", "studio", "born", "job", "made")
QUESTION_WORDS = ("whomade", "whenmade", "whopaid", "hometown", "trade", "maker", "workof", "sametrade", "earlier")
PROTOCOL = ("ask", "see", "know", "for", "answer:", "queries:", "evidence:", "next:", "q", ";", "|", "nothing", "end", "yes", "no", ".")
KINDS = ("director", "year", "studio", "born", "job", "f>born", "f>job", "p>year", "p>studio", "same", "earlier")
NAME = re.compile(r"\b(a\d+) (b\d+)\b")
REMEMBERED = 4096  # answers of the retrieval tool


@functools.cache
def fact_tokenizer() -> PieceTokenizer:
    """One token per word of the world."""
    names = tuple(f"{side}{i}" for side in "ab" for i in range(PIECES))
    return train_pieces((*names, *YEARS, *JOBS, *PAGE_WORDS, *QUESTION_WORDS, *PROTOCOL))


def fact_renderer() -> PlainText:
    """How tiny models of this world read and write: a response ends with `.`."""
    return word_renderer(fact_tokenizer())


def name_split(name: str) -> str:
    """The split that a name belongs to, by its content."""
    return split_of(name, SHARES)


@dataclasses.dataclass(frozen=True)
class Film:
    """A film and its facts."""

    name: str
    director: str
    year: str
    studio: str

    @property
    def page(self) -> str:
        """As it is indexed."""
        return f"film {self.name} director {self.director} year {self.year} studio {self.studio}"


@dataclasses.dataclass(frozen=True)
class Person:
    """A person and their facts."""

    name: str
    born: str
    job: str
    made: str

    @property
    def page(self) -> str:
        """As it is indexed."""
        return f"person {self.name} born {self.born} job {self.job} made {self.made}"


@dataclasses.dataclass(frozen=True)
class FactWorld:
    """The facts of one split; another seed deals the same names out anew, so that nothing can be learned by heart.

    Raises `ValueError` for an unknown split.
    """

    split: str
    seed: int

    def __post_init__(self):
        check_split(self.split, SHARES)

    @property
    def name(self) -> str:
        """Unique among all worlds."""
        return f"{self.split}-{self.seed}"

    @functools.cached_property
    def facts(self) -> tuple[tuple[Film, ...], tuple[Person, ...]]:
        """Films and people, the n-th person being the director of the n-th film."""
        names = [f"a{i} b{j}" for i in range(PIECES) for j in range(PIECES)]
        names = [name for name in names if name_split(name) == self.split]
        rng = random.Random(f"facts {self.split} {self.seed}")
        rng.shuffle(names)
        n, m = len(names) * 3 // 10, len(names) // 5
        films, people, cities, studios = names[:n], names[n : 2 * n], names[2 * n : 2 * n + m], names[2 * n + m : 2 * n + 2 * m]
        return (
            tuple(Film(f, p, rng.choice(YEARS), rng.choice(studios)) for f, p in zip(films, people)),
            tuple(Person(p, rng.choice(cities), rng.choice(JOBS), f) for f, p in zip(films, people)),
        )

    @property
    def pages(self) -> list[str]:
        """All pages."""
        return [fact.page for group in self.facts for fact in group]

    def task(self, number: int) -> Task:
        """A question. Hidden: `answers`, the `queries` that find what is needed, the `kind`, and the `world`."""
        rng = random.Random(f"question {self.split} {self.seed} {number}")
        films, people = self.facts
        kind = rng.choice(KINDS)
        i, j = rng.sample(range(len(films)), 2)
        film, person = films[i], people[i]
        if kind == "earlier":
            while films[j].year == film.year:
                j = rng.randrange(len(films))
        elif kind == "same" and rng.random() < 0.5:  # as many yes as no
            j = rng.choice([k for k, other in enumerate(people) if k != i and other.job == person.job] or [j])
        other_film, other = films[j], people[j]
        question, answer, queries = {
            "director": (f"whomade {film.name}", film.director, (f"{film.name} director",)),
            "year": (f"whenmade {film.name}", film.year, (f"{film.name} year",)),
            "studio": (f"whopaid {film.name}", film.studio, (f"{film.name} studio",)),
            "born": (f"hometown {person.name}", person.born, (f"{person.name} born",)),
            "job": (f"trade {person.name}", person.job, (f"{person.name} job",)),
            "f>born": (f"hometown maker {film.name}", person.born, (f"{film.name} born",)),
            "f>job": (f"trade maker {film.name}", person.job, (f"{film.name} job",)),
            "p>year": (f"whenmade workof {person.name}", film.year, (f"{person.name} year",)),
            "p>studio": (f"whopaid workof {person.name}", film.studio, (f"{person.name} studio",)),
            "same": (
                f"sametrade {person.name} {other.name}",
                "yes" if person.job == other.job else "no",
                (f"{person.name} job", f"{other.name} job"),
            ),
            "earlier": (
                f"earlier {film.name} {other_film.name}",
                min(film, other_film, key=lambda candidate: candidate.year).name,
                (f"{film.name} year", f"{other_film.name} year"),
            ),
        }[kind]
        secret = {"answers": (answer,), "queries_gold": queries, "kind": kind, "world": self.name}
        return Task(number, {"question": question}, secret, self.split)

    def build_index(self, folder: str | pathlib.Path) -> Any:
        """A `BM25Index` of the pages in a new folder."""
        from marl_llm.tools.retriever import build_bm25

        passages = [{"id": str(i), "contents": joined(page), "page": page} for i, page in enumerate(self.pages)]
        return build_bm25(passages, folder, stopwords=None)


HIDDEN = ("answers", "queries_gold", "kind", "world")


class FactBase:
    """Many fact worlds of every split with a BM25 index each, and the retrieval tool over all of them; a task names its world.

    Args:
      worlds: of the training split; held-out splits have a quarter of it, at least one.
      seed: of the facts.
      top_k: pages per query.
      folder: where the indices go; by default a temporary directory that goes with `close`.

    Raises:
      ValueError: `worlds` or `top_k` is below 1.
    """

    def __init__(self, worlds: int = 32, seed: int = 0, top_k: int = 1, folder: str | pathlib.Path | None = None):
        if worlds < 1 or top_k < 1:
            raise ValueError(f"worlds={worlds} and top_k={top_k} must be at least 1")
        self._own = tempfile.TemporaryDirectory(prefix="facts-") if folder is None else None
        folder = pathlib.Path(self._own.name if self._own else folder)
        sizes = {split: worlds if split == "train" else -(-worlds // 4) for split in SHARES}
        self.worlds = {split: [FactWorld(split, seed + number) for number in range(size)] for split, size in sizes.items()}
        all_worlds = [world for group in self.worlds.values() for world in group]
        self._indices = {world.name: world.build_index(folder / world.name) for world in all_worlds}
        self._top_k = top_k
        self._answers: dict[tuple[str, str], ToolResult] = {}  # by world and query: attempts at one question ask alike

    def tasks(self, split: str, first: int, count: int) -> list[Task]:
        """Questions `first ... first + count`, dealt over the worlds of the split; hidden `world` says which."""
        group = self.worlds[split]
        return [group[number % len(group)].task(number) for number in range(first, first + count)]

    async def retrieve(self, query: str, world: str) -> ToolResult:
        """The retrieval tool: pages of a task's own world. They are so few that a search takes no longer than an answer of a thread."""
        result = self._answers.get((world, query))
        if result is None:
            hits = self._indices[world].search([joined(query)[:MAX_QUERY]], self._top_k, 30.0)
            result = hits.map(lambda hits: tuple(hit.document["page"] for hit in hits[0]))
            if len(self._answers) >= REMEMBERED:
                self._answers.clear()
            if result.ok:
                self._answers[world, query] = result
        return result

    def close(self) -> None:
        """Removes the indices that were built in a directory of their own."""
        self._indices.clear()
        self._answers.clear()
        if self._own is not None:
            self._own.cleanup()


def joined(text: str) -> str:
    """Text in which every name is one word, as the index wants it: on its pieces, pages of strangers would match."""
    return NAME.sub(r"\1_\2", text)
