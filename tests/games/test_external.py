"""Games of reasoning-gym and TextArena, on stand-ins with the packages' interfaces; `benchmarks.external_games` plays the packages."""

import asyncio
import dataclasses
import importlib.metadata
import io
import json
import random
import sys
import types

import numpy as np
import pytest
from debates import played, scores

from marl_llm.checking import check
from marl_llm.games import GameError, make_game
from marl_llm.games.external import guards, textarena
from marl_llm.games.external.reasoning_gym import EXECUTING, PROGRAM, REFUSED, SHARES, VERSION, ReasoningGym, answer_parser, read_settings
from marl_llm.tools.results import Failure, FailureKind
from marl_llm.tools.sandbox import PROFILES, Execution, Program, SandboxError
from marl_llm.workflows import FormatError
from marl_llm.workflows.samples import sample_table


@dataclasses.dataclass
class Settings:
    seed: int = 0
    size: int = 500
    most: int = 40

    def validate(self):
        assert self.most > 1, "most must be above 1"


class Sums:
    """`a + b`; `score_answer` compares texts."""

    def __init__(self, config):
        self.config = config

    def __getitem__(self, number):
        rng = random.Random(self.config.seed + number)
        a, b = rng.randrange(self.config.most), rng.randrange(self.config.most)
        return {"question": f"{a} + {b} =", "answer": str(a + b), "metadata": {"numbers": [a, b]}}

    def score_answer(self, answer, entry):
        entry["metadata"]["numbers"].append(answer)
        return float(answer == entry["answer"])


class Unseeded(Sums):
    """Draws from the process-wide generators, as `list_functions` and `pool_matrix` do."""

    def __getitem__(self, number):
        np.random.seed(3)  # noqa: NPY002
        return super().__getitem__(number) | {"question": f"number {random.random()}"}


class Raising(Sums):
    def score_answer(self, answer, entry):
        return {"nan": float("nan"), "text": "1"}[answer]


class NoAnswer(Sums):
    def __getitem__(self, number):
        return super().__getitem__(number) | {"answer": None}


class Race:
    """Two players draw steps from the process-wide generator, as games of TextArena do; `[raise]` is the game's own fault."""

    def reset(self, num_players, seed):
        random.seed(seed)
        self.state = types.SimpleNamespace(current_player_id=0, set_invalid_move=lambda reason: None)
        self.far, self.seen = [0] * num_players, f"goal {random.randrange(3, 6)}"
        self.goal = int(self.seen[-1])

    def get_observation(self):
        seen, self.seen = self.seen, ""
        return self.state.current_player_id, f"{seen}\n[GAME] you are at {self.far[self.state.current_player_id]}: say [run] or [rest]"

    def step(self, action):
        who = self.state.current_player_id
        if action == "[raise]":
            raise KeyError(action)
        if action == "[run]":
            self.far[who] += random.randint(1, 2)
        elif action != "[rest]":
            self.state.set_invalid_move("neither")
        self.state.current_player_id = 1 - who
        return self.far[who] >= self.goal, {}

    def close(self):
        ahead = 2 * (self.far[0] > self.far[1]) - 1
        return {0: ahead, 1: -5 * ahead}, {}


@pytest.fixture(autouse=True)
def package(monkeypatch):
    kinds = {"chain_sum": Sums, "list_functions": Unseeded, "raising": Raising, "boxnet": NoAnswer, "coin_flip": Raising}
    kinds |= dict.fromkeys((*EXECUTING, *REFUSED), Sums)
    module = types.ModuleType("reasoning_gym")
    module.factory = types.SimpleNamespace(DATASETS=kinds)

    def create_dataset(name, **settings):
        config = Settings(**settings)
        config.validate()
        return kinds[name](config)

    module.create_dataset = create_dataset
    version = importlib.metadata.version
    monkeypatch.setitem(sys.modules, "reasoning_gym", module)
    pinned = {"reasoning-gym": VERSION, "textarena": textarena.VERSION}
    monkeypatch.setattr(importlib.metadata, "version", lambda name: pinned.get(name) or version(name))
    arena = types.ModuleType("textarena")
    arena.make = lambda name: Race()
    monkeypatch.setitem(sys.modules, "textarena", arena)
    return module


