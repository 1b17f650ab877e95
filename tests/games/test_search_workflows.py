"""Searching for answers: the small world is honest, its teacher perfect, the rewards are the paper's and resist gaming, data loads."""

import asyncio
import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marl_llm.games.search import (
    M_ASK,
    M_ASK_MODELS,
    UNITYMAS,
    FactBase,
    FactWorld,
    MAskOptions,
    check_disjoint,
    fact_player,
    fact_renderer,
    fact_tokenizer,
    iterative_search,
    load_questions,
    m_ask_roles,
    mini_iterative_search,
    mini_parallel_retrieval,
    mini_retrieve_extract_answer,
    name_split,
    parallel_retrieval,
    retrieve_extract_answer,
    retrieve_with,
)
from marl_llm.games.search.data import accepted_answers
from marl_llm.games.search.facts import KINDS, NAME, joined
from marl_llm.games.search.m_ask import read_search
from marl_llm.games.search.mini import read_queries
from marl_llm.sampling.requests import Completion
from marl_llm.text import ByteTokenizer
from marl_llm.tools.results import FailureKind, failed, success
from marl_llm.tools.retriever import BM25Index, Hit
from marl_llm.workflows import Assignment, Controller, FormatError, PlainText, Scripted, Task, separate, to_mermaid
from marl_llm.workflows.metrics import rollout_metrics, team_metrics
from marl_llm.workflows.rewards import earned
from marl_llm.workflows.rows import DataError, RowRefused
from marl_llm.workflows.samples import sample_table

TOKENIZER = ByteTokenizer(specials=("<eos>",), stops=("<eos>",))
SPEECH = PlainText(TOKENIZER, TOKENIZER.stop_ids)
TEAMS = (mini_parallel_retrieval, mini_retrieve_extract_answer, mini_iterative_search)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    world = FactWorld("test", 3)
    return world, world.build_index(tmp_path_factory.mktemp("facts") / "index")


def retrieve_pages(retriever, top_k=1):
    """The retrieval tool over one world's index."""
    async def retrieve(query):
        found = await retriever.asearch([joined(query)], top_k, 30.0)
        return found.map(lambda hits: tuple(hit.document["page"] for hit in hits[0]))

    return retrieve


def scripted(team, player):
    roles = dict.fromkeys(team.roles, "teacher")
    return Controller(team, Assignment(roles, {"teacher": Scripted(player)}), None, fact_renderer())


@pytest.mark.parametrize("build", TEAMS)
def test_the_teacher_without_noise_is_perfect_and_speaks_the_vocabulary(build, world):
    facts, index = world
    with scripted(build(retrieve_pages(index)), fact_player()) as controller:
        rollout = controller.play([facts.task(n) for n in range(60)])
    assert set(team_metrics(rollout)["f1"]) == set(team_metrics(rollout)["em"]) == {1.0}
    table = sample_table(rollout, training=())
    figures = rollout_metrics(rollout, table)
    for role in rollout.workflow.roles.values():
        assert figures[f"role/{role.name}/well_formed"] == 1.0
        calls = [call for way in rollout.trajectories for call in way.by(role.name)]
        assert max(call.tokens.size for call in calls) <= role.max_tokens
        assert not any(call.trimmed for call in calls)
    unknown = 1
    for prompt, response in table.demonstrations():
        assert unknown not in prompt
        assert unknown not in response
    assert len(table.demonstrations()) == len(table)


def test_every_kind_of_question_is_asked_and_its_gold_queries_find_it(world):
    facts, index = world
    tasks = [facts.task(n) for n in range(300)]
    assert {task.hidden["kind"] for task in tasks} == set(KINDS)
    answers = [task.hidden["answers"][0] for task in tasks if task.hidden["kind"] == "same"]
    assert 0.25 < answers.count("yes") / len(answers) < 0.75
    retrieve = retrieve_pages(index)

    async def found(task):
        return " ".join([page for query in task.hidden["queries_gold"] for page in (await retrieve(query)).outcome()])

    for task in tasks:
        if task.hidden["answers"][0] not in ("yes", "no"):
            assert task.hidden["answers"][0] in asyncio.run(found(task))


