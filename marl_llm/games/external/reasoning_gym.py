"""Problems of reasoning-gym 0.1.25 (Stojanovski et al., arXiv 2505.24760): a generator makes them, and its own scorer pays the answer.

    solver ─▶ score                          agents="single"
    solver ─▶ draft score ─▶ verifier ─▶ score        agents="pair"

| what a generator's scorer does | where it runs |
|---|---|
| compares and parses | in this process, behind `guards.seeded` |
| `eval` of the answer (`LITERAL`) | in the sandbox, with `ast.literal_eval` in place of `eval` |
| SymPy's parser, which calls `eval` (`FORMULA`) | in the sandbox, and only answers that are formulas (`guards.is_formula`) |
| cannot be played (`REFUSED`) | the game is refused with the reason |

A scorer that raises pays 0 and is counted. docs/external_games.md has the list of generators.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from marl_llm.games.external.guards import foreign_package, is_formula, is_moderate, seeded
from marl_llm.games.kit.miniature import SHARES, byte_renderer
from marl_llm.games.registry import GameError
from marl_llm.hints import check_word, meant
from marl_llm.tools.results import ToolResult, success
from marl_llm.tools.sandbox import PROFILES, Limits, Program, Submission, default_sandbox
from marl_llm.tools.verdicts import Verdicts, content_key
from marl_llm.untrusted import read_json
from marl_llm.workflows import Environment, FormatError, Role, ScriptTurn, Task, Trajectory, Workflow, sequence, tool
from marl_llm.workflows.parsers import Parser, plain
from marl_llm.workflows.rewards import absolute, broadcast, format_penalty
from marl_llm.workflows.splits import Tasks, drawn_tasks, split_of

VERSION = "0.1.25"
REFUSED = {
    "game_of_life_halting": "its scorer pays 1 for any text that is not 'True' or 'False' where the answer is 'False'",
    "composite": "it mixes other generators; name one of them",
    "codeio": "it executes programs of its own data file while it makes problems",
}
LITERAL = ("binary_matrix", "spiral_matrix", "string_insertion", "n_queens")  # `eval(answer)`
FORMULA = ("countdown", "puzzle24", "simple_integration", "intermediate_integration", "polynomial_multiplication")  # SymPy's parser
EXECUTING = (*LITERAL, *FORMULA)
MODERATE = ("coin_flip", "complex_arithmetic")  # `Fraction("1e999999999")` never ends; the distance to `nan` is paid 1
BLOCK_POOLS = {"acre": 4000, "word_ladder": 4000}  # these make all their problems at once, or bound how many there are
POOL = 100_000
ANSWER_CHARACTERS = 4000
DRAWS = 400  # problems looked at for one task
KEPT = 4096  # problems kept at a time
LIMITS = Limits(timeout_s=6.0, cpu_s=4.0)
PROGRAM = """
import ast, json, sys
import reasoning_gym
job = json.load(sys.stdin)
dataset = reasoning_gym.create_dataset(job["dataset"], **job["settings"])
if job["literal"]:
    sys.modules[type(dataset).__module__].eval = ast.literal_eval
