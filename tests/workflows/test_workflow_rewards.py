"""Who is paid for what: attribution, deltas, delays, and the table of samples that advantages are computed from."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wordy import SPEECH, Says

from marl_llm.algorithms import advantages_for, make_recipe
from marl_llm.tools.results import FailureKind, failed
from marl_llm.workflows import (
    Assignment,
    Controller,
    Inside,
    Role,
    Scripted,
    Task,
    Workflow,
    WorkflowError,
    alternate,
    compute,
    each,
    plain,
    repeat,
    sequence,
    shared,
    stop,
    tool,
    when,
)
from marl_llm.workflows.metrics import before_after, rollout_metrics, team_metrics
from marl_llm.workflows.rewards import (
    Award,
    Paid,
    absolute,
    broadcast,
    coach_score,
    delayed,
    delta,
    earned,
    format_penalty,
    per_turn,
    scored,
)
from marl_llm.workflows.samples import sample_table
from marl_llm.workflows.trajectory import Earned, RoleCall, Score, ToolUse, Trajectory


def role(name, prompt="{question}", **options):
    return Role(name, f"{name}: {prompt}", parse=plain(name), writes={name: ""}, **options)


def rounds(scores, rewards, **options):
    """Plan, code, verify with these scores per round, reflect unless all passed: the skeleton of workflow D."""
    verify = compute(lambda code, n: {"score": scores[n], "n": n + 1}, ("score", "n"), name="verify")
    passed = when(lambda score: score == 1.0, stop(), name="passed")
    body = repeat(role("plan"), role("code", "{plan}"), verify, passed, role("reflect"), at_most=len(scores))
    return Workflow("d", body, inputs=("question",), hidden=("gold",), start={"n": 0}, rewards=rewards, **options)


def play(team, n=1, plays=1, generator=None, assignment=None, step=0, **options):
    given = [Task(i, {"question": f"q{i}"}, {"gold": i}) for i in range(n)]
    generator = generator or Says(lambda prompt, request: prompt.split(": ")[1])
    with Controller(team, assignment or shared(team), generator, SPEECH, **options) as controller:
        return controller.play(given, step, plays)


def paid(team):
    (way,) = play(team).trajectories
    return {(call.role, call.turn): earned(team, way)[call.id] for call in way.calls}


def test_the_first_pair_is_paid_its_score_and_later_ones_what_they_improved():
    team = rounds([0.25, 0.75, 0.5], (delta("score", ("plan", "code")), delayed("score", ("reflect",))))
    found = {key: one.local for key, one in paid(team).items()}
    assert found == {
        ("plan", 0): 0.25, ("code", 0): 0.25, ("reflect", 0): 0.5,
        ("plan", 1): 0.5, ("code", 1): 0.5, ("reflect", 1): -0.25,
        ("plan", 2): -0.25, ("code", 2): -0.25, ("reflect", 2): 0.0,
    }  # fmt: skip


def test_each_field_of_a_turn_is_a_part_of_the_joint_reward_with_its_own_value():
    found = paid(rounds([0.25, 0.75], (per_turn(("score", "n"), ("plan", "code"), ("share", "round")),)))
    assert {key: one.components for key, one in found.items() if one.components} == {
        (name, turn): {"share": [0.25, 0.75][turn], "round": turn + 1.0} for turn in (0, 1) for name in ("plan", "code")
    }


def called(name, role, turn, legal=True):
    about = dict(id=name, node=role, role=role, agent=0, model="policy", parents=(), turn=turn, request_number=0, items=(), group=name)
    about |= dict(choice=0, branch=0, seed=(0,), prompt="", prompt_ids=(1,), text=name, tokens=np.zeros(1, np.int32))
    about |= dict(log_probs=None, sampled_log_probs=None, finish="stop", version=0, writes={})
    return RoleCall(**about, illegal=None if legal else "broken")


def measured(turn, score):
    return ToolUse(f"v{turn}", "verify", (), turn, 0, (), 0, {"score": score, "share": 2 * score})


A0, B0, A1, B2 = called("a0", "a", 0), called("b0", "b", 0, legal=False), called("a1", "a", 1, legal=False), called("b2", "b", 2)
PATH = Trajectory(
    Task(0, {}, {}), (A0, B0, measured(0, 0.25), A1, measured(1, 1.0), measured(1, 0.75), B2), {"gold": 4.0}, 3, 0,
    {"a0": {"judge": Score(6.0)}, "b0": {"judge": Score(None, missing="late")}, "a1": {"coach": Score(10.0), "judge": Score(1.0)}},
)  # fmt: skip


@pytest.mark.parametrize(
    ("reward", "component", "team", "values"),
    [
        (broadcast(lambda path: path.fields["gold"]), "score", True, {"a0": 4, "b0": 4, "a1": 4, "b2": 4}),
        (broadcast(lambda path: path.fields["gold"], ("b",), "won", 0.5), "won", True, {"b0": 2, "b2": 2}),
        (format_penalty(), "format", False, {"a0": 0, "b0": -1, "a1": -1, "b2": 0}),
        (format_penalty(0.25, ("a",), name="form"), "form", False, {"a0": 0, "a1": -0.25}),
        (format_penalty(2, exempt=lambda call: call.turn == 0), "format", False, {"a1": -2, "b2": 0}),
        (absolute(lambda call, path: call.turn + path.turns, ("a",)), "score", False, {"a0": 3, "a1": 4}),
        (absolute(lambda call, path: call.turn, ("a", "b"), "own", 3), "own", False, {"a0": 0, "b0": 0, "a1": 3, "b2": 6}),
        (delta("score", ("a", "b")), "delta", False, {"a0": 0.25, "b0": 0.25, "a1": 0.5, "b2": 0}),
        (delta("score", ("a",), "gain", 0.25), "gain", False, {"a0": 0, "a1": 0.5}),
        (delta("score", ("a",), start=lambda path: path.fields["gold"]), "delta", False, {"a0": -3.75, "a1": 0.5}),
        (delta(lambda path: {1: 5, 0: 2}, ("a",)), "delta", False, {"a0": 2, "a1": 3}),
        (delayed("score", ("a", "b")), "delayed", False, {"a0": 0.5, "b0": 0.5, "a1": 0, "b2": 0}),
        (delayed(lambda path: {0: 1, 2: 4}, ("a",), "later"), "later", False, {"a0": 3, "a1": 0}),
        (per_turn(("score",)), "score", True, {"a0": 0.25, "b0": 0.25, "a1": 0.75, "b2": 0}),
        (scored("judge"), "judge", False, {"a0": 6, "a1": 1}), (scored("judge", ("a",), 0.5, "own"), "own", False, {"a0": 3, "a1": 0.5}),
        (scored("judge", ("b",)), "judge", False, {}), (coach_score(), "coach", False, {"a1": 1}),
        (coach_score(0.2, ("a",)), "coach", False, {"a1": 2}), (coach_score(roles=("b",)), "coach", False, {}),
    ],
)  # fmt: skip
def test_each_option_of_a_reward_pays_whom_and_what_it_says(reward, component, team, values):
    awards = list(reward(PATH))
    assert {award.call.id: award.value for award in awards} == pytest.approx(values)
    assert len(awards) == len(values)
    assert all((award.component, award.team) == (component, team) for award in awards)


def test_what_a_call_earned_is_the_sum_of_all_awards_by_component_and_kind():
    def pays(path):
        yield Award(A0, 1, "x", team=True)
        yield Award(A0, 2, "x")
        yield Paid(A0, 3, 4, {"x": 5, "y": 2}, team_paid=False)
        yield Paid(B0, 0, 1, {"y": 1})
        yield Award(A1, 0, "x")

    found = earned(Workflow("w", role("a"), inputs=("question",), rewards=(pays, pays)), PATH)
    assert found == {
        "a0": Earned(8.0, 12.0, {"x": 16.0, "y": 4.0}, True), "b0": Earned(0.0, 2.0, {"y": 2.0}, True),
        "a1": Earned(0.0, 0.0, {"x": 0.0}, False), "b2": Earned(),
    }  # fmt: skip
    for value in (float("nan"), float("inf")):
        for bad in (Award(A0, value, "x"), Paid(A0, 0, value, {}), Paid(A0, 0, 0, {"x": value}), Paid(A0, value, 0, {})):
            with pytest.raises(WorkflowError, match="pays (nan|inf) to a0 of task 0; pay a finite number"):
                earned(Workflow("w", role("a"), inputs=("question",), rewards=(lambda path, bad=bad: [bad],)), PATH)


def test_after_the_stop_nobody_is_called_or_paid():
    found = paid(rounds([0.5, 1.0, 0.0], (delta("score", ("plan", "code")), delayed("score", ("reflect",)))))
    assert sorted(found) == [("code", 0), ("code", 1), ("plan", 0), ("plan", 1), ("reflect", 0)]
    assert found["reflect", 0].local == found["code", 1].local == 0.5


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 8).map(lambda n: n / 8), min_size=1, max_size=5), st.integers(-4, 4).map(lambda n: n / 4))
def test_deltas_add_up_to_the_last_score_whatever_detour_was_taken(scores, start):
    team = rounds(scores, (delta("score", ("code",), start=start), delayed("score", ("reflect",))))
    found = paid(team)
    seen = scores[: len([key for key in found if key[0] == "code"])]
    assert sum(one.local for (name, _), one in found.items() if name == "code") == pytest.approx(seen[-1] - start)
    assert sum(one.local for (name, _), one in found.items() if name == "reflect") == pytest.approx(seen[-1] - seen[0])


def test_a_team_reward_reaches_everyone_and_components_stay_apart():
    final = broadcast(lambda way: way.fields["score"], name="pass_rate", weight=2)
    own = absolute(lambda call, way: len(call.text), ("plan",), name="length")
    found = paid(rounds([0.5], (final, own, format_penalty())))
    plan, code = found["plan", 0], found["code", 0]
    assert (plan.team, plan.local) == (1.0, 2.0)
    assert plan.components == {"pass_rate": 1.0, "length": 2.0, "format": 0.0}
    assert (code.team, code.local, dict(code.components)) == (1.0, 0.0, {"pass_rate": 1.0, "format": 0.0})


def test_a_broken_format_is_paid_to_its_own_call_only():
    team = rounds([0.5, 0.5], (format_penalty(0.25, exempt=lambda call: call.role == "reflect"),))
    silent = Says(lambda prompt, request: "" if prompt[:4] in ("plan", "refl") else "x")
    (way,) = play(team, generator=silent).trajectories
    found = {call.id: (call.role, one.local, dict(one.components)) for call in way.calls for one in [earned(team, way)[call.id]]}
    assert sorted({(name, local) for name, local, _ in found.values()}) == [("code", 0.0), ("plan", -0.25), ("reflect", 0.0)]
    assert all(components == {} for name, _, components in found.values() if name == "reflect")


def with_team(paid, value):
    """The payment with another pay for the team, whatever type checkers say."""
    object.__setattr__(paid, "team", value)
    return paid


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (lambda way: [Award(way.calls[0], float("nan"), "x")], "pays nan to plan:0:0 of task 0"),
        (lambda way: [with_team(Paid(way.calls[0], 1.0, 0.0, {}), None)], "pays None to plan:0:0 of task 0"),
        (lambda way: [with_team(Paid(way.calls[0], 1.0, 0.0, {}), "1")], "pays '1' to plan:0:0 of task 0"),
        (lambda way: [Award(way.calls[0], 10**400, "x")], "pays 10{199} to plan:0:0 of task 0"),
        (lambda way: [Paid(way.calls[0], 0.0, 10**5000, {})], r"pays int \(ValueError\) to plan:0:0 of task 0"),
        (lambda way: 1 / 0, "raised ZeroDivisionError"),
        (lambda way: [(way.calls[0], 1.0)], r"yields tuple; it must yield Award\(call, value, component\)"),
        (lambda way: [Award(play(rounds([0.1], ()), n=1, plays=2).trajectories[1].calls[0], 1.0, "x")], "no call of the trajectory"),
    ],
)
def test_a_reward_with_a_fault_is_named(reward, message):
    team = rounds([0.5], (format_penalty(), reward))
    with pytest.raises(WorkflowError, match=f"reward 1 .*{message}"):
        sample_table(play(team))


# ---- the table


def own_pay(way):
    """A user's own reward, with a misspelt role."""
    return [Award(call, 1.0, "own") for call in way.calls if "coed" == call.role]


