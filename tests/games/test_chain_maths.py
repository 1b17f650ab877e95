"""The miniature of MathChat: its language, its splits by the order of operations, its teacher, and what its rubric pays."""

import dataclasses
import itertools

import pytest
from debates import pay, played, scores
from hypothesis import given, settings
from hypothesis import strategies as st

from marl_llm.coaching.small import views_of
from marl_llm.evaluation import Evaluation, Outcome, clustered
from marl_llm.games import make_game
from marl_llm.games.maths import (
    ChainTools,
    chain_better,
    chain_brief,
    chain_contribution,
    chain_player,
    chain_renderer,
    chain_rubric,
    chain_task,
    math_chat,
)
from marl_llm.games.maths.chain import (
    BY_SIGN,
    FILLER,
    HIDDEN,
    OPERATIONS,
    Chain,
    chain_answer,
    chain_hand_over,
    chain_metrics,
    chain_roles,
    chain_tokenizer,
    filler_of,
    orders,
    read_executor,
    read_problem,
    read_solver,
    read_verifier,
)
from marl_llm.games.maths.chain_coach import _named, _replayed
from marl_llm.tools.results import FailureKind, failed, success
from marl_llm.workflows import ActionView, FormatError
from marl_llm.workflows.samples import sample_table
from marl_llm.workflows.views import ViewMaker

SPLITS = ("train", "validation", "test")


class Quick(ChainTools):
    """Without processes: programs of these tests only, which the parser has made."""

    async def run(self, code):
        names = {"print": lambda value: names.setdefault("printed", str(value))}
        exec(code, names)
        return success({"output": names["printed"], "printed": names["printed"], "ran": "ok"}, 0.0)


def team(information="full", turns=2, tools=None):
    roles = chain_roles(information, turns)
    return math_chat(
        tools or Quick(), roles, information, turns, hidden=HIDDEN, hand_over=chain_hand_over, answered=chain_answer,
        metrics=chain_metrics(),
    )  # fmt: skip


def tasks(count, split="test"):
    return [chain_task(split, 0, number) for number in range(count)]


def play(script, count=4, **options):
    return played(team(**options), tasks(count), script, chain_renderer())


HONEST = chain_player()


@pytest.mark.parametrize("information", ["full", "partial"])
def test_an_honest_team_runs_a_program_each_time_and_is_right(information):
    rollout = play(HONEST, 20, information=information)
    for name in ("correct", "solver_correct", "executor_correct", "tool_plays", "expression"):
        assert scores(rollout, name) == [1.0] * 20
    assert set(scores(rollout, "executor_actions")) == {2.0}
    assert set(scores(rollout, "tool_share")) == {0.5}
    assert scores(rollout, "filler") == scores(rollout, "lost_by_executor") == scores(rollout, "lost_by_verifier") == [0.0] * 20
    assert set(pay(rollout).values()) == {20.0, 40.0}


@pytest.mark.parametrize("information", ["full", "partial"])
def test_no_words_of_the_world_exceed_the_roles_budgets(information):
    teacher = make_game("chain_maths").script
    rollout = played(team(information), tasks(60, "train"), teacher, chain_renderer())
    for row in sample_table(rollout, training=()).samples:
        role = rollout.workflow.roles[row.call.role]
        assert row.call.legal, (row.call.text, row.call.illegal)
        assert len(row.call.prompt_ids) <= role.max_prompt
        assert row.response_ids.size <= role.max_tokens
        assert 1 not in (*row.call.prompt_ids, *row.response_ids)
    assert chain_tokenizer().vocab_size < 110


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(SPLITS), st.integers(0, 10**6), st.integers(0, 10**6))
def test_problems_are_of_their_split_and_say_what_they_mean(split, seed, number):
    task = chain_task(split, seed, number)
    chain = read_problem(task.fields["problem"])
    assert tuple(name for name, _ in chain.steps) in orders(split, 2, 3)
    assert task.cluster == " ".join(name for name, _ in chain.steps)
    assert task.hidden == chain_task(split, seed, number).hidden
    assert task.hidden["target"] == str(chain.value)
    assert all(1 <= value <= 999 for value in chain.values)
    said = read_solver(f"{chain.expression} value {' '.join(str(chain.value))}")
    assert said == {"solution": chain.expression, "solved": str(chain.value), "claim": str(chain.value)}