print("\\n" + json.dumps(float(dataset.score_answer(job["answer"], job["entry"]))))
"""
PROMPTS = {
    "tags": (
        "{question}\n\nThink step by step. Put the final answer into one pair of tags, <answer>like this</answer>, at the very end.",
        "{question}\n\nSomeone answered:\n{draft}\n\nCheck it step by step; keep it if it is right. Put the final answer into one pair of "
        "tags, <answer>like this</answer>, at the very end.",
    ),
    "short": (
        "{question}\n\nReply with the answer alone.",
        "{question}\n\nSomeone answered: {draft}\nReply with the right answer alone: the same if it is right, else a better one.",
    ),
    "number": (
        "{question}\n\nWork it out in a few words, and end with the answer.",
        "{question}\n\nSomeone answered: {draft}\nWork it out again in a few words, and end with the right answer.",
    ),
    "plain": ("{question}\nanswer: ", "{question}\nsaid: {draft}\nchecked: "),
}
_NUMBER = re.compile(r"(?<![\w.])-?(?:[0-9]+(?:,[0-9]{3}(?![0-9]))*(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3}(?!\w))?")
_DASHES = str.maketrans(dict.fromkeys("\N{MINUS SIGN}\N{EN DASH}\N{HYPHEN}\N{NON-BREAKING HYPHEN}", "-"))


class Scored(NamedTuple):
    """What an answer is worth in [0, 1], and how that came: "scored", "format", "refused", "raised" or "limit"."""

    score: float
    status: str


class ReasoningGym:
    """One generator of reasoning-gym with its settings. Its problems are numbered, and are a function of the number.

    Args:
      name: as reasoning-gym names it.
      settings: of the generator's config, without `seed` and `size`.
      seed, pool: of its problems, which are numbered from 0 to pool - 1.
      sandbox: `marl_llm.tools.Sandbox`, for scorers that execute; by default the process's own, asked for only then.

    Raises:
      GameError: the package is missing or of another version, there is no such generator, it is refused, or its settings are.
      SandboxError: its scorer executes answers, and this machine has no sandbox that is strong enough or cannot hold the package.
    """

    def __init__(self, name: str, settings: Mapping[str, Any], seed: int = 0, pool: int = 0, sandbox: Any = None):
        package = foreign_package("reasoning_gym", "reasoning-gym", VERSION, "rg")
        known = package.factory.DATASETS
        if name in REFUSED:
            raise GameError(f"config.game.dataset={name!r} of reasoning-gym is refused: {REFUSED[name]}")
        if name not in known:
            raise GameError(f"reasoning-gym {VERSION} has no generator {name!r}{meant(name, known)}")
        self.name, self.pool = name, pool or BLOCK_POOLS.get(name, POOL)
        self.settings = {**settings, "seed": seed, "size": self.pool}
        try:
            with seeded(seed):
                self._dataset = package.create_dataset(name, **self.settings)
        except (TypeError, ValueError, AssertionError) as error:
            raise GameError(f"config.game.settings of {name!r}: {type(error).__name__}: {error}") from error
        self._sandbox, self._verdicts, self._entries = sandbox, Verdicts(), {}
        if name in EXECUTING:
            PROFILES["reasoning_gym"].entries()
            self._sandbox = sandbox or default_sandbox()

    def entry(self, number: int) -> dict[str, Any]:
        """A problem: `question`, `answer` (None where the generator knows none) and what its scorer needs. A copy.

        Raises `IndexError` where the generator has no problem of that number.
        """
        with seeded(number):
            if number not in self._entries:
                if len(self._entries) >= KEPT:
                    self._entries.clear()
                self._entries[number] = self._dataset[number]
            return copy.deepcopy(self._entries[number])

    def score(self, answer: str, place: int) -> dict[str, Any]:
        """What the generator's scorer pays for an answer to problem `place`: `Scored` as a dictionary, never an exception."""
        return (self._before(answer) or self._in_process(answer, place))._asdict()

    async def score_in_sandbox(self, answer: str, place: int) -> ToolResult:
        """The same, scored in the sandbox. A failure of the sandbox is returned as such, and aborts the play."""
        early = self._before(answer)
        if early is None and self.name in FORMULA and not is_formula(answer):
            early = Scored(0.0, "refused")  # a text that runs could print a score of its own
        if early is None and self.name == "puzzle24" and not _uses(answer, self.entry(place)["metadata"]["numbers"]):
            early = Scored(0.0, "refused")  # the scorer does not look which numbers were used: one answer would be paid for every puzzle
        if early is not None:
            return success(early._asdict(), 0.0)
        return await self._verdicts.of(content_key(answer, str(place)), lambda: self._run(answer, place))

    def _before(self, answer: str) -> Scored | None:
        """The verdict on an answer that no scorer sees."""
        if not answer.strip():
            return Scored(0.0, "format")
        refused = len(answer) > ANSWER_CHARACTERS or (self.name in MODERATE and not is_moderate(answer))
        return Scored(0.0, "refused") if refused else None

    def _in_process(self, answer: str, place: int) -> Scored:
        entry = self.entry(place)
        try:
            with seeded(place):
                return _bounded(self._dataset.score_answer(answer, entry))
        except Exception:  # a foreign scorer's own fault, whatever it is: 0, and counted
            return Scored(0.0, "raised")

    async def _run(self, answer: str, place: int) -> ToolResult:
        job = {"dataset": self.name, "settings": self.settings, "answer": answer, "entry": self.entry(place)}
        job["literal"] = self.name in LITERAL
        run = await self._sandbox.arun(Submission(PROGRAM, json.dumps(job, default=str), "reasoning_gym", LIMITS))
        return run.map(_printed_score)