def test_roles_of_chats_and_of_the_workflow_are_no_misspelt_ones():
    def own(way):
        return [m for m in way.task.fields.get("chat", ()) if m.role == "assistant"] or list(way.by("plan", "code"))[:0]

    assert len(rounds([0.5], (own,)).rewards) == 1


def test_a_computed_name_that_is_no_role_is_refused_when_it_is_asked_for():
    name = "".join(["rev", "iewer"])
    team = rounds([0.5], (lambda way: [Award(call, 1.0, "x") for call in way.by(name)],))
    with pytest.raises(WorkflowError, match=r"by\('reviewer'\): the workflow has no such role; there are plan, code, reflect"):
        sample_table(play(team))


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        (lambda: (delta("score", roles=("coed",)),), r"reward 0 \(delta 'delta'\) .* pays the role 'coed'.*did you mean 'code'\?"),
        (lambda: (delta("scoer", roles=("code",)),), r"reads the field 'scoer', which the workflow does not have; did you mean 'score'"),
        (lambda: (delayed("gold", roles=("reflect",)),), "reads the field 'gold', which the workflow does not have; there are plan, "),
        (lambda: (broadcast(len), broadcast(len, roles=("coder",))), r"reward 1 \(broadcast 'score'\).*did you mean 'code'"),
        (lambda: (format_penalty(1.0, roles=("x",)),), "format_penalty 'format'.* pays the role 'x', .*there are plan, code, reflect"),
        (lambda: (absolute(len, roles=("x",)),), "absolute.* pays the role 'x'"),
        (lambda: (own_pay,), "reward 0 .*own_pay.* names the role 'coed', which the workflow does not have; did you mean 'code'"),
        (lambda: (lambda way: [Award(one, 1.0, "x") for one in way.by("plna")],), "names the role 'plna'.*did you mean 'plan'"),
        (lambda: (broadcast(lambda way: len([c for c in way.calls if c.role in ("plan", "kode")])),), "names the role 'kode'"),
    ],
)
def test_a_reward_of_what_is_not_there_is_refused_when_the_workflow_is_built(rewards, message):
    with pytest.raises(WorkflowError, match=message):
        rounds([0.5], rewards())