def test_the_tool_over_many_worlds_answers_like_each_ones_index_and_remembers_no_failure(tmp_path, monkeypatch):
    base = FactBase(worlds=2, top_k=2, folder=tmp_path)
    worlds = {one.name: BM25Index(tmp_path / one.name) for group in base.worlds.values() for one in group}
    tasks = [task for split in base.worlds for task in base.tasks(split, 0, 8)]
    asked = [(query, world) for task in tasks for query in task.hidden["queries_gold"] for world in worlds]

    def answer(query, world):
        return asyncio.run(base.retrieve(query, world))

    broken = failed(FailureKind.DEADLINE, "late", 1.0)
    with monkeypatch.context() as patch:
        patch.setattr(BM25Index, "search", lambda *asked: broken)
        assert answer(*asked[0]) is broken
    monkeypatch.setattr("marl_llm.games.search.facts.REMEMBERED", 5)
    for query, world in 2 * asked:
        assert answer(query, world).outcome() == asyncio.run(retrieve_pages(worlds[world], 2)(query)).outcome()
    with monkeypatch.context() as patch:  # the latest are there without a search
        patch.setattr(BM25Index, "search", lambda *asked: broken)
        assert answer(*asked[-1]).ok
    base.close()


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_no_name_and_no_fact_of_a_split_is_in_another(seed, other):
    names = {}
    for split, s in (("train", seed), ("validation", other), ("test", other)):
        world = FactWorld(split, s)
        names[split] = {m.group() for text in world.pages for m in NAME.finditer(text)}
        assert names[split]
        assert all(name_split(name) == split for name in names[split])
        for n in range(5):
            assert all(name_split(m.group()) == split for m in NAME.finditer(world.task(n).fields["question"]))
    assert not names["train"] & names["test"]
    assert not names["train"] & names["validation"]
    assert not names["validation"] & names["test"]


def test_all_pieces_of_test_names_occur_in_training():
    train, test = ({w for page in FactWorld(split, 0).pages for w in page.split() if w[0] in "ab"} for split in ("train", "test"))
    assert test <= train


def test_another_seed_deals_the_facts_anew():
    (films, _), (others, _) = FactWorld("train", 0).facts, FactWorld("train", 1).facts
    known = {film.name: film.director for film in films}
    assert np.mean([known.get(film.name) == film.director for film in others]) < 0.1
    assert FactWorld("train", 5).pages == FactWorld("train", 5).pages
    with pytest.raises(ValueError, match="unknown split 'dev'"):
        FactWorld("dev", 0)


def test_questions_do_not_name_the_relation_that_pages_use(world):
    for n in range(100):
        task = world[0].task(n)
        relations = {query.split()[-1] for query in task.hidden["queries_gold"]}
        assert not relations & set(task.fields["question"].split())
    assert fact_tokenizer().vocab_size < 260


def test_a_random_relation_leaves_something_to_learn(world):
    facts, index = world
    with scripted(mini_parallel_retrieval(retrieve_pages(index)), fact_player(noise=0.2, random_relation=True)) as controller:
        rollout = controller.play([facts.task(n) for n in range(80)])
    assert 0.2 < np.mean(team_metrics(rollout)["f1"]) < 0.6  # what the wrong page does not tell, the answerer does not say
    shares = rollout_metrics(rollout, sample_table(rollout, training=()))
    assert 0.6 < shares["role/decompose/well_formed"] < 0.95


@pytest.mark.parametrize(
    "text", ["", "q a1 b2", "a1 b2 born", "q a1 b2 hometown", "q a1 b2 born ; q a1 b2 born", "q b1 a2 born", "q a1 b2 born ;"]
)
def test_queries_out_of_form(text):
    with pytest.raises(FormatError):
        read_queries(text)


# ---- the full-size teams, with a model that says what a test wants


