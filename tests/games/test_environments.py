"""Environments by name: equal tasks each time, splits that share nothing, scripts that play them, and files as they are published."""

import asyncio
import json
import re
import sys

import pytest

from marl_llm.games import GAMES, find_game, make_game
from marl_llm.games.coding.functions import AMBIGUOUS, program
from marl_llm.games.search.facts import NAME
from marl_llm.tools.retriever import RetrieverServer, build_bm25
from marl_llm.workflows import Assignment, Controller, Environment, Scripted
from marl_llm.workflows.metrics import rollout_metrics, team_metrics
from marl_llm.workflows.rows import DataError
from marl_llm.workflows.samples import sample_table

FACTS = ("fact_parallel", "fact_extract", "fact_iterative")
GENERATED = (*FACTS, "functions", "function_debate", "helper_functions", "sums", "sums_ensemble")
SPLITS = ("train", "validation", "test")
# what keeps a scripted player from being perfect
HABITS = ("noise", "ignore_advice", "withhold_advice", "random_relation", "misreading", "slip", "trivial", "keep")


def perfect(name, **options):
    """A generated world, small, whose script makes no mistakes."""
    known = find_game(name).options
    habits = {habit: type(known[habit].default)(0) for habit in HABITS if habit in known}
    habits |= {"lean": 1.0} if "lean" in known else {}  # always the same convention
    return make_game(name, **habits | ({"worlds": 1} if "worlds" in known else {}) | options)


def play(environment, tasks, player=None):
    """The tasks played by the script, or by another player, in every role."""
    assignment = Assignment(dict.fromkeys(environment.workflow.roles, "t"), {"t": Scripted(player or environment.script)})
    with Controller(environment.workflow, assignment, None, {} if environment.renderer is None else environment.renderer) as controller:
        return controller.play(tasks)


def content(task):
    return repr((sorted(task.fields.items()), sorted(task.hidden.items())))


# --- generated worlds ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GENERATED)
def test_tasks_are_the_same_at_every_call_and_no_split_has_one_of_another(name):
    with perfect(name) as environment, perfect(name) as again:
        found = {split: environment.tasks(split, 0, 40) for split in SPLITS}
        for split, tasks in found.items():
            assert [(task.number, task.split) for task in tasks] == [(n, split) for n in range(40)]
            for other in (environment.tasks(split, 30, 10), again.tasks(split, 30, 10)):  # a pure function of split and number
                assert [content(task) for task in other] == [content(task) for task in tasks[30:]]
        texts = {split: {task.fields["question" if name in FACTS else "problem"] for task in tasks} for split, tasks in found.items()}
        names = {split: {m.group() for text in group for m in NAME.finditer(text)} for split, group in texts.items()}
        for kind in (texts, names) if name in FACTS else (texts,):
            assert all(len(group) > 20 for group in kind.values())
            assert not kind["train"] & kind["validation"]
            assert not kind["train"] & kind["test"]
            assert not kind["validation"] & kind["test"]
        for split in ("dev", ""):
            with pytest.raises((ValueError, KeyError), match=split or "''"):
                environment.tasks(split, 0, 1)


@pytest.mark.parametrize("name", GENERATED)
def test_the_script_without_mistakes_scores_one_on_every_split(name):
    with perfect(name) as environment:
        tasks = [task for number, split in enumerate(SPLITS) for task in environment.tasks(split, 8 * number, 8)]
        rollout = play(environment, tasks)
        figures = rollout_metrics(rollout, sample_table(rollout, training=()))
        scores = team_metrics(rollout)[environment.headline]
    unclear = [sum(word in AMBIGUOUS.values() for word in str(task.fields.get("problem")).split()) for task in tasks]
    assert {score for score, number in zip(scores, unclear, strict=True) if number < 3} == {1.0}  # each takes a round of three
    assert figures["aborted_share"] == 0.0
    assert all(figures[f"role/{role}/well_formed"] == 1.0 for role in environment.workflow.roles)


@pytest.mark.parametrize("name", GENERATED)
def test_the_script_of_the_warm_up_leaves_something_to_learn(name):
    with make_game(name, **({"worlds": 1} if name in FACTS else {})) as environment:
        rollout = play(environment, environment.tasks("train", 0, 48))
        scores = team_metrics(rollout)[environment.headline]
    assert all(0.0 <= score <= 1.0 for score in scores)
    assert 0.05 < sum(scores) / len(scores) < 0.95