def test_an_outcome_is_what_the_team_was_paid_whoever_spoke_last():
    """GRPO on a team whose last speaker has no team reward: all calls get the outcome, none is tied at 0."""
    team = rounds([0.25, 0.5], (broadcast(lambda way: way.fields["gold"] / 4, roles=("plan",)), format_penalty(1.0, ("reflect",))))
    table = sample_table(play(team, n=4))
    assert table[-1].call.role == "reflect"
    assert [s.team_paid for s in table.samples] == [s.call.role == "plan" for s in table.samples]
    recipe = make_recipe(
        "grpo", group_by=("agent",), scale_advantages="none", group_size=4
    )  # of all plays, because each task is played once
    advantages, figures, _ = advantages_for(recipe, table.to_samples())
    assert float(figures["return_mean"]) == pytest.approx(np.mean([0, 0.25, 0.5, 0.75]))
    expected = [s.instance / 4 - 0.375 for s in table.samples]
    np.testing.assert_allclose(advantages, expected, atol=1e-6)


def test_without_team_rewards_the_outcome_is_the_last_calls():
    team = rounds([0.25], (absolute(lambda call, way: float(way.fields["gold"]), ("reflect",)),))
    columns = sample_table(play(team, n=2)).to_samples()
    assert columns.team_where is None
    _, figures, _ = advantages_for(make_recipe("grpo", rewards="local", group_size=2), columns)
    assert float(figures["return_mean"]) == 0.5