class Library:
    """A retriever of two passages per query."""

    async def asearch(self, queries, topk=5, deadline_s=30.0):
        return success([[Hit({"id": str(i), "contents": f"{query} fact {i}"}, 1.0) for i in range(topk)] for query in queries], 0.0)


class Plays:
    """A model for each role: text by the role that its prompt belongs to, then the turn."""

    def __init__(self, workflow, lines):
        self.agents, self.lines, self.said = list(workflow.roles), lines, {}

    async def generate(self, request):
        role = self.agents[request.seed[2]]
        line = self.lines[role]
        count = self.said[role] = self.said.get(role, -1) + 1
        text = line if isinstance(line, str) else line[min(count, len(line) - 1)]
        tokens = np.asarray([*TOKENIZER.encode(text), TOKENIZER.eos_id], np.int32)
        return Completion(tokens, -np.ones(tokens.size), -np.ones(tokens.size), np.ones(tokens.size), "stop", 0)


def play(team, lines, answers=("Paris",)):
    with Controller(team, separate(team), Plays(team, lines), SPEECH) as controller:
        (way,) = controller.play([Task(0, {"question": "where?"}, {"answers": answers})]).trajectories
    paid = earned(team, way)
    return way, [(call.node, call.turn, dict(paid[call.id].components)) for call in way.calls]


LIBRARY = retrieve_with(Library(), 2)


def test_a_pays_everyone_the_answer_and_each_its_own_format():
    team = parallel_retrieval(LIBRARY)
    way, paid = play(team, {"decompose": '{"queries": ["x", "y"]}', "answer": '{"answer": "in Paris"}'})
    assert paid == [("decompose", 0, {"f1": 2 / 3, "format": 0.0}), ("answer", 0, {"f1": 2 / 3, "format": 0.0})]
    assert way.fields["passages"] == ("x fact 0", "x fact 1", "y fact 0", "y fact 1")
    assert "[4] y fact 1" in way.calls[1].prompt
    way, paid = play(team, {"decompose": "Paris", "answer": '{"answer": "Paris"}'})
    assert paid == [("decompose", 0, {"f1": 1.0, "format": -1.0}), ("answer", 0, {"f1": 1.0, "format": 0.0})]
    assert way.fields["passages"] == ()


def test_b_pays_every_evidence_call():
    lines = {
        "decompose": '{"queries": ["x", "y", "z", "w"]}',
        "evidence": ['{"evidence": "it is Paris"}', "?"],
        "answer": '{"answer": "Paris"}',
    }
    way, paid = play(retrieve_extract_answer(LIBRARY), lines)
    assert [(node, components["format"]) for node, _, components in paid] == [
        ("decompose", 0.0), ("evidence", 0.0), ("evidence", -1.0), ("evidence", -1.0), ("answer", 0.0),
    ]  # fmt: skip
    assert {components["f1"] for *_, components in paid} == {1.0}
    assert way.fields["evidences"] == ("it is Paris", "", "")


SEARCHES = "<sub_questions>x\ny</sub_questions>"
M_LINES = {
    "plan": "<knowledge>?</knowledge><final_answer>Paris France</final_answer>",
    "search": [SEARCHES, "<end>"],
    "summary": "<evidence>e</evidence>",
    "update": "<knowledge>k</knowledge>",
    "answer": ["<answer>Lyon</answer>", "<answer>Paris</answer>"],
}


def test_c_pays_absolute_scores_to_plan_and_answer_and_gains_to_the_loop():
    way, paid = play(iterative_search(LIBRARY), M_LINES)
    assert paid == [
        ("plan", 0, {"f1": 2 / 3, "format": 0.0}),
        ("answer_0", 0, {"f1": 0.0, "format": 0.0}),
        ("search", 1, {"f1_gain": 1.0, "format": 0.0}),
        ("summary", 1, {"f1_gain": 1.0, "format": 0.0}),
        ("update", 1, {"f1_gain": 1.0, "format": 0.0}),
        ("answer", 1, {"f1": 1.0, "format": 0.0}),
        ("search", 2, {"f1_gain": 0.0, "format": 0.0}),
    ]
    assert way.fields["answer"] == "Paris"
    assert len(way.fields["passages"]) == 4