def _printed_score(program: Program) -> dict[str, Any]:
    """The score that the scorer's program printed on its last line."""
    if program.outcome != "ok":
        return Scored(0.0, "raised" if program.outcome == "error" else "limit")._asdict()
    return _bounded(read_json(program.stdout.strip().split("\n")[-1]).value)._asdict()


def _uses(answer: str, numbers: Sequence[Any]) -> bool:
    """Whether the numbers of a formula are these, each once."""
    return sorted(map(int, re.findall(r"\d+", answer))) == sorted(map(int, numbers))


def _bounded(value: Any) -> Scored:
    """A scorer's value within [0, 1]. One that is no finite number is counted like an exception."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return Scored(0.0, "raised")
    return Scored(min(1.0, max(0.0, float(value))), "scored")


def read_settings(text: str) -> dict[str, Any]:
    """`min_terms=2,operators=("+", "-")` as a dictionary. Raises `GameError` for a text of another form, and for `seed` and `size`."""
    try:
        call = ast.parse(f"dict({text})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(word.arg is None for word in call.keywords):
            raise ValueError("names with values are expected")
        settings = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise GameError(f"config.game.settings={text!r}: write it like min_terms=2,max_terms=3 ({error})") from error
    if own := [name for name in ("seed", "size") if name in settings]:
        raise GameError(f"config.game.settings: {own[0]!r} is set by config.game.{'problems_seed' if own[0] == 'seed' else 'pool'}")
    return settings


def problems_of(generator: ReasoningGym, characters: int) -> Tasks:
    """(split, first, count) -> tasks. A problem's split follows from the text of its question, so that no question is in two splits
    (law 12), although neighbouring seeds of reasoning-gym share problems. Questions of more than `characters` are left out."""

    def draw(split: str, number: int) -> Task:
        for attempt in range(DRAWS):
            digest = hashlib.sha256(f"{generator.name} {split} {number} {attempt}".encode()).digest()
            place = int.from_bytes(digest[:8], "big") % generator.pool
            entry = generator.entry(place)
            question = entry["question"].strip()
            if len(question) <= characters and split_of(question, SHARES) == split:
                target = entry["answer"] if isinstance(entry["answer"], str) else ""
                return Task(number, {"question": question}, {"target": target, "place": place}, split)
        raise GameError(
            f"reasoning_gym {generator.name!r}: {DRAWS} problems were drawn, and none of split {split!r} has a question of at most "
            f"{characters} characters; raise config.game.question_characters, or choose settings with more problems"
        )

    return drawn_tasks(draw, SHARES)


def last_number(text: str) -> str:
    """The last number that a text names, without commas; a dash behind a digit is no sign. Raises `FormatError` for a text without one.

    >>> last_number("12 and 30 make 1,042.")
    '1042'
    """
    numbers = _NUMBER.findall(text.translate(_DASHES))
    if not numbers:
        raise FormatError("a number is expected")
    return numbers[-1].replace(",", "")


def answer_parser(form: str, field: str) -> Parser:
    """The parser of one form: "tags", one pair of answer tags with nothing behind it; "number", the last number; else the response."""
    if form == "number":
        return lambda text: {field: last_number(text)}
    if form != "tags":
        return plain(field)

    def parse(text: str) -> dict[str, Any]:
        before, opened, rest = text.partition("<answer>")
        answer, closed, behind = rest.partition("</answer>")
        if not opened or not closed or behind.strip() or "<answer>" in answer or "</answer>" in before:
            raise FormatError("one pair of tags <answer>...</answer> is expected, at the end")
        if not answer.strip():
            raise FormatError("nothing stands between the tags")
        return {field: answer.strip()}

    return parse


def workflow_of(generator: ReasoningGym, agents: str, form: str, max_prompt: int, max_tokens: int) -> Workflow:
    """The team around a generator. All are paid the final score; in a pair the solver is paid its own too, and the verifier what it
    improved, both as local rewards. A response that breaks the format costs half a point."""
    first, second = PROMPTS[form]
    budget = dict(max_prompt=max_prompt, max_tokens=max_tokens)
    score = generator.score_in_sandbox if generator.name in EXECUTING else generator.score

    def scored(answer: str, writes: str) -> Any:
        return tool(score, ("score", "status"), name=writes, reads=(answer, "place"), timeout_s=60.0)

    solver = Role("solver", first, answer_parser(form, "draft"), {"draft": ""}, **budget)
    parts: list[Any] = [solver, scored("draft", "score_draft")]
    rewards = [broadcast(lambda path: path.fields["score"], name="score"), format_penalty(0.5)]
    if agents == "pair":
        verifier = Role("verifier", second, answer_parser(form, "answer"), {"answer": ""}, trim="draft", **budget)
        parts += [verifier, scored("answer", "score_answer")]
        rewards.append(absolute(lambda call, path: _scores(path)[0], ("solver",), name="own"))
        rewards.append(absolute(lambda call, path: _scores(path)[1] - _scores(path)[0], ("verifier",), name="improved"))
    metrics = {
        "score": lambda path: path.fields["score"],
        "solved": lambda path: float(path.fields["score"] >= 1.0),
        "scorer_raised": lambda path: _share(path, "raised"),
        "answer_refused": lambda path: _share(path, "refused"),
        "scorer_at_limit": lambda path: _share(path, "limit"),
    }
    if agents == "pair":
        metrics["draft_score"] = lambda path: _scores(path)[0]
    return Workflow(
        "reasoning_gym", sequence(*parts), inputs=("question",), hidden=("target", "place"), rewards=tuple(rewards), metrics=metrics
    )


def _scores(path: Trajectory) -> list[float]:
    """What the answers of a play were worth, in order."""
    return [event.writes["score"] for event in path.events if "score" in event.writes]


def _share(path: Trajectory, status: str) -> float:
    statuses = [event.writes["status"] for event in path.events if "status" in event.writes]
    return sum(value == status for value in statuses) / max(1, len(statuses))


def player(generator: ReasoningGym, form: str, slip: float) -> Callable[[ScriptTurn], str]:
    """A player of both roles that gives the generator's own answer, or with probability `slip` that of another problem."""

    def play(turn: ScriptTurn) -> str:
        answer = turn.fields["target"]
        if turn.random.random() < slip:
            answer = generator.entry(turn.random.randrange(generator.pool))["answer"]
        return answer if form != "tags" else f"<answer>{answer}</answer>"

    return play