def test_252_orders_and_none_of_one_split_is_one_of_another():
    found = {split: set(orders(split, 2, 3)) for split in SPLITS}
    assert sum(map(len, found.values())) == len(set().union(*found.values())) == 6**2 + 6**3
    assert all(len(part) >= 30 for part in found.values())
    for order in itertools.chain(*found.values()):  # each can be made
        assert set(order) <= set(OPERATIONS)
    with pytest.raises(ValueError, match="unknown split 'dev'"):
        orders("dev", 2, 3)
    with pytest.raises(ValueError, match="there are none"):
        orders("train", 2, 4)


def test_an_interval_counts_the_tasks_of_one_order_as_one():
    outcomes = [Outcome(task, 0, float(task % 3 == 0), 3, cluster=f"order {task % 3}") for task in range(60)]
    one = Evaluation("test", {}, 0.0, "correct", tuple(outcomes), {})
    assert one.interval == clustered([[1.0] * 20, [0.0] * 20, [0.0] * 20])
    low, high = dataclasses.replace(one, outcomes=tuple(dataclasses.replace(o, cluster="") for o in outcomes)).interval
    assert high - low < one.interval[1] - one.interval[0]


def test_a_program_is_the_expression_as_python_and_prints_its_value():
    chain = Chain(12, (("from", 30), ("times", 3), ("rest", 7)))
    assert chain.expression == "a 12 b ~ 30 c * 3 d % 7"
    assert chain.problem == "a twelve b from thirty c times three d rest seven"
    assert read_problem(chain.problem) == chain
    assert read_executor(f"well let print ( {chain.expression} )")["code"] == "a = 12\nb = 30 - a\nc = b * 3\nd = c % 7\nprint(d)"
    assert chain.value == ((30 - 12) * 3) % 7


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (read_solver, ""), (read_solver, "a 12"), (read_solver, "a 12 b +"), (read_solver, "b 12 a + 7"), (read_solver, "a 1 b + 7"),
        (read_solver, "a 12 b + 31"), (read_solver, "a 12 b ( 7"), (read_solver, "a 12 b + 7 value"), (read_solver, "a 12 b + 7 5 7"),
        (read_solver, f"a {'9' * 5000} b + 7"),
        (read_solver, "let a 12 b + 7"), (read_solver, "a 12 well b + 7"), (read_solver, "a 12 b + 7 c + 7 d + 7 a + 7"),
        (read_solver, "a ² b + 7"), (read_executor, "print ( a 12 b + 7"), (read_executor, "print a 12 b + 7 )"), (read_executor, "value"),
        (read_executor, "value 1 2 3 4 5"), (read_executor, "value none"), (read_executor, "print ( )"), (read_executor, "print"),
        (read_verifier, "5 7"), (read_verifier, "boxed"), (read_verifier, "boxed 5 7 well"), (read_verifier, "boxed 57"),
        (read_verifier, "boxed printed said"), (read_verifier, "boxed none"), (read_verifier, "printed"),
    ],
)  # fmt: skip
def test_what_is_out_of_form_is_illegal(read, text):
    with pytest.raises(FormatError):
        read(text)


def test_with_partial_information_only_the_solver_reads_the_problem():
    def prompts(information):
        rollout = play(chain_player(claims=1.0), 3, information=information)
        return {call.role: call.prompt for path in rollout.trajectories for call in path.calls if not call.prompt.startswith("printed")}

    full, partial = prompts("full"), prompts("partial")
    assert all(word in full[role] for role in full for word in ("a ", "b "))
    assert partial["executor"].endswith("code:")
    assert not set(partial["executor"].split()) & set(OPERATIONS)
    assert partial["verifier"].split()[0] == "said"
    assert "claims" not in partial["verifier"]
    with pytest.raises(ValueError, match="information='half' is not one of full, partial"):
        chain_roles("half")


def test_the_teacher_has_the_habits_that_it_is_given():
    rollout = play(chain_player(wrong=1.0, program=0.0, slip=1.0, filler=4), 40)
    assert set(scores(rollout, "expression")) == set(scores(rollout, "tool_plays")) == {0.0}
    assert sum(scores(rollout, "correct")) < 6
    said = {filler_of(call.text) for path in rollout.trajectories for call in path.calls}
    assert said == {0, 1, 2, 3, 4}
    assert set(scores(play(chain_player(repeats=1.0), 10), "executor_actions")) == {2.0}
    assert set(scores(play(chain_player(repeats=1.0), 10), "tool_share")) == {1.0}


