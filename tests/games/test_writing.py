"""Two writers: the reward by its levels and constants, what can game it and what `grounded` changes, loaders, styles, the small world."""

import dataclasses
import json
import math
import time

import pytest
from debates import SPEECH, Says, played, scores
from hypothesis import given, settings
from hypothesis import strategies as st

from marl_llm.games import make_game
from marl_llm.games.writing.notes import CONNECTIVES, CONSTANTS, SHARES, notes, notes_task, pairs_of, random_writer
from marl_llm.games.writing.reward import MOST, PAPER, RELEASE, TOTAL, Band, Constants, categories_in, coherence, words_of, writing_score
from marl_llm.games.writing.team import STYLES, two_parts, writing_roles, writing_team
from marl_llm.games.writing.transitions import CATEGORIES, STOP_WORDS
from marl_llm.workflows import Controller, FormatError, Task, WorkflowError, separate
from marl_llm.workflows.efficiency import critical_path_tokens
from marl_llm.workflows.rows import DataError
from marl_llm.workflows.samples import sample_table

TLDR = PAPER["tldr"]
POST = " ".join(f"word{i} river{i} stone{i}" for i in range(60))
FIRST = "stone1 word1 river1 word2 stone2 river2 river3 word3"
SECOND = " ".join(f"word{i} stone{i}" for i in range(3, 12)) + " because however if first indeed"


def word_salad(turn):
    """An adversary: different words without any bearing on the post, in lengths that fit, with five connectives."""
    salad = [f"{kind}{i}" for kind in "pq" for i in range(24)]
    return " ".join(salad[:10]) if turn.role.name == "first" else " ".join([*CONNECTIVES[:5], *salad[9:30]])


def score(first, second, constants=TLDR, post=POST):
    return writing_score(first, second, constants, post)


# ---- levels and constants


def test_a_pair_that_fits_earns_everything_and_each_level_ends_what_it_misses():
    full = score(FIRST, SECOND)
    assert full.level == 4
    assert full.components == pytest.approx(MOST)
    assert list(MOST.values()) == [0.5, 1.0, 0.5, 0.6, 0.4]
    assert full.total == pytest.approx(3.0)
    assert score("too short", SECOND).level == 1
    assert score("too short", SECOND).total == 0
    assert (score(FIRST, FIRST).level, score(FIRST, FIRST).total) == (2, 0.5)
    repeated = score(FIRST, "word1 " * 20)
    assert (repeated.level, repeated.total) == (3, 1.5 + 0.0 * repeated.total)


@pytest.mark.parametrize(
    ("value", "share"),
    [(1.0, None), (1.1, 0.0), (1.35, 0.5), (1.6, 1.0), (3.2, 1.0), (4.1, 0.5), (5.0, 0.0), (5.1, None)],
)
def test_a_band_is_full_inside_and_linear_to_its_ends(value, share):
    found = TLDR.length.share(value)
    assert found is None if share is None else found == pytest.approx(share)


def test_coherence_is_full_from_five_categories_and_for_arxiv_at_twelve_never_quite():
    assert [coherence(n, 0.6) for n in (0, 5)] == [0.0, 1.0]
    assert coherence(4, 0.6) == pytest.approx(0.6 * math.log(5))
    assert coherence(12, 0.4) == 1.0
    assert coherence(11, 0.4) < 1.0
    assert [coherence(n, 0.0) for n in (0, 1, 12)] == pytest.approx([0.0, 0.4, 0.95])


def test_the_release_can_reach_298_and_counts_stop_words_and_substrings():
    assert TOTAL - MOST["coherence"] * (1 - coherence(12, 0.0)) == pytest.approx(2.98)
    assert RELEASE["arxiv"].length == Band(0.8, 1.3, 1.6, 2.0)
    hidden = "word3 word4 word5 thusly ifs butter stone3 stone4 stone5 river3 river4 river5 stone6 stone7 word6 word7 x y"
    assert score(FIRST, hidden).components["coherence"] == 0
    assert score(FIRST, hidden, RELEASE["tldr"]).components["coherence"] > 0


def test_the_lists_have_twelve_categories_and_no_phrase_twice():
    phrases = [phrase for group in CATEGORIES.values() for phrase in group]
    assert len(CATEGORIES) == 12
    assert len(set(phrases)) == len(phrases) > 80
    assert all(phrase == phrase.casefold() for phrase in phrases)
    assert 90 < len(STOP_WORDS) < 140


def test_the_longest_phrase_counts_and_its_words_count_once():
    assert categories_in("so that it is in other words".split()) == {"cause_effect", "explanation"}
    assert categories_in("on the other hand".split()) == {"contrast"}
    assert categories_in("since then it rains".split()) == {"time"}  # "then" alone is a sequence
    assert categories_in("also life butter".split()) == {"elaboration"}
    assert categories_in("however however however".split()) == {"contrast"}