def reasoning_gym(
    dataset: str = "chain_sum",
    settings: str = "",
    agents: str = "single",
    form: str = "tags",
    problems_seed: int = 0,
    pool: int = 0,
    question_characters: int = 4000,
    max_prompt: int = 5000,
    max_tokens: int = 2048,
    slip: float = 0.3,
) -> Environment:
    """Problems of one generator of reasoning-gym (extra `rg`), scored by the generator.

    Args:
      dataset: the generator's name.
      settings: of its config, like "min_terms=2,max_terms=3".
      agents: "single", or "pair": a verifier reads the solver's answer and gives the final one.
      form: "tags", <answer> tags at the end of a response, for chat models; "short", the response is the answer, for small ones that
        cannot think in words; "number", the last number of the response is the answer, for small ones that speak in sentences; or "plain",
        the response is the answer, for tiny ones, whose prompts have few words.
      problems_seed, pool: the problems are those of this seed with the indices 0 to pool - 1; pool 0: 100,000 (acre, word_ladder: 4,000).
      question_characters: problems with a longer question are left out.
      slip: how often the scripted player gives the answer of another problem.

    Raises:
      GameError: see `ReasoningGym`; also where the drawn problems are too long.
      SandboxError: see `ReasoningGym`.
    """
    check_word("config.game.agents", agents, ("single", "pair"), GameError)
    check_word("config.game.form", form, tuple(PROMPTS), GameError)
    generator = ReasoningGym(dataset, read_settings(settings), problems_seed, pool)
    tasks = problems_of(generator, question_characters)
    known = bool(tasks("train", 0, 1)[0].hidden["target"])  # a few generators know no answer; then there is no teacher
    teacher, random_player = (player(generator, form, chance) if known else None for chance in (slip, 1.0))
    team = workflow_of(generator, agents, form, max_prompt, max_tokens)
    return Environment(team, tasks, "score", byte_renderer(), teacher, random_player)