def test_a_verifier_may_point_to_a_value_and_a_pointer_to_nothing_is_wrong():
    for points in (False, True):
        assert scores(play(chain_player(points=points), 10), "correct") == [1.0] * 10
    said = [path.calls[-1].text for path in play(chain_player(points=True, filler=0), 3).trajectories]
    assert {text.strip(" .") for text in said} == {"boxed printed"}
    assert scores(play(says(verifier="boxed claims"), 5), "correct") == [0.0] * 5
    claiming = chain_player(claims=1.0)

    def claims(turn):
        return "boxed claims" if turn.role.name == "verifier" else claiming(turn)

    assert scores(play(claims, 5), "correct") == [1.0] * 5


def test_a_failure_of_the_sandbox_aborts_the_play_and_is_no_zero():
    class Broken(Quick):
        async def run(self, code):
            return failed(FailureKind.CRASH, "gone", 0.0) if "*" in code else await super().run(code)

    rollout = play(HONEST, 20, tools=Broken())
    assert 0 < sum(episode.aborted for episode in rollout.episodes) < 20


# ---- the rubric


def scored(script, information="full", price=0.25, count=1, turns=2, task=None):
    """(role, score) of every action of plays."""
    workflow = team(information, turns)
    rubric = chain_rubric(information, price)
    given = tasks(count) if task is None else [task]
    found = []
    for path in played(workflow, given, script, chain_renderer()).trajectories:
        views = ViewMaker(workflow, path.task)
        for call in path.calls:
            view = views.make(call, path.events, "end", "none", path.fields, {})
            assert isinstance(view, ActionView)
            assert not set(HIDDEN) & (set(view.before) | set(view.outcome))
            found.append((call.role, rubric(view)[0]))
    return found


def says(**texts):
    """A script of these texts by role; of the executor one per action. "@" stands for the honest one's."""

    def script(turn):
        said = texts.get(turn.role.name, "@")
        said = said if isinstance(said, str) else said[min(sum("code:" in m.content for m in turn.messages) - 1, len(said) - 1)]
        return said.replace("@", HONEST(turn))

    return script


TASK = chain_task("train", 0, 0)
GOLD = read_problem(TASK.fields["problem"])
PROGRAM = f"print ( {GOLD.expression} )"
RIGHT, OFF = " ".join(str(GOLD.value)), " ".join(str(GOLD.value + 1))
WRONG = dataclasses.replace(GOLD, steps=(*GOLD.steps[:-1], ("plus", 29)))


@pytest.mark.parametrize(
    ("script", "want"),
    [
        (says(), [8, 9, 9, 10]),
        (says(solver=f"{GOLD.expression} value {OFF}"), [8, 9, 9, 10]),
        (says(solver=WRONG.expression, executor=f"value {OFF}", verifier=f"boxed {OFF}"), [2, 2, 6]),
        (says(solver=WRONG.expression, executor=f"print ( {WRONG.expression} )"), [2, 9, 8, 6]),
        (says(solver="value 3", executor=PROGRAM), [0, 9, 8, 10]),
        (says(executor=f"value {RIGHT}"), [8, 7, 10]),
        (says(executor=f"value {OFF}"), [8, 2, 6]),
        (says(executor=f"value {OFF}", verifier="boxed 9 9 9"), [8, 2, 1]),
        (says(executor=(PROGRAM, PROGRAM)), [8, 9, 8, 10]),
        (says(executor=(f"print ( {WRONG.expression} )", PROGRAM), verifier=f"boxed {RIGHT}"), [8, 3, 9, 10]),
        (says(executor=(PROGRAM, f"value {OFF}"), verifier=f"boxed {OFF}"), [8, 9, 2, 1]),
        (says(verifier="value 3"), [8, 9, 9, 0]),
        (says(verifier="boxed printed"), [8, 9, 9, 10]),
        (says(verifier="boxed claims"), [8, 9, 9, 1]),
        (says(executor=f"value {OFF}", verifier="boxed said"), [8, 2, 6]),
        (says(executor=f"value {OFF}", verifier="boxed printed"), [8, 2, 1]),
        (says(solver="well let @", executor="well @", verifier=" ".join(FILLER) + " @"), [7.5, 8.75, 8.75, 9]),
    ],
)  # fmt: skip
def test_what_the_rubric_says(script, want):
    assert [value for _, value in scored(script, task=TASK)] == want


def test_another_way_to_the_same_value_is_worth_less_than_the_problems_own():
    task = dataclasses.replace(TASK, fields={"problem": Chain(6, (("plus", 4), ("plus", 2))).problem})
    task = dataclasses.replace(task, hidden={"target": "12", "chain_gold": read_problem(task.fields["problem"]).expression})
    assert scored(says(solver="a 6 b + 2 c + 4"), task=task)[0] == ("solver", 5.0)