def test_options_that_mean_nothing_are_named():
    for options, message in (
        ({"cap": 0.0}, "cap=0.0 is not in"), ({"log_factor": -1.0}, "log_factor=-1.0 is negative"), ({"where": "x"}, "where='x'"),
        ({"length_in": "tokens"}, "length_in='tokens'"), ({"grounding": 2.0}, "grounding=2.0"), ({"own": ((5, 4), (1, 2))}, "own="),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(TLDR, **options)
    with pytest.raises(ValueError, match="low <= full_low <= full_high <= high is needed"):
        Band(1.0, 0.5, 2.0, 3.0)
    with pytest.raises(WorkflowError, match="style='both' is not one of"):
        writing_team(TLDR, writing_roles("tldr", "parallel"), "both")
    with pytest.raises(WorkflowError, match="task='news' is not one of tldr, arxiv"):
        make_game("writing", task="news")
    with pytest.raises(WorkflowError, match="constants='mine' is not one of"):
        make_game("writing", constants="mine")
    with pytest.raises(WorkflowError, match="train and test must name"):
        make_game("writing")


# ---- what can game it

GROUNDED = dataclasses.replace(TLDR, grounded=True)
_SOUNDS = " ".join(f"{a}{b}" for a in "bcdfg" for b in ("oo", "ee", "aa"))
SALAD = ("zig zag fig tag rag bag lag wag", f"{_SOUNDS} zig however because if first indeed")


def test_word_salad_earns_everything_from_the_paper_and_half_a_point_grounded():
    assert score(*SALAD).total == pytest.approx(3.0)
    assert (score(*SALAD, GROUNDED).level, score(*SALAD, GROUNDED).total) == (1, 0.5)
    assert score(FIRST, SECOND, GROUNDED).total == pytest.approx(3.0)


def test_one_good_pair_for_every_post_is_worth_it_only_where_it_belongs():
    assert score(FIRST, SECOND, TLDR, "another post on other things").total == pytest.approx(3.0)
    assert score(FIRST, SECOND, GROUNDED, "another post on other things").level == 1


def test_a_copy_of_the_posts_first_words_is_stopped_grounded():
    words = POST.split()
    copied = " ".join(words[:10]), " ".join(words[:25])
    assert score(*copied).level == 4
    assert score(*copied, GROUNDED).level == 1


def test_grounded_asks_both_texts_to_be_on_the_post_and_of_their_own_words():
    """Either half alone is wrong: word salad first or second, a copy first or second."""
    words = POST.split()
    for pair in ((SALAD[0], SECOND), (FIRST, SALAD[1]), (" ".join(words[:10]), SECOND), (FIRST, " ".join(words[:20]))):
        assert score(*pair).level > 1
        found = score(*pair, GROUNDED)
        assert (found.level, found.total) == (1, 0.5)
    assert score(FIRST, SALAD[1]).grounding == score(SALAD[0], SECOND).grounding == 0.0


def test_a_share_of_grounded_words_is_enough_at_its_bound():
    half = "word1 river1 stone1 word2 zig zag fig tag"
    found = {share: score(half, SECOND, dataclasses.replace(GROUNDED, grounding=share)).level for share in (0.5, 0.51)}
    assert found == {0.5: 4, 0.51: 1}


@pytest.mark.parametrize(("first", "second"), [(True, False), (False, True), (True, True), (False, False)])
def test_transitions_count_in_the_second_text_or_in_both_as_the_task_says(first, second):
    plain = "word1 word2 word3 word4 word5 word6 word7 word8 word9"
    pair = f"{plain} {'however' if first else ''}", f"{plain} stone1 stone2 stone3 {'because' if second else ''}"
    loose = dataclasses.replace(TLDR, length=Band(0.0, 0.0, 9.0, 9.0), unique=Band(0.0, 0.0, 9.0, 9.0))
    for where, count in (("second", int(second)), ("both", int(first) + int(second))):
        found = score(*pair, dataclasses.replace(loose, where=where)).components["coherence"]
        assert found == pytest.approx(MOST["coherence"] * coherence(count, 0.6)), where


def test_lengths_are_in_characters_or_words_and_unique_words_with_or_without_stop_words():
    """The second text has as many words as the first and three times its characters; half of its words are stop words."""
    first, second = "a1 b2 c3 d4 e5 f6 g7 h8", "longword1 longword2 longword3 longword4 the and of with"
    wide = dataclasses.replace(TLDR, length=Band(0.5, 0.9, 1.1, 1.5), unique=Band(0.3, 0.9, 1.1, 1.5))
    by_words = score(first, second, dataclasses.replace(wide, length_in="words", stop_words=True))
    assert (by_words.level, by_words.components["length_ratio"], by_words.components["unique_ratio"]) == (4, 1.0, 0.5)
    assert score(first, second, wide).level == 2  # twice the characters
    content = score(first, second, dataclasses.replace(wide, length_in="words"))
    assert content.components["unique_ratio"] == pytest.approx(0.5 * (0.5 - 0.3) / 0.6)


def test_consistency_is_shared_content_over_all_content_whichever_text_is_longer():
    shared = "word1 word2 word3 word4"
    few, many = f"{shared} zig zag fig tag", f"{shared} " + " ".join(f"own{i}" for i in range(12))
    loose = dataclasses.replace(TLDR, length=Band(0.0, 0.0, 99.0, 99.0), unique=Band(0.0, 0.0, 99.0, 99.0), cap=0.5)
    for pair in ((few, many), (many, few)):
        assert score(*pair, loose).components["consistency"] == pytest.approx(0.6 * (4 / 20) / 0.5)


def test_one_word_repeated_is_no_new_word_and_look_alikes_are_none_either():
    assert score(FIRST, "however " * 18).components["coherence"] == 0
    wide = FIRST.replace("word", "ｗｏｒｄ").replace("river", "ri\u200bver")
    assert score(FIRST, " ".join((FIRST, wide, wide))).level == 3
    assert words_of("a_b c-d") == ["a_b", "c", "d"]


@pytest.mark.parametrize("text", ["", "...", "? ! , ; : - _ ( )", "\u200b" * 50, "x" * 1_000_000, "word " * 200_000, "wörd " * 200_000])
def test_degenerate_texts_end_at_level_one_or_two_in_linear_time(text):
    began = time.process_time()
    assert score(text, text).total <= 0.5
    assert score(text, SECOND).total <= 0.5
    assert time.process_time() - began < 1.0


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=200), st.text(max_size=400), st.sampled_from([TLDR, PAPER["arxiv"], RELEASE["tldr"], GROUNDED, CONSTANTS]))
def test_any_texts_have_a_bounded_score(first, second, constants):
    found = score(first, second, constants)
    assert 0 <= found.total <= TOTAL + 1e-9
    assert all(0 <= value <= MOST[name] + 1e-9 for name, value in found.components.items())
    assert 0 <= found.total / TOTAL <= 1 + 1e-9


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(sorted(CATEGORIES)), max_size=8))
def test_another_category_never_earns_less(names):
    pays = [score(FIRST, " ".join([*SECOND.split()[:18], *(CATEGORIES[name][0] for name in names[:n])])) for n in range(len(names) + 1)]
    pays = [one.components["coherence"] for one in pays]
    assert all(a <= b + 1e-12 for a, b in zip(pays, pays[1:]))