def test_c_of_the_other_release_measures_against_the_plans_answer():
    lines = M_LINES | {"answer": "<answer>Paris</answer>"}
    way, paid = play(iterative_search(LIBRARY, options=M_ASK), lines)
    assert [(node, turn) for node, turn, _ in paid] == [
        ("plan", 0), ("search", 1), ("summary", 1), ("update", 1), ("answer", 1), ("search", 2),
    ]  # fmt: skip
    assert paid[1][2]["f1_gain"] == pytest.approx(1 / 3)
    assert "format" not in paid[-1][2]
    assert (UNITYMAS.max_turns, M_ASK.max_turns) == (3, 5)


def test_the_releases_score_yes_and_no_apart():
    lines = M_LINES | {"plan": M_LINES["plan"].replace("Paris France", "yes and no")}
    assert play(iterative_search(LIBRARY), lines, ("yes",))[1][0][2]["f1"] == pytest.approx(0.5)
    assert play(iterative_search(LIBRARY, options=M_ASK), lines, ("yes",))[1][0][2]["f1"] == 0.0


def test_an_end_with_chatter_is_illegal_and_punished_where_the_release_does():
    lines = M_LINES | {"search": "I am done. <end>"}
    for options, penalty in ((UNITYMAS, -1.0), (MAskOptions(penalise_end_format=False), None)):
        way, paid = play(iterative_search(LIBRARY, options=options), lines)
        assert [call.node for call in way.calls][-1] == "search"
        assert paid[-1][2].get("format") == penalty
        assert paid[-1][2]["f1_gain"] == 0.0


def test_ending_at_once_keeps_the_first_answer_and_pays_the_loop_nothing():
    team = iterative_search(LIBRARY, options=M_ASK)
    way, paid = play(team, M_LINES | {"search": "<end>"})
    assert [node for node, *_ in paid] == ["plan", "search"]
    assert team.metrics["f1"](way) == pytest.approx(2 / 3)


def test_the_loop_cannot_be_paid_for_spoiling_and_mending():
    lines = M_LINES | {"search": SEARCHES, "answer": [f"<answer>{a}</answer>" for a in ("Paris", "x", "Paris", "Paris")]}
    _, paid = play(iterative_search(LIBRARY), lines)
    gains = [components["f1_gain"] for node, _, components in paid if node == "summary"]
    assert gains == [-1.0, 1.0, 0.0]
    assert sum(gains) == 0.0


@pytest.mark.parametrize(
    "text",
    [
        "<sub_questions></sub_questions>",
        "<sub_questions>a\na</sub_questions>",
        "<sub_questions>" + "\n".join("abcdef") + "</sub_questions>",
        "<sub_questions>a</sub_questions> so",
        "a",
    ],
)
def test_searches_out_of_form(text):
    with pytest.raises(FormatError):
        read_search(text)


def test_long_evidence_and_wrong_order_are_illegal():
    roles = m_ask_roles()
    assert roles["summary"].read(f"<evidence>{'word ' * 76}</evidence>")[1] is not None
    assert roles["summary"].read(f"<evidence>{'word ' * 75}</evidence>")[1] is None
    assert roles["plan"].read("<final_answer>x</final_answer><knowledge>y</knowledge>")[1] is not None


@pytest.mark.parametrize("answer", ["Paris " * 20, "Paris Lyon Nice Brest Lille", "x fact 0 x fact 1 Paris", ""])
def test_dumps_repetitions_and_silence_earn_less_than_the_answer(answer):
    _, paid = play(parallel_retrieval(LIBRARY), {"decompose": '{"queries": ["x"]}', "answer": json.dumps({"answer": answer})})
    honest = play(parallel_retrieval(LIBRARY), {"decompose": '{"queries": ["x"]}', "answer": '{"answer": "Paris"}'})[1]
    assert sum(paid[1][2].values()) < 0.5 < sum(honest[1][2].values())