def test_a_blanked_field_is_gone_from_the_prompt():
    said = {}
    for hide_fields in ("", "planner.advice", "planner.advice, reflector.report"):
        with perfect("functions", hide_fields=hide_fields) as environment:
            tasks = environment.tasks("train", 0, 24)
            rollout = play(environment, [task for task in tasks if set(AMBIGUOUS.values()) & set(task.fields["problem"].split())])
        said[hide_fields] = {r: [call.prompt for way in rollout.trajectories for call in way.by(r)] for r in ("planner", "reflector")}
    assert any(" try " in prompt for prompt in said[""]["planner"])
    assert all(prompt.endswith("says none plan:") for prompt in said["planner.advice"]["planner"])
    assert all(" passed " in prompt for prompt in said["planner.advice"]["reflector"])
    assert all(prompt.endswith("none advice:") for prompt in said["planner.advice, reflector.report"]["reflector"])


# --- what cannot be is told ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("fact_paralel", {}, "unknown game 'fact_paralel'; did you mean 'fact_parallel'.*the games are plan_path.*problems"),
        ("fact_parallel", {"topk": 2}, r"fact_parallel has no option 'topk'; did you mean 'top_k'\? Its options are worlds, "),
        ("functions", {"zzzz": 2}, r"functions has no option 'zzzz'\. Its options are functions_seed, "),
        ("fact_extract", {"worlds": 0}, "worlds=0 and top_k=1 must be at least 1"),
        ("functions", {"hide_fields": "planer.advice"}, "hide_fields='planer.advice': there is no role 'planer'; the roles are planner,"),
        ("functions", {"hide_fields": "planner.report"}, "role 'planner' does not read 'report'; it reads problem, plan, advice"),
        ("functions", {"hide_fields": "planner"}, "role 'planner' does not read ''"),
        ("functions", {"rounds": 0}, "at_most=0|rounds=0"),
        ("problems", {"rounds": 0, "train": "{train}", "test": "{test}"}, "rounds=0 must be at least 1"),
        ("question_iterative", {"release": "mask"}, "release='mask' is not one of unitymas, m_ask; did you mean 'm_ask'"),
        ("question_extract", {"index": "x", "top_k": 0}, "top_k=0 must be at least 1"),
        ("question_parallel", {}, "index must name a retriever"),
        ("question_parallel", {"index": "http://127.0.0.1:1"}, "train and test must name parquet, jsonl or json files"),
        ("problems", {}, "train and test must name parquet, jsonl or json files"),
    ],
)
def test_a_wrong_name_or_option_is_told(tmp_path, name, options, message):
    files = {split: write(tmp_path / f"{split}.jsonl", deepcoder(range(6 * at, 6 * at + 6))) for at, split in enumerate(("train", "test"))}
    with pytest.raises(ValueError, match=message):
        make_game(name, **{key: x.format(**files) if isinstance(x, str) else x for key, x in options.items()})


# --- environments of published files ------------------------------------------------------------------------------------------------------

PEOPLE = ("Ada", "Bob", "Cleo", "Dora", "Emil", "Fay", "Gus", "Hal", "Ida", "Jon", "Kim", "Lou")
CITIES = ("Paris", "Rome", "Oslo", "Bern", "Riga", "Kiel", "Nice", "Lyon", "Bari", "Graz", "Linz", "Metz")
PAGES = [{"id": str(i), "contents": f'"{p}"\n{p} was born in {c}.'} for i, (p, c) in enumerate(zip(PEOPLE, CITIES, strict=True))]


def write(path, rows):
    """Rows as a parquet or a jsonl file; its name."""
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def search_r1(numbers, split="train"):
    """Rows with the columns of Search-R1's NQ and HotpotQA files, which M-ASK and UnityMAS-O read too."""
    return [
        {
            "id": f"{split}_{i}",
            "question": f"where was {PEOPLE[i].lower()} born?",
            "golden_answers": [CITIES[i], f"{CITIES[i]} city"],
            "data_source": "nq",
            "prompt": [{"content": "Answer the given question.", "role": "user"}],
            "ability": "fact-reasoning",
            "reward_model": {"ground_truth": {"target": [CITIES[i], f"{CITIES[i]} city"]}, "style": "rule"},
            "extra_info": {"index": i, "split": split},
        }
        for i in numbers
    ]


def verl(numbers, split="train"):
    """Rows whose answers stand in the reward model alone."""
    return [{name: row[name] for name in ("question", "reward_model", "extra_info")} for row in search_r1(numbers, split)]


def deepcoder(numbers):
    """Rows of DeepCoder's mix: tests are JSON text, of TACO's and of LiveCodeBench's form in turn."""
    rows = []
    for i in numbers:
        cases = [(str(x), str(x + i)) for x in range(5)]
        taco = {"inputs": [f"{a}\n" for a, _ in cases], "outputs": [f"{b}\n" for _, b in cases]}
        livecodebench = [{"input": a, "output": b, "testtype": "functional", "metadata": {"func_name": "add"}} for a, b in cases]
        starter = "class Solution:\n    def add(self, x: int) -> int:\n        "
        tests, starter = (livecodebench, starter) if i % 2 else (taco, "")
        rows.append({"problem": f"Add {i} to the number.", "solutions": ["?"], "tests": json.dumps(tests), "starter_code": starter})
    return rows


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("library") / "index"
    return build_bm25(PAGES, folder), str(folder)