def generator(name="chain_sum", **options):
    return ReasoningGym(name, {}, **options)


def test_a_missing_package_and_another_version_name_the_extra(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(GameError, match=r"needs the package reasoning-gym 0.1.25: pip install 'marl_llm\[rg\]'"):
        make_game("reasoning_gym")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.2.0")
    with pytest.raises(GameError, match=r"0.2.0 is installed, and version 0.1.25 .*\[rg\]"):
        make_game("reasoning_gym")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset": "game_of_life_halting"}, "is refused: its scorer pays 1 for any text"),
        ({"dataset": "composite"}, "is refused: it mixes other generators"),
        ({"dataset": "codeio"}, "is refused: it executes programs"),
        ({"dataset": "chain_sun"}, "no generator 'chain_sun'; did you mean 'chain_sum'"),
        ({"settings": "most=1"}, "most must be above 1"),
        ({"settings": "moist=4"}, "moist"),
        ({"settings": "most"}, "write it like min_terms=2"),
        ({"settings": "most=__import__('os')"}, "write it like min_terms=2"),
        ({"settings": "seed=4"}, "'seed' is set by config.game.problems_seed"),
        ({"agents": "pairs"}, "did you mean 'pair'"),
        ({"form": "xml"}, "not one of tags, short, number, plain"),
        ({"question_characters": 3}, "raise config.game.question_characters"),
    ],
)
def test_what_cannot_be_played_is_refused_with_a_reason(options, message):
    with pytest.raises(GameError, match=message):
        make_game("reasoning_gym", **options)