def test_with_partial_information_the_executor_owes_what_the_solver_wrote():
    wrong = says(solver=WRONG.expression, executor=f"print ( {WRONG.expression} )")
    assert [value for _, value in scored(wrong, "partial", task=TASK)] == [2, 9, 8, 6]
    ignores = says(solver=WRONG.expression, executor=PROGRAM)
    assert [value for _, value in scored(ignores, "partial", task=TASK)][1] == 3
    assert [value for _, value in scored(says(solver="value 3", executor="value 5"), "partial", task=TASK)][1] == 6


def test_without_a_price_filler_changes_no_score():
    plain, filled = (scored(chain_player(filler=most), price=0.0, count=12) for most in (0, 4))
    assert plain == filled


ADVERSARIES = {
    "the score in words": says(solver="SCORE: 10"),
    "nothing": says(solver="", executor="", verifier=""),
    "a value that is never worked out": says(executor="value 1"),
    "the program again and again": says(executor=PROGRAM),
    "filler alone": says(solver=" ".join(FILLER), executor=" ".join(FILLER), verifier=" ".join(FILLER)),
}


@pytest.mark.parametrize("adversary", ADVERSARIES)
def test_no_adversary_is_scored_above_the_honest_team(adversary):
    honest, other = (scored(script, task=TASK, turns=4) for script in (says(), ADVERSARIES[adversary]))
    best = {role: max(value for who, value in honest if who == role) for role, _ in honest}
    assert all(value <= best[role] for role, value in other)

    def mean(found):
        return sum(value for _, value in found) / len(found)

    assert mean(other) < mean(honest)


# ---- what a small coach reads


def briefs(script, count=40, **options):
    """(brief, score, view) of every action of plays."""
    rollout = play(script, count, **options)
    return [(chain_brief(view), chain_rubric()(view)[0], view) for view in views_of(rollout, "action")]


def test_a_brief_tells_all_that_the_rubric_judges_by_in_few_words():
    said = briefs(make_game("chain_maths").script, 40)
    scores_of = {}
    for brief, score, _ in said:
        scores_of.setdefault(brief, set()).add(score)
    # the rubric works values out, so that another way to the same value may be worth more than its brief shows
    assert sum(len(found) > 1 for found in scores_of.values()) <= 1
    assert len(scores_of) > 90
    assert len({word for brief in scores_of for word in brief.split()}) < 45
    assert max(len(brief.split()) for brief in scores_of) < 60


def test_a_brief_lays_the_problem_and_what_was_said_side_by_side_and_names_values():
    task = dataclasses.replace(TASK, fields={"problem": Chain(12, (("plus", 7),)).problem}, hidden={"target": "19", "chain_gold": "a 12 b + 7"})  # noqa: E501
    honest = says(solver="well a 12 b + 8 value 5", executor=("print ( a 12 b + 7 )", "value 2 0"), verifier="boxed said")
    views = views_of(played(team(), [task], honest, chain_renderer()), "action")
    assert [chain_brief(view) for view in views] == [
        "solver well _ _ a a p p b c solved x claims y said _ printed _",
        "executor _ _ _ _ a a _ a p p _ p b c _ b solved x claims y said _ printed z",
        "executor _ _ _ a a a p p p b c b solved x claims y said x printed z",
        "verifier _ _ _ a a a p p p b c b solved x claims y said x printed z boxed x",
    ]
    broken = says(solver="SCORE: 10", executor="value 9", verifier="boxed 9 9 9 9 9")
    assert [chain_brief(view) for view in views_of(played(team(), [task], broken, chain_renderer()), "action")] == [
        "solver illegal", "executor _ _ a _ p _ b _ solved _ claims _ said x printed _", "verifier illegal",
    ]  # fmt: skip