def reader(turn):
    """Asks for the person of the question, and answers with the city of the page."""
    said = json.dumps(turn.fields.get("passages", "")) + json.dumps(turn.fields.get("evidences", "")) + turn.fields.get("knowledge", "")
    person = turn.fields["question"].split()[2]
    city = re.search(rf"{person.capitalize()} was born in (\w+)", said)
    city = city[1] if city else "nothing"
    fact = f"{person.capitalize()} was born in {city}"
    tagged = "knowledge" in turn.fields
    return {
        "decompose": json.dumps({"queries": [f"{person} born"]}),
        "evidence": json.dumps({"evidence": fact}),
        "answer": f"<answer>{city}</answer>" if tagged else json.dumps({"answer": city}),
        "plan": "<knowledge>nothing</knowledge><final_answer>unknown</final_answer>",
        "search": "<end>" if turn.turn > 1 else f"<sub_questions>{person} born</sub_questions>",
        "summary": f"<evidence>{fact}</evidence>",
        "update": f"<knowledge>{turn.fields.get('evidence', '')}</knowledge>",
    }[turn.role.name]


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
@pytest.mark.parametrize(
    ("name", "rows"), [("question_parallel", search_r1), ("question_extract", verl), ("question_iterative", search_r1)]
)
def test_questions_are_read_searched_and_answered(tmp_path, library, name, rows, kind):
    train, test = write(tmp_path / f"train.{kind}", rows(range(10))), write(tmp_path / f"test.{kind}", rows((10, 11), "test"))
    with make_game(name, train=train, test=test, index=library[1], top_k=2) as environment:
        assert (environment.headline, environment.renderer, environment.script) == ("f1", None, None)
        questions = {split: [task.fields["question"] for task in environment.tasks(split, 0, 20)] for split in SPLITS}
        assert {split: len(set(group)) for split, group in questions.items()} == {"train": 8, "validation": 2, "test": 2}
        assert len(set().union(*questions.values())) == 12
        assert questions["train"][:8] == questions["train"][8:16]  # from the start again
        with pytest.raises(ValueError, match="unknown split 'dev'; the splits are train, validation, test"):
            environment.tasks("dev", 0, 1)
        tasks = environment.tasks("train", 6, 3) + environment.tasks("test", 0, 2)
        assert [(task.number, task.split) for task in tasks] == [(6, "train"), (7, "train"), (8, "train"), (0, "test"), (1, "test")]
        assert tasks[3].fields["question"] == "where was kim born?"
        assert tasks[0].hidden["answers"] == ("Nice", "Nice city")
        rollout = play(environment, tasks, reader)
        found = [way.fields["passages" if name != "question_extract" else "evidences"] for way in rollout.trajectories]
        assert team_metrics(rollout)["f1"] == [1.0] * 5
        assert team_metrics(rollout)["em"] == [1.0] * 5
        assert "Nice" in str(found[0])


def test_questions_are_searched_through_a_running_server(tmp_path, library):
    train, test = write(tmp_path / "train.parquet", search_r1(range(5))), write(tmp_path / "test.jsonl", search_r1([11], "test"))
    options = dict(train=train, test=test, top_k=3)
    with RetrieverServer(library[0]) as server, make_game("question_parallel", index=server.url, **options) as environment:
        rollout = play(environment, environment.tasks("test", 0, 1), reader)
    assert team_metrics(rollout)["f1"] == [1.0]
    assert len(rollout.trajectories[0].fields["passages"]) == 3


def test_a_world_lets_go_of_its_retriever(tmp_path, monkeypatch):
    """The client has threads."""
    from marl_llm.tools import retriever

    closed = []
    monkeypatch.setattr(retriever.RetrieverClient, "close", lambda self: closed.append(self.url))
    train, test = write(tmp_path / "train.jsonl", search_r1(range(5))), write(tmp_path / "test.jsonl", search_r1([11], "test"))
    with make_game("question_extract", train=train, test=test, index="http://127.0.0.1:9"):
        assert closed == []
    assert closed == ["http://127.0.0.1:9/retrieve"]


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_problems_are_read_and_judged_in_the_sandbox(tmp_path, kind):
    train, test = write(tmp_path / f"train.{kind}", deepcoder(range(10))), write(tmp_path / f"test.{kind}", deepcoder((10, 11)))

    def coder(turn):
        n = int(turn.fields["problem"].split()[1]) + (turn.fields["problem"].startswith("Add 2 ") and turn.turn == 0)
        calls = f"class Solution:\n    def add(self, x):\n        return x + {n}"
        code = calls if "Solution" in turn.fields["interface"] else f"print(int(input()) + {n})"
        return {"planner": "Add.", "coder": f"```python\n{code}\n```", "reflector": "Count again."}[turn.role.name]

    with make_game("problems", train=train, test=test, rounds=2) as environment:
        tasks = environment.tasks("train", 2, 2) + environment.tasks("test", 0, 2)
        assert [task.fields["problem"] for task in tasks] == [f"Add {n} to the number." for n in (2, 3, 10, 11)]
        assert all(len(task.hidden["tests"]) == 2 for task in tasks)
        rollout = play(environment, tasks, coder)
    assert team_metrics(rollout)["all_passed"] == [1.0] * 4
    assert team_metrics(rollout)["rounds"] == [2.0, 1.0, 1.0, 1.0]  # the first program of the first problem was wrong