# ---- loaders and styles


def test_files_are_read_by_their_field_and_a_row_without_text_is_named(tmp_path):
    def write(name, field, texts):
        (tmp_path / name).write_text("\n".join(json.dumps({field: text}) for text in texts))
        return str(tmp_path / name)

    train = write("train.jsonl", "prompt", [f"post {i}" for i in range(10)] + ["Held  OUT"])
    test = write("test.jsonl", "prompt", ["held out", "other"])
    with make_game("writing", train=train, test=test) as environment:
        found = {split: {task.fields["post"] for task in environment.tasks(split, 0, 20)} for split in ("train", "validation", "test")}
        assert [len(found[split]) for split in ("train", "validation", "test")] == [8, 2, 2]
        with pytest.raises(ValueError, match="unknown split 'dev'"):
            environment.tasks("dev", 0, 1)
    with pytest.raises(DataError, match="row 0: no text: a text is expected in 'abstract_text'; the row has prompt"):
        make_game("writing", train=train, test=test, task="arxiv")
    with pytest.raises(DataError, match="row 1: no text"):
        make_game("writing", train=write("gap.jsonl", "prompt", ["a", " "]), test=test)
    with pytest.raises(DataError, match="3 usable rows"):
        make_game("writing", train=write("few.jsonl", "prompt", ["a", "b", "c"]), test=test)