def test_a_corrected_action_is_the_one_that_the_rubric_scores_highest_there():
    """Each role in turn says what it should have said, in plays whose other actions stay as they were."""
    wrong = f"print ( {WRONG.expression} )"
    spoiled = dict(solver=f"well {GOLD.expression}", executor=(wrong, f"value {OFF}"), verifier="boxed 9 9 9")
    views = views_of(played(team(), [TASK], says(**spoiled), chain_renderer()), "action")
    assert [chain_better(view) for view in views] == [GOLD.expression, PROGRAM, PROGRAM, "boxed printed"]
    assert scored(says(**spoiled | {"solver": chain_better(views[0])}), task=TASK)[0] == ("solver", 8)
    assert scored(says(**spoiled | {"executor": (PROGRAM, f"value {OFF}")}), task=TASK)[1] == ("executor", 9)
    assert scored(says(**spoiled | {"executor": (wrong, PROGRAM)}), task=TASK)[2] == ("executor", 9)
    found = says(solver=f"{WRONG.expression} value {RIGHT}", executor=(wrong, f"value {OFF}"), verifier="boxed printed")
    assert [chain_better(view) for view in views_of(played(team(), [TASK], found, chain_renderer()), "action")] == [
        GOLD.expression, "", f"value {' '.join(str(WRONG.value))}", "boxed claims",
    ]  # fmt: skip
    nothing = says(solver="well", executor=f"value {OFF}", verifier="well")
    assert [chain_better(view) for view in views_of(played(team(), [TASK], nothing, chain_renderer()), "action")] == [
        GOLD.expression, PROGRAM, "boxed said",
    ]  # fmt: skip


@pytest.mark.parametrize("information", ["full", "partial"])
def test_a_teacher_who_points_is_not_corrected(information):
    rollout = played(team(information), tasks(20), chain_player(points=True), chain_renderer())
    assert not any(map(chain_better, views_of(rollout, "action")))


def test_a_strategic_rubric_prices_filler_only_once_the_team_succeeds():
    view = briefs(says(solver="well let @"), 1)[0][2]
    rubric = chain_rubric(phase_at=0.8)
    history = [{}, {"success": 0.79}, {"success": 0.8}]
    assert [rubric(dataclasses.replace(view, history=one))[0] for one in history] == [8.0, 8.0, 7.5]
    assert chain_rubric()(view)[0] == 7.5


# ---- what an action changed


def contributions(script, task=None, count=1):
    """(role, Δ) of every action of plays, and the results of these."""
    rollout = played(team(), tasks(count) if task is None else [task], script, chain_renderer())
    found = []
    for path in rollout.trajectories:
        made = ViewMaker(rollout.workflow, path.task)
        views = [made.make(call, path.events, "end", "none", path.fields, {}) for call in path.calls]
        views = [dataclasses.replace(view, result=path.fields["correct"]) for view in views]
        assert _replayed(path.calls, read_problem(path.task.fields["problem"]), "") == path.fields["correct"]
        found.append(([(view.call.role, chain_contribution(view)) for view in views], path.fields["correct"]))
    return found


COPIES = f"print ( {WRONG.expression} )"


@pytest.mark.parametrize(
    ("script", "want"),
    [
        (says(), [0, 0, 0, 0]),
        (says(solver=WRONG.expression, executor=COPIES, verifier="boxed printed"), [-1, 0, 0, 0]),  # the others did as they were told
        (says(executor=(COPIES, f"value {RIGHT}"), verifier="boxed printed"), [0, -1, -1, 0]),  # the verifier did as the teacher does
        (says(executor=f"value {OFF}", verifier="boxed said"), [0, 0, 0]),  # two have to change
        (says(solver=f"{GOLD.expression} value {OFF}", verifier="boxed claims"), [-1, 0, 0, -1]),
        (says(verifier=f"boxed {OFF}"), [0, 0, 0, -1]),
        (says(solver="value 3", executor=PROGRAM), [0, 0, 0, 0]),
    ],
)  # fmt: skip
def test_what_an_action_changed_of_the_result(script, want):
    ((found, _),) = contributions(script, TASK)
    assert [share for _, share in found] == want


def test_no_action_of_a_failed_play_has_helped_and_a_replay_without_the_teacher_ends_as_the_play_did():
    plays = contributions(make_game("chain_maths").script, count=60)
    assert {result for _, result in plays} == {0.0, 1.0}
    for found, result in plays:
        assert all(share in ((0.0, 1.0) if result else (-1.0, 0.0)) for _, share in found), (found, result)
    assert sum(share < 0 for found, _ in plays for _, share in found) > 10


def test_a_brief_of_four_texts_without_a_common_number_names_them_all_and_all_six_signs():
    signs = itertools.cycle(BY_SIGN)
    texts = [[("_" if not place else next(signs), str(4 * text + place)) for place in range(4)] for text in range(4)]
    named = _named(texts)
    assert [number for text in named for _, number in text] == list("abcdefghijklmno") + ["o"]
    assert [sign for text in named for sign, _ in text] == ["_", *"pqr", "_", *"stu", "_", *"pqr", "_", *"stu"]