def test_a_recipe_of_local_rewards_reads_its_outcome_from_the_last_call_whoever_the_team_paid():
    own = absolute(lambda call, way: float(way.fields["gold"]), ("reflect",))
    columns = sample_table(play(rounds([0.25], (broadcast(lambda way: 9.0, ("plan",)), own)), n=2)).to_samples()
    assert columns.team_where is not None
    _, figures, _ = advantages_for(make_recipe("grpo", rewards="local", group_size=2), columns)
    assert float(figures["return_mean"]) == 0.5


def test_a_row_prints_who_said_what_and_what_it_was_paid():
    team = rounds([0.5], (delta("score", ("code",)), broadcast(lambda way: 2.0, ("plan",), name="final")))
    first, second, last = sample_table(play(team), training=()).samples
    assert repr(first) == "Sample(0/0/plan:0:0, 'q0': final +2; not trained)"
    assert "delta +0.5" in repr(second)
    assert "nothing" in repr(last)


def test_rows_have_what_the_update_needs_and_identity():
    team = rounds([0.5, 1.0], (broadcast(lambda way: way.fields["gold"], name="gold"), format_penalty()))
    table = sample_table(play(team, n=2, plays=3, step=4))
    assert len(table) == 2 * 3 * 5
    row = table[-1]
    assert (row.instance, row.call.role, row.call.turn, row.order, row.team, row.local) == (1, "code", 1, 4, 1.0, 0.0)
    assert row.response_ids.size == table.log_probs(len(table) - 1).size == table.log_probs(len(table) - 1, raw=True).size
    assert np.all(table.log_probs(3) < table.log_probs(3, raw=True))
    assert len({sample.name for sample in table.samples}) == len(table)
    assert len({sample.trajectory for sample in table.samples}) == 6
    columns = table.to_samples()
    assert columns.team.shape == (30,)
    assert columns.tokens.tolist() == [s.response_ids.size for s in table.samples]
    same = [(a.prompt == b.prompt) == (a.prompt_ids == b.prompt_ids) for a in table.samples for b in table.samples]
    assert all(same)