def test_each_style_lets_each_writer_read_what_it_may():
    seen = {}
    for style in STYLES:
        def says(turn):
            return f"mark-{turn.role.name}" if turn.role.name != "writer" else "mark-first ||| mark-second"

        rollout = played(writing_team(TLDR, writing_roles("tldr", style), style), [Task(0, {"post": POST})], says)
        calls = rollout.trajectories[0].calls
        seen[style] = [(c.role, "mark-first" in c.prompt, "mark-second" in c.prompt) for c in calls]
        assert all(POST in c.prompt for c in calls)
    both = [("first", False, False), ("second", False, False)]
    assert seen == {
        "single": [("writer", False, False)], "parallel": both, "sequential": [both[0], ("second", True, False)],
        "discussion": [*both, ("first", True, True), ("second", True, True)],
    }  # fmt: skip


def test_two_parts_need_one_marker_between_words():
    assert two_parts("|")("a | b") == {"first": "a", "second": "b"}
    for text in ("a b", "a | b | c", "| b", "a |", ""):
        with pytest.raises(FormatError):
            two_parts("|")(text)


def test_both_writers_are_paid_every_component_and_the_longer_text_is_the_critical_path():
    team = writing_team(TLDR, writing_roles("tldr", "parallel"))
    generator = Says(lambda prompt, request: SECOND if "detailed" in prompt else FIRST)
    with Controller(team, separate(team), generator, SPEECH) as controller:
        rollout = controller.play([Task(0, {"post": POST})])
    first, second = sample_table(rollout).samples
    assert first.team == second.team == pytest.approx(3.0)
    assert set(first.components) == set(MOST)
    assert critical_path_tokens(rollout.trajectories[0]) == max(first.response_ids.size, second.response_ids.size)


# ---- the small world


@pytest.mark.parametrize("task", ["tldr", "arxiv"])
@pytest.mark.parametrize("style", STYLES)
def test_the_small_worlds_script_speaks_in_known_words_within_the_budgets(style, task):
    environment = notes(style=style, task=task)
    rollout = played(environment.workflow, environment.tasks("test", 0, 15), environment.script, environment.renderer)
    for row in sample_table(rollout, training=()).samples:
        role = rollout.workflow.roles[row.call.role]
        assert 1 not in (*row.call.prompt_ids, *row.response_ids)  # <unk>
        assert len(row.call.prompt_ids) <= role.max_prompt
        assert row.response_ids.size <= role.max_tokens
        assert row.call.legal


def test_no_fact_of_one_split_is_one_of_another():
    pairs = {split: set(pairs_of(split)) for split in SHARES}
    assert sum(map(len, pairs.values())) == len(set.union(*pairs.values())) == 24 * 24
    for split in SHARES:
        facts = [fact.split() for fact in notes_task(split, 3, 7).fields["post"].split(" ; ")]
        assert 6 <= len(facts) <= 10
        assert all((first, second) in pairs[split] for first, _, second in facts)
    with pytest.raises(ValueError, match="unknown split 'dev'"):
        notes().tasks("dev", 0, 1)


def test_the_floors_are_high_without_grounding_and_low_with_it():
    found = {}
    for grounded in (False, True):
        environment = notes(grounded=grounded)
        for name, player in (("script", environment.script), ("random", random_writer), ("salad", word_salad)):
            values = scores(played(environment.workflow, environment.tasks("test", 0, 40), player, environment.renderer), "return")
            found[name, grounded] = sum(values) / len(values)
    assert found["random", False] > 0.5
    assert found["salad", False] > 0.95
    assert found["random", True] < 0.25
    assert found["salad", True] < 0.25
    assert 0.25 < found["script", False] < 0.5


def test_two_parts_of_one_length_fit_under_arxivs_constants_and_halve_the_critical_path():
    """One play whose two parts restate the same facts: TLDR's reward stops at the lengths, arXiv's pays everything but coherence."""
    def six(turn):
        return " ".join(turn.fields["post"].split(" ; ")[:6])

    for task, structure in (("tldr", 0.25), ("arxiv", 1.0)):
        environment = notes(task=task)
        (path,) = played(environment.workflow, environment.tasks("test", 0, 1), six, environment.renderer).trajectories
        metrics = {name: figure(path) for name, figure in environment.workflow.metrics.items()}
        assert metrics["structure"] == pytest.approx(structure)
        assert metrics["consistency"] == pytest.approx(float(structure == 1.0))
        assert metrics["sampled_tokens"] == 2 * metrics["critical_path_tokens"]
    found = [scores(played(environment.workflow, environment.tasks("test", 0, 40), player, environment.renderer), "return")
             for player in (environment.script, environment.random_player)]  # fmt: skip
    assert sum(found[1]) / 40 < 0.25 < sum(found[0]) / 40 < 0.45
    with pytest.raises(WorkflowError, match="task='letters' is not one of tldr, arxiv"):
        notes(task="letters")


def test_constants_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        TLDR.cap = 1.0
    assert isinstance(CONSTANTS, Constants)
