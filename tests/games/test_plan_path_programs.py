"""Plan-Path with programs of ten words: programs really run, dialects are held out, and nothing but a matching search pays in full."""

import functools
import importlib
import itertools
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from marl_llm.games.plan_path.grid import left  # noqa: E402
from marl_llm.games.plan_path.lines import (  # noqa: E402
    ASPECTS,
    DIALECT,
    LINES,
    PROGRAM_WORDS,
    combinations,
    given,
    plan_path_programs,
    program_tokenizer,
    read_answer,
    read_program,
)
from marl_llm.runs.resolve import resolve  # noqa: E402
from marl_llm.workflows import Assignment, Controller, FormatError, RoleCall, Scripted, Task, WorkflowError  # noqa: E402

ROWS = ("A#....", ".#.##.", ".#.#..", ".#.#.#", "...#..", "####.G")  # 18 moves; the straight way is blocked
PLAIN = ("wall:#", "up:-", "agent:first", "from:0")


@functools.cache
def environment(**options):
    return plan_path_programs(**options)


def search(dialect, pop="pop_first", expand="expand_free"):
    wall, up, first, base_ = (DIALECT[aspect][word] for aspect, word in zip(ASPECTS, dialect))
    return f"read {first} {base_} {up} {wall} frontier loop {pop} found {expand}"


def play(tool, planner="=", rows=ROWS, dialect=PLAIN, options=(), **controller):
    """One episode of scripted words: texts, or functions of a turn."""
    made = environment(**dict(options))
    words = {"tool": tool, "planner": planner, "solo": planner}

    def say(turn):
        return words[turn.role.name](turn) if callable(words[turn.role.name]) else words[turn.role.name]

    roles = Assignment(dict.fromkeys(made.workflow.roles, "s"), {"s": Scripted(say)})
    task = Task(0, {"task": "plan", "instance": {"rows": rows, "dialect": dialect}})
    with Controller(made.workflow, roles, None, made.renderer, **controller) as controller:
        return controller.play([task]).episodes[0]


def earned(episode, role):
    (path,) = episode.trajectories
    return sum(path.earned[call.id].team + path.earned[call.id].local for call in path.by(role))


def test_the_matching_search_solves_in_every_dialect():
    for dialect in itertools.product(*(tuple(words) for words in DIALECT.values())):
        (path,) = play(search(dialect), dialect=dialect).trajectories
        assert (path.fields["status"], path.turns) == ("solved", 3), dialect  # 18 moves, 8 in a list
        assert {status for _, status in path.written("tool_status")} == {"done", "solved"}
        assert all(path.written(name) for name in ("ran", "proposed"))
        figures = {name: metric(path) for name, metric in environment().workflow.metrics.items()}
        assert [figures[f"dialect_{aspect}"] for aspect in ASPECTS] == [1.0] * 4
        assert figures["program_is_search"] == 1.0


def test_a_program_that_misses_one_aspect_of_the_dialect_does_not_arrive():
    for place, aspect in enumerate(ASPECTS):
        for word in DIALECT[aspect]:
            if word != PLAIN[place]:
                wrong = (*PLAIN[:place], word, *PLAIN[place + 1 :])
                (path,) = play(search(wrong)).trajectories
                assert path.fields["status"] != "solved", word
    honest = earned(play(search(PLAIN)), "tool")
    assert honest == pytest.approx(1.8)
    blind, silent = search(PLAIN, expand="expand_inside"), search(PLAIN).replace(" found", "")
    for other in (blind, silent, "read agent_first from_0 up_minus walk", "read"):
        assert earned(play(other), "tool") <= 1e-9, other
    assert earned(play(search(PLAIN, pop="pop_last")), "tool") <= honest + 1e-9


def test_no_dialect_stands_in_two_splits_and_every_word_is_trained():
    splits = {split: set(combinations(split)) for split in ("train", "validation", "test")}
    assert [len(found) for found in splits.values()] == [15, 3, 6]
    assert len(set.union(*splits.values())) == 24
    for split in ("train", "test"):
        assert {words for dialect in splits[split] for words in dialect} == {word for known in DIALECT.values() for word in known}
    for split, found in splits.items():
        tasks = environment().tasks(split, 0, 4)
        assert {task.fields["instance"]["dialect"] for task in tasks} <= found
        assert len({task.fields["instance"]["rows"] for task in tasks}) == 4
    assert environment().tasks("test", 3, 1)[0].fields == environment().tasks("test", 2, 2)[1].fields


def test_the_map_is_told_in_its_dialect():
    state = {"rows": ("A#", "..", ".G"), "dialect": ("wall:x", "up:+", "goal:first", "from:1")}
    assert given(state) == "1 2 3 1\n.." + "\n..\n.x"
    assert given(state | {"dialect": PLAIN}) == "0 0 2 1\n.#\n..\n.."