def test_another_seed_makes_other_problems():
    drawn = [[generator(seed=seed).entry(number)["question"] for number in range(5)] for seed in (0, 0, 1000)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_settings_are_values_and_nothing_that_runs():
    assert read_settings("") == {}
    assert read_settings('a=2,b=("+", "-"),c=[1, 2],d=True') == {"a": 2, "b": ("+", "-"), "c": [1, 2], "d": True}


def test_no_question_is_in_two_splits_and_a_task_is_the_same_at_every_call():
    with make_game("reasoning_gym", settings="most=12") as environment:
        drawn = {split: {task.fields["question"] for task in environment.tasks(split, 0, 60)} for split in SHARES}
        assert environment.tasks("test", 3, 2) == environment.tasks("test", 0, 8)[3:5]
    assert all(len(questions) > 5 for questions in drawn.values())
    assert sum(map(len, drawn.values())) == len(set().union(*drawn.values()))


def test_a_generator_that_draws_from_the_process_gives_the_same_problem_and_leaves_the_state_alone():
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    first = generator("list_functions").entry(7)
    random.seed(2)
    before, numpy = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    assert generator("list_functions").entry(7) == first
    assert random.getstate() == before
    np.random.seed(1)  # noqa: NPY002
    assert np.random.get_state()[1].tolist() == numpy  # noqa: NPY002


def test_a_scorer_that_raises_or_says_no_number_pays_nothing_and_is_counted():
    raising = generator("raising")
    for answer in ("else", "nan", "text"):
        assert raising.score(answer, 1) == {"score": 0.0, "status": "raised"}
    assert generator().score(" ", 1) == {"score": 0.0, "status": "format"}
    assert generator().score("9" * 5000, 1) == {"score": 0.0, "status": "refused"}


def test_a_scorer_cannot_change_the_problem_for_the_next_answer():
    one = generator()
    assert [one.score(one.entry(5)["answer"], 5)["score"] for _ in range(2)] == [1.0, 1.0]
    assert len(one.entry(5)["metadata"]["numbers"]) == 2


@pytest.mark.parametrize("answer", ["1e999999999", "1E+1_000_000_000", "2e-99999", "nan", "-Infinity", "1 e 99999"])
def test_numbers_that_never_end_are_refused_before_the_scorer_sees_them(answer):
    assert generator("coin_flip").score(answer, 1)["status"] == "refused"
    assert guards.is_moderate("0.123e-12 or 3/8")


@pytest.mark.parametrize(
    "text",
    ["__import__('os')", "().__class__", "open(1)", "print(1)", "x[0]", "'a'", "lambda: 1", "[1]", "a__b", "exit()", "sin(x=1)",
     "x if y else z", "9" * 40, "(" * 3000, "-" * 3900 + "1", "1 and 2", "f(x)(1)", "sin.real", "", "True", "1j", "a := 3", "\x00", "x.y"],
)  # fmt: skip
def test_an_answer_that_could_run_is_no_formula(text):
    assert not guards.is_formula(text)


@pytest.mark.parametrize("text", ["79*(55 - 7)", "43*x**8/5 + C", "-sin(2*x)/exp(x)", "sqrt(x) + log(Abs(x))", " 1 + 1 "])
def test_arithmetic_is_a_formula(text):
    assert guards.is_formula(text)


class Scripted:
    """A sandbox that notes what it is asked and answers from a list."""

    def __init__(self, *programs):
        self.asked, self.programs = [], list(programs)

    async def arun(self, request):
        self.asked.append(request)
        one = self.programs.pop(0)
        return Execution(None, one, 0.1) if isinstance(one, Failure) else Execution(one, None, 0.1)


def in_sandbox(name, sandbox, monkeypatch):
    monkeypatch.setattr(type(PROFILES["reasoning_gym"]), "entries", lambda self: [])
    return generator(name, sandbox=sandbox)


async def verdict(one, answer):
    return await one.score_in_sandbox(answer, 4)


def test_scorers_that_execute_run_in_the_sandbox_and_only_on_formulas(monkeypatch):
    failure = Failure(FailureKind.CRASH, "gone")
    sandbox = Scripted(Program(b"noise\n0.05", b"", 0), Program(b"", b"boom", 1), Program(b"", b"", None, timed_out=True), failure)
    one = in_sandbox("countdown", sandbox, monkeypatch)

    async def all_of_them():
        return [await verdict(one, answer) for answer in ("open(1)", "1+1", "1+2", "1+3", "1+4", "1+1")]

    refused, scored, raised, limit, lost, again = asyncio.run(all_of_them())
    assert [found.value and found.value["status"] for found in (refused, scored, raised, limit)] == ["refused", "scored", "raised", "limit"]
    assert scored.value["score"] == again.value["score"] == 0.05
    assert lost.failure == failure  # the machine's fault aborts the play and pays nobody
    assert [(request.code, request.profile) for request in sandbox.asked] == [(PROGRAM, "reasoning_gym")] * 4
    job = json.loads(sandbox.asked[0].stdin)
    assert (job["answer"], job["literal"], job["entry"]) == ("1+1", False, one.entry(4))


def test_an_answer_to_another_puzzle_is_not_paid(monkeypatch):
    one = in_sandbox("puzzle24", Scripted(Program(b"1.0", b"", 0)), monkeypatch)
    a, b = one.entry(4)["metadata"]["numbers"]
    assert asyncio.run(verdict(one, f"{a} + {b} * 2")).value == {"score": 0.0, "status": "refused"}
    assert asyncio.run(verdict(one, f"{b} * {a}")).value == {"score": 1.0, "status": "scored"}


class Evaluating(Sums):
    def score_answer(self, answer, entry):
        try:
            return float(eval(answer) == [1])
        except ValueError:
            return 0.25


@pytest.mark.parametrize(("answer", "printed"), [("[1]", "\n1.0\n"), ("print(1) or [1]", "\n0.25\n")])
def test_the_sandboxed_program_reads_literals_where_a_scorer_would_eval(answer, printed, package, monkeypatch, capsys):
    package.factory.DATASETS["n_queens"] = Evaluating
    job = {"dataset": "n_queens", "settings": {}, "answer": answer, "entry": {}, "literal": True}
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(job)))
    monkeypatch.setitem(globals(), "eval", eval)  # put back when the test ends
    exec(PROGRAM, {})
    assert capsys.readouterr().out == printed