def test_grpo_compares_the_plays_of_a_task_role_by_role():
    scores = iter([0.0, 1.0, 0.0, 1.0])
    score = compute(lambda b: next(scores), "score", name="s")
    team = Workflow(
        "t", sequence(role("a"), role("b", "{a}"), score), inputs=("question",), hidden=("gold",),
        rewards=(broadcast(lambda way: way.fields["score"]),),
    )  # fmt: skip
    table = sample_table(play(team, plays=4))
    recipe = make_recipe("grpo", group_size=4)
    advantages, metrics, tied = advantages_for(recipe, table.to_samples())
    a = np.asarray([s.call.role == "a" for s in table.samples])
    expected = np.asarray([-1, 1, -1, 1]) * 0.5 / np.std([0, 1, 0, 1], ddof=1)
    np.testing.assert_allclose(np.asarray(advantages)[a], expected, rtol=1e-4)
    np.testing.assert_allclose(np.asarray(advantages)[~a], expected, rtol=1e-4)
    assert int(metrics["groups"]) == 2
    assert not np.any(tied)


def test_at_grpos_groups_are_the_candidates_of_one_prompt():
    team = Workflow(
        "t", sequence(role("a"), repeat(role("b", "{a}"), role("c", "{b}"), at_most=2)), inputs=("question",), hidden=("gold",),
        rewards=(absolute(lambda call, way: float(call.text), ("a", "b", "c")),),
    )  # fmt: skip
    draws = Says(lambda prompt, request: f"{np.random.default_rng(request.seed).random():.3f}")
    table = sample_table(play(team, n=2, generator=draws, branching={"a": 2, "b": 3}))
    columns = table.to_samples()
    groups = {}
    for s in table.samples:
        groups.setdefault((s.env, s.call.agent, s.call.turn), []).append(s)
    for members in groups.values():
        assert len({m.prompt_ids for m in members}) == 1
        assert len(members) == {"a": 2, "b": 3, "c": 1}[members[0].call.role]
    advantages, metrics, _ = advantages_for(make_recipe("at_grpo", group_size=3), columns)
    assert float(metrics["mixed_prompt_share"]) == 0.0
    for members in groups.values():
        values = [float(advantages[table.samples.index(m)]) for m in members]
        rewards = [m.reward for m in members]
        if len(members) > 1:
            assert np.corrcoef(values, rewards)[0, 1] > 0.999
        else:
            assert values == [0.0]


def test_a_call_before_a_fork_is_one_row_paid_the_mean_of_its_ways():
    team = Workflow(
        "t", sequence(role("a"), role("b", "{a}")), inputs=("question",), hidden=("gold",),
        rewards=(broadcast(lambda way: float(way.fields["b"]), name="b"),),
    )  # fmt: skip
    draws = Says(lambda prompt, request: f"{np.random.default_rng(request.seed).random():.3f}")
    table = sample_table(play(team, generator=draws, branching={"b": 4}))
    a, *bs = table.samples
    assert len(bs) == 4
    assert a.team == a.components["b"] == pytest.approx(np.mean([float(b.call.text) for b in bs]))
    assert [b.team for b in bs] == [float(b.call.text) for b in bs]