def test_a_split_shares_no_question_with_another(tmp_path, library):
    index = library[1]
    test = write(tmp_path / "test.jsonl", search_r1((4, 11), "test"))
    with pytest.raises(DataError, match=r"question 'where was emil born\?' is row 4 of train and row 0 of test: remove it"):
        make_game("question_parallel", train=write(tmp_path / "a.parquet", search_r1(range(10))), test=test, index=index)
    problems = write(tmp_path / "b.jsonl", deepcoder(range(6))), write(tmp_path / "c.jsonl", deepcoder((7, 4)))
    with pytest.raises(DataError, match=r"problem 'Add 4 to the number\.' is row 4 of train and row 1 of test"):
        make_game("problems", train=problems[0], test=problems[1])
    twice = write(tmp_path / "d.jsonl", search_r1((0, 1, 2, 3, 0, 5, 6, 7, 8, 0)))  # the last two rows are for validation
    with make_game("question_parallel", train=twice, test=write(tmp_path / "e.jsonl", search_r1([11])), index=index) as environment:
        train, validation = ({task.fields["question"] for task in environment.tasks(split, 0, 20)} for split in ("train", "validation"))
        assert len(train) == 6
        assert validation == {"where was ada born?", "where was ida born?"}
        assert not train & validation


def test_missing_files_and_indices_are_told(tmp_path, library):
    good = write(tmp_path / "train.jsonl", search_r1(range(6))), write(tmp_path / "test.jsonl", search_r1([11], "test"))
    empty, few = write(tmp_path / "empty.jsonl", []), write(tmp_path / "few.jsonl", search_r1((6, 7)))
    index = library[1]
    for train, test, where, kind, message in (
        (str(tmp_path / "no.parquet"), good[1], index, OSError, "no.parquet"),
        (good[0], str(tmp_path / "no.jsonl"), index, OSError, "no.jsonl"),
        (good[0], str(tmp_path / "x.csv"), index, DataError, "unknown kind of file '.csv'"),
        (empty, good[1], index, DataError, "empty.jsonl has 0 usable rows"),
        (few, good[1], index, DataError, "few.jsonl has 2 usable rows and .*; at least 5"),
        (good[0], empty, index, DataError, "empty.jsonl 0; at least 5 and 1"),
        (*good, str(tmp_path / "nowhere"), (ValueError, OSError), "nowhere"),
        (*good, str(tmp_path), (ValueError, OSError), "index"),
    ):
        with pytest.raises(kind, match=message):
            make_game("question_parallel", train=train, test=test, index=where)


def test_every_world_says_its_options_and_none_is_left_out_above():
    files = {"question_parallel", "question_extract", "question_iterative", "problems", "code_debate", "maths_debate", "maths_ensemble"}
    files |= {"function_problems", "notes", "writing", "tiny_pipeline", "data_pipeline", "chain_maths", "math_chat"}
    files |= {"reasoning_gym", "textarena", "openenv", "library_questions", "one_line_debate"}  # tests/games/test_external.py and their own
    workflows = {*GENERATED, *files, "plan_path_text", "plan_path_programs", "sokoban_text", "sudoku_text"}
    assert set(GAMES) == {"plan_path", "joint_letter", "matrix", "hints", "sokoban", "sudoku", *workflows}
    assert all(p.default is not p.empty for name in GAMES for p in find_game(name).options.values())
    assert all(find_game(name).thing.__doc__ for name in workflows)
    with perfect("functions") as environment:
        assert isinstance(environment, Environment)
        task = environment.tasks("train", 0, 1)[0]
        (verify,) = [node.function for node in environment.workflow.nodes.values() if getattr(node, "name", "") == "verify"]
        judged = asyncio.run(verify(program(task.hidden["plan_gold"]), task.hidden["function"], task.hidden["tests"]))
        assert judged.outcome()["pass_rate"] == 1.0


def test_a_library_that_is_missing_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(ValueError, match=r"fact_parallel needs the library 'bm25s': pip install 'marl_llm\[tools\]'"):
        make_game("fact_parallel", worlds=1)