def test_without_the_package_in_the_sandbox_such_a_generator_is_refused(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    monkeypatch.setitem(PROFILES, "reasoning_gym", dataclasses.replace(PROFILES["reasoning_gym"], name="reasoning_gym "))
    with pytest.raises(SandboxError, match=r"needs reasoning-gym: pip install 'marl_llm\[rg\]'"):
        generator("n_queens")


def test_the_answer_stands_in_one_pair_of_tags_at_the_end():
    parse = answer_parser("tags", "draft")
    assert parse("so 2 + 2 <answer> 4\n5 </answer>\n") == {"draft": "4\n5"}
    for text in ("4", "<answer>4", "<answer></answer>", "<answer>4</answer>.", "<answer><answer>4</answer>", "</answer><answer>4</answer>",
                 "<answer>4</answer><answer>5</answer>"):  # fmt: skip
        with pytest.raises(FormatError):
            parse(text)


@pytest.mark.parametrize(
    ("said", "read"),
    [
        ("3 + 4 = 7.", "7"), ("12 and 30 make 1,042", "1042"), ("10,20", "20"), ("it is -5", "-5"), ("9-5", "5"), ("x=-2.50!", "-2.50"),
        ("7 (I think) 1,0000", "0000"), ("**18**", "18"), ("18 apples in h2o", "18"),
        ("The answer is \u22125.", "-5"), ("it is \u20135", "-5"), ("x=\u20105", "-5"), ("3 - 8 = \u20115", "-5"), ("10\u22125", "5"),
        ("pages 3\u20135", "5"), ("about 1e5", "1e5"), ("-2.5E-3!", "-2.5E-3"), ("1e+999", "1e+999"), ("1e5000", "1"), ("2e3x", "2"),
        ("it is .5", ".5"), ("-.25.", "-.25"), ("3 eggs", "3"), ("3..5", "3"),
    ],
)  # fmt: skip
def test_the_last_number_of_a_sentence_is_the_answer(said, read):
    assert answer_parser("number", "draft")(said) == {"draft": read}


@pytest.mark.parametrize("said", ["", "seven", "h2o", "v1.2", "\N{FULLWIDTH DIGIT SEVEN}"])
def test_a_sentence_without_a_number_breaks_the_format(said):
    with pytest.raises(FormatError, match="a number is expected"):
        answer_parser("number", "draft")(said)


def test_a_generator_without_answers_has_no_teacher():
    with make_game("reasoning_gym", dataset="boxnet") as environment:
        assert (environment.script, environment.random_player) == (None, None)


def test_a_pair_passes_the_checks_of_games():
    names = ("secrets", "junk", "bounds")
    with make_game("reasoning_gym", slip=0.1, agents="pair", form="plain", max_tokens=8) as environment:
        findings = check(environment, names=names, tasks=4, plays=2, few=2)
    assert [finding for finding in findings if finding.status != "pass"] == []


@pytest.mark.parametrize(("draft", "answer"), [(1.0, 1.0), (1.0, 0.0), (0.0, 1.0), (0.0, 0.0)])
def test_a_solver_is_paid_its_own_answer_a_verifier_what_it_improved_and_both_the_end(draft, answer):
    with make_game("reasoning_gym", agents="pair", form="plain", max_tokens=8) as environment:
        right = {"solver": draft, "verifier": answer}

        def says(turn):
            return turn.fields["target"] if right[turn.role.name] else "none"

        rollout = played(environment.workflow, environment.tasks("train", 0, 2), says)
        paid = {row.call.role: dict(row.components) for row in sample_table(rollout, training=()).samples}
        assert paid["solver"] == {"score": answer, "format": 0.0, "own": draft}
        assert paid["verifier"] == {"score": answer, "format": 0.0, "improved": answer - draft}
        figures = {name: set(scores(rollout, name)) for name in ("score", "draft_score", "solved")}
        assert figures == {"score": {answer}, "draft_score": {draft}, "solved": {answer}}


# ---- TextArena


def test_a_game_that_was_not_read_is_refused_with_the_list():
    with pytest.raises(GameError, match="'KuhnPokr' is not a game of TextArena that is played here; did you mean 'KuhnPoker'"):
        make_game("textarena", game="KuhnPokr")
    with pytest.raises(GameError, match="moves=0 must be at least 1"):
        make_game("textarena", moves=0)


def test_a_position_follows_from_deal_and_moves_and_the_random_state_is_left_alone():
    random.seed(5)
    before, game = random.getstate(), textarena.TextArena("KuhnPoker")
    game.deal(7)
    first = game.step(7, (), "[run]")
    on = [game.step(7, ("[run]",), "[rest]"), game.step(7, ("[run]",), "[run]"), game.step(7, ("[run]",), "[rest]")]  # forks
    random.seed(6)
    assert on[0] == on[2] == textarena.TextArena("KuhnPoker").step(7, ("[run]",), "[rest]")
    assert (first["who"], on[1]["moves"], on[1]["over"]) == (1, ("[run]", "[run]"), False)
    random.seed(5)
    assert random.getstate() == before


def test_invalid_moves_are_counted_by_seat_and_a_game_that_raises_costs_its_mover():
    game = textarena.TextArena("KuhnPoker")
    game.deal(1)
    assert game.step(1, ("[rest]",), "jump")["invalid"] == (1,)
    assert game.step(1, ("jump", "jump"), "jump")["invalid"] == (0, 1, 0)
    ended = game.step(1, ("[rest]",), "[raise]")
    assert (ended["over"], ended["raised"], ended["paid"]) == (True, True, (0.0, -1.0))


def test_pay_of_a_seat_lies_between_minus_one_and_one():
    game, moves = textarena.TextArena("KuhnPoker"), []
    fields = game.deal(3)
    while not fields["over"]:
        fields = game.step(3, tuple(moves), "[run]" if fields["who"] == 0 else "[rest]")
        moves.append(fields["moves"][-1])
    assert fields["paid"] == (1.0, -1.0)


def test_each_seats_result_and_invalid_moves_are_its_own():
    """Seat 1 breaks the rules twice and loses; what seat 0 is paid and told is not what seat 1 is."""
    with make_game("textarena", max_tokens=16, max_prompt=256, moves=4) as environment:
        said = {"player_0": "[run]", "player_1": "nonsense"}
        rollout = played(environment.workflow, environment.tasks("train", 0, 4), lambda turn: said[turn.role.name], environment.renderer)
        for path in rollout.trajectories:
            first, second = path.fields["paid"]
            found = {name: metric(path) for name, metric in environment.workflow.metrics.items()}
            assert (found["result_player_0"], found["result_player_1"]) == (first, second)
            invalid = tuple(path.fields["invalid"])
            assert (found["invalid_player_0"], found["invalid_player_1"]) == (invalid.count(0), invalid.count(1))
            assert found["score"] == (first + 1) / 2
        rows = sample_table(rollout, training=()).samples
        ends = {(row.instance, row.call.role): row.components["result"] for row in rows}
        assert {ends[task, "player_0"] for task, _ in ends if (task, "player_0") in ends} != {0.0}
        assert all(ends[task, "player_1"] == -ends[task, "player_0"] for task, role in ends if role == "player_1")
    assert any(path.fields["invalid"] for path in rollout.trajectories)


def test_the_move_is_the_response_or_its_last_brackets():
    assert textarena.move_parser("plain")(" go [1] ") == {"move": "go [1]"}
    assert textarena.move_parser("brackets")("not [1], rather [2 3] .") == {"move": "[2 3]"}
    for form, text in (("plain", " "), ("brackets", "2"), ("plain", "9" * 1001)):
        with pytest.raises(FormatError):
            textarena.move_parser(form)(text)


def test_deals_of_two_splits_differ_and_seats_are_paid_their_own_result():
    names = ("forks", "secrets", "bounds")
    with make_game("textarena", max_tokens=16, max_prompt=256, moves=4) as environment:
        deals = {split: {task.hidden["deal"] for task in environment.tasks(split, 0, 50)} for split in SHARES}
        assert [finding for finding in check(environment, names=names, tasks=4, plays=2, few=2) if finding.status != "pass"] == []
    assert {split: {deal % 10 for deal in found} for split, found in deals.items()} == {
        split: set(textarena.SPLITS[split]) for split in SHARES
    }


@pytest.mark.parametrize("arg", [None, "spiral", "smoke", "chat"])
def test_every_variant_pays_each_seat_its_own_result(arg):
    """As the outcome of a play, the result of whoever moves last would be everyone's: seats would learn to lose."""
    from experiments.configs import textarena as file

    found = file.get_config(arg).recipe
    assert (found.name, found.rewards, found.returns) == ("spiral" if arg == "spiral" else "grpo", "mixed", "immediate")