def test_no_prompt_holds_the_gold_answer():
    for team in (parallel_retrieval(LIBRARY), retrieve_extract_answer(LIBRARY), iterative_search(LIBRARY)):
        assert not any("answers" in role.reads for role in team.roles.values())
        assert re.match("flowchart", to_mermaid(team, M_ASK_MODELS))


# ---- data

ROWS = [
    {"question": "who?", "golden_answers": ["Ada", "Ada Lovelace", "Ada"]},
    {"query": "where?", "answer": "Paris"},
    {"problem": "when?", "reward_model": {"ground_truth": {"target": ["1815"]}, "style": "rule"}},
    {"question": "why?", "ground_truth": "because"},
]
GOLD = [("Ada", "Ada Lovelace"), ("Paris",), ("1815",), ("because",)]


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet"])
def test_the_schemas_of_the_published_files_load(tmp_path, kind):
    path = tmp_path / f"train.{kind}"
    if kind == "parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS, schema=None), path)
        rows = ROWS[:1]  # a table has the columns of its first row
    elif kind == "json":
        path.write_text(json.dumps(ROWS))
        rows = ROWS
    else:
        path.write_text("\n".join(map(json.dumps, ROWS)) + "\n\n")
        rows = ROWS
    if kind == "parquet":
        assert load_questions(path, "train", limit=1)[0].hidden["answers"] == GOLD[0]
        return
    tasks = load_questions(path, "train")
    assert [task.hidden["answers"] for task in tasks] == GOLD
    assert [(task.number, task.split) for task in tasks] == [(i, "train") for i in range(len(rows))]
    assert len(load_questions(path, "train", limit=2)) == 2


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "who?"}, "row 0: no question.*the row has text"),
        ({"question": "who?"}, "row 0: no answer"),
        ({"question": "who?", "answer": []}, "row 0: no answer"),
        ({"question": "who?", "answer": ["the"]}, "'the' has no word left"),
        ({"question": "who?", "answer": [None, float("nan")]}, "row 0: no answer"),
        ({"question": "who?", "answers": [["Paris", "Lyon"]]}, "row 0: an answer of an unknown form: answers holds a list"),
        ({"question": "who?", "golden_answers": ["yes", True]}, "row 0: an answer of an unknown form: golden_answers holds a bool"),
        ({"question": "who?", "golden_answers": [{"text": "Paris"}]}, "row 0: an answer of an unknown form: golden_answers holds a dict"),
    ],
)
def test_rows_that_cannot_be_used_are_named(tmp_path, row, message):
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps(row))
    with pytest.raises(DataError, match=message):
        load_questions(path, "train")


def test_a_missing_answer_is_no_accepted_answer():
    assert accepted_answers({"golden_answers": [None, "Paris", float("nan"), 1945]}) == ("Paris", "1945")
    assert accepted_answers({"golden_answers": [None], "answers": ["Paris"]}) == ("Paris",)
    with pytest.raises(RowRefused, match="no answer"):
        accepted_answers({"golden_answers": b"x"})


def test_files_that_cannot_be_read_are_named(tmp_path):
    (tmp_path / "x.jsonl").write_text("{")
    (tmp_path / "x.csv").write_text("a")
    (tmp_path / "y.json").write_text('{"a": 1}')
    for name, message in (("x.jsonl", "not JSON"), ("x.csv", "unknown kind of file '.csv'"), ("y.json", "expected a list of objects")):
        with pytest.raises(DataError, match=message):
            load_questions(tmp_path / name, "train")


def test_a_question_of_both_splits_is_found():
    train, test = [Task(4, {"question": "Who is the Ada?"})], [Task(7, {"question": "who is Ada"}, split="test")]
    with pytest.raises(DataError, match="row 4 of train and row 7 of test"):
        check_disjoint(train, test)
    check_disjoint(train, [Task(7, {"question": "who is Bob"})])