def test_the_tool_sees_no_map_and_the_planner_no_wall():
    episode = play("read", "R")
    tool, planner = (episode.trajectories[0].by(role)[0].prompt for role in ("tool", "planner"))
    assert tool == "wall:# up:- agent:first from:0 t0 none tool"
    assert planner == "t0 D5 R5 |  unread planner"
    other = play("read", "R", rows=("A.....", "......", ".#....", "......", "......", ".....G"))
    assert [other.trajectories[0].by(role)[0].prompt for role in ("tool", "planner")] == [tool, planner]
    solo = play("", "R", options=(("agents", "single"),)).trajectories[0].by("solo")[0].prompt
    assert solo.startswith("t0 none D5 R5 #R1 #D1R1 #D2R1 ")
    assert solo.count("#") == sum(row.count("#") for row in ROWS)


def test_the_planner_adopts_repeats_or_moves_by_itself():
    adopting, repeating = play(search(PLAIN)), play(search(PLAIN), lambda turn: turn.fields["proposal"].strip("[]").replace(",", ""))
    assert [one.trajectories[0].turns for one in (adopting, repeating)] == [3, 3]
    proposal = adopting.trajectories[0].written("proposal")[0][1]
    assert proposal == "[D, D, D, D, R, R, U, U]"  # cut to what a list may hold
    nothing = play("read", "=").trajectories[0]
    assert nothing.fields["status"] == "unread"
    assert earned(play("read", "="), "planner") == pytest.approx(-4 * 0.1)
    strict = read_answer(8, adopt=False)
    for text in ("=", "R =", "R r", "walk", " ".join("R" * 9)):
        with pytest.raises(FormatError):
            strict(text)
    assert strict("R U")["steps"] == "RU"
    assert strict("")["steps"] == ""


def test_what_is_no_program_is_illegal_and_what_crashes_is_counted():
    for text in ("", "print", "read read hello", " ".join(["read"] * (PROGRAM_WORDS + 1))):
        with pytest.raises(FormatError):
            read_program(text)
    ends = {"loop": "error", "expand_free": "error", "read loop frontier": "error", "read": "silent", "U": "no_program"}
    for text, state in ends.items():
        assert play(text).trajectories[0].fields["ran"] == state, text
    assert program_tokenizer().decode(program_tokenizer().ids_of(list(LINES))).split() == list(LINES)


def test_nothing_that_a_planner_does_earns_more_than_arriving():
    honest = earned(play(search(PLAIN)), "planner")
    assert honest == pytest.approx(1.8)
    for planner in ("", "D U D U", lambda turn: "D" if turn.turn % 2 == 0 else "U", "U", "tool", "D", "D D D D R R U U U U U U"):
        assert earned(play("read", planner), "planner") < honest, planner
    assert earned(play("read", "D U"), "planner") == pytest.approx(0.0)


def test_a_tree_costs_n_t_k_responses_and_candidates_share_their_prompt():
    episode = play("read", "U", branching={"tool": 3, "planner": 3}, pick="greedy")
    calls = [event for event in episode.events() if isinstance(event, RoleCall)]
    assert len(calls) == 2 * 4 * 3
    groups = {call.group: set() for call in calls}
    for call in calls:
        groups[call.group].add(call.prompt_ids)
    assert {len(prompts) for prompts in groups.values()} == {1}


def test_prompts_fit_their_budgets_on_every_size_and_the_language_does_not_change():
    wide, ten = {"height": 16, "width": 16, "max_distance": 32}, {"agents": "single", "height": 10, "width": 10, "max_distance": 32}
    for options in ({}, wide, ten):
        made = plan_path_programs(**options)
        roles = Assignment(dict.fromkeys(made.workflow.roles, "s"), {"s": Scripted(made.script)})
        with Controller(made.workflow, roles, None, made.renderer) as controller:
            rollout = controller.play(made.tasks("test", 0, 3))
        assert not any(episode.aborted for episode in rollout.episodes)
        for path in rollout.trajectories:
            assert left(path.task.fields["instance"]["rows"]) >= 6
            for call in path.calls:
                role = made.workflow.roles[call.role]
                assert len(call.prompt_ids) <= role.max_prompt
                assert len(call.tokens) <= role.max_tokens
                assert 1 not in call.prompt_ids  # no unknown word
        assert made.renderer.tokenizer is program_tokenizer()
    with pytest.raises(WorkflowError, match="agents='two'"):
        plan_path_programs(agents="two")


def test_the_config_resolves_in_every_variant():
    for variant in ("", "10x10", "smoke"):
        config = importlib.import_module("experiments.configs.plan_path_programs").get_config(variant)
        with resolve(config) as plan:
            assert plan.recipe.sampling == "tree"
            assert set(plan.shapes) == {"tool", "planner"}
            assert plan.budgets == {"tool": (8, 13), "planner": (14, 9)}