def test_rows_that_do_not_train_stay_and_do_not_count():
    def fragile(question):
        return failed(FailureKind.REFUSED, "no", 0.0) if question == "q1" else "x"

    team = Workflow(
        "t", sequence(role("a"), role("frozen"), role("script"), role("off"), tool(fragile, "x")), inputs=("question",), hidden=("gold",),
        rewards=(broadcast(lambda way: 1.0 + way.task.number),),
    )  # fmt: skip
    models = {"f": Inside(trained=False), "s": Scripted(lambda turn: "hello")}
    roles = {"a": "m", "frozen": "f", "script": "s", "off": "o"}
    assignment = Assignment(roles, models, alternate(("m", 1), ("o", 1)))
    rollout = play(team, n=3, assignment=assignment)
    table = sample_table(rollout)
    why = {(s.instance, s.call.role): s.excluded for s in table.samples}
    assert why == {
        (i, name): "aborted" if i == 1 else "" if name == "a" else "not trained"
        for i in range(3)
        for name in ("a", "frozen", "script", "off")
    }
    assert [s.where for s in table.samples] == [not s.excluded for s in table.samples]
    assert {s.reward for s in table.samples if s.instance == 1} == {0.0}
    assert [s.call.role for s in table.trained("m")] == ["a", "a"]
    columns = table.to_samples()
    recipe = make_recipe("grpo", group_by=("agent",))
    advantages, metrics, _ = advantages_for(recipe, columns)
    assert int(metrics["samples"]) == 2
    assert np.all(np.asarray(advantages)[~np.asarray(columns.where)] == 0)
    np.testing.assert_allclose(np.asarray(advantages)[np.asarray(columns.where)], [-(0.5**0.5), 0.5**0.5], rtol=1e-4)
    figures = rollout_metrics(rollout, table)
    assert (figures["samples/trained"], figures["samples/aborted"], figures["samples/not_trained"]) == (2, 4, 6)
    assert figures["aborted_share"] == pytest.approx(1 / 3)
    assert figures["failed_refused"] == 1
    assert figures["role/a/reward"] == 2.0  # of the plays that count: 1 and 3
    prompts = table.demonstrations(["script"])
    assert len(prompts) == 2
    with pytest.raises(ValueError, match="has no log-probs"):
        table.log_probs(2)


# ---- figures


def test_figures_are_per_role_and_every_episode_has_one_vote():
    def ok(way):
        return float(way.fields["score"] == 1.0)

    team = rounds([0.5, 1.0], (format_penalty(), delta("score", ("code",))), metrics={"passed": ok})
    silent = Says(lambda prompt, request: "" if prompt[:4] == "plan" and request.seed[3] == 0 else "x")
    rollout = play(team, n=3, generator=silent)
    figures = rollout_metrics(rollout, sample_table(rollout))
    assert figures["turns"] == 2.0
    assert figures["team/passed"] == 1.0
    assert (figures["role/plan/well_formed"], figures["role/code/well_formed"], figures["role/reflect/calls"]) == (0.5, 1.0, 3.0)
    assert figures["role/code/component/delta"] == 0.5
    assert figures["role/plan/component/format"] == -0.5
    assert figures["tool/verify/calls"] == 6.0
    assert team_metrics(rollout)["passed"] == [1.0] * 3


def test_a_metric_with_a_fault_is_named():
    for metric, message in ((lambda way: way.fields["x"], "raised KeyError"), (lambda way: float("inf"), "gave inf")):
        team = rounds([0.5], (), metrics={"odd": metric})
        with pytest.raises(WorkflowError, match=f"metric 'odd' {message}"):
            team_metrics(play(team))


def test_before_and_after():
    before = {"team/f1": 0.25, "turns": 3.0, "role/a/well_formed": 0.0, "aborted_share": 0.1}
    after = {"team/f1": 0.75, "turns": 2.0, "role/a/well_formed": 0.5, "aborted_share": 0.0}
    lines = before_after(before, after).splitlines()
    assert "| team/f1 | 0.250 | 0.750 | +0.500 | +200% |" in lines
    assert "| role/a/well_formed | 0.000 | 0.500 | +0.500 | – |" in lines
    assert len(lines) == 5
    with pytest.raises(KeyError):
        before_after(before, after, ["team/em"])


def test_items_of_a_list_are_told_apart():
    parts = compute(lambda question: ("x", "x"), "parts", name="parts")
    body = sequence(parts, each("parts", "part", role("a", "{part}"), "a", at_most=2))
    team = Workflow("t", body, inputs=("question",), hidden=("gold",), rewards=(broadcast(lambda way: 1.0),))
    table = sample_table(play(team, plays=2))
    assert len({s.env for s in table.samples}) == 4
    assert len({s.prompt for s in table.samples}) == 1
    assert len({s.trajectory for s in table.samples}) == 2
