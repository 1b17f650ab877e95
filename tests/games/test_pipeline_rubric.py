"""What the rubric of a pipeline says of single actions: repetitions, files that are missing, who wrote last, and a submission's fault."""

import dataclasses

import numpy as np
import pytest

from marl_llm.games.pipeline import FileFacts, blame, pipeline_rubric
from marl_llm.games.pipeline.prompts import data_roles
from marl_llm.games.pipeline.rubric import Action
from marl_llm.games.pipeline.team import SUBMISSION
from marl_llm.tools.sandbox import Workspace
from marl_llm.workflows import ActionView, RoleCall, ToolUse

OWED = {"engineer": ("a", "b", "c"), "modeler": ("model",), "analyst": (SUBMISSION,)}
ENGINEER = data_roles()[0]
GIVEN = Workspace.from_files({"train.csv": "1"})


def facts(submission="", well=False):
    """Files that hold the text "bad" cannot be used. `submission`: why it is invalid."""
    def found(given, files):
        return {file: "is bad" for file, text in files.files().items() if text == b"bad"}

    return FileFacts(OWED, found, lambda given, files: submission, lambda role, given, files: well)


def call(number, role, text="program"):
    none = np.zeros(0, np.int32)
    about = dict(id=f"{role}:{number}", node=role, role=role, agent=0, model="m", parents=(), turn=number, request_number=number, items=())
    about |= dict(group="g", choice=0, branch=0, seed=(), prompt="", prompt_ids=(), text=text, tokens=none, log_probs=None)
    return RoleCall(**about, sampled_log_probs=None, finish="stop", version=0, writes={"code": text}, illegal=None)


def run(role, files, state="ok", error=""):
    wrote = {"files": Workspace.from_files({"train.csv": "1", **files}), "state": state, "error": error}
    return ToolUse(f"run_{role}:0", f"run_{role}", (), 1, 0, (), 0, wrote)


def actions(*steps):
    """Of (role, files that it leaves, state, error)."""
    found, before = [], GIVEN
    for number, (role, files, *rest) in enumerate(steps):
        found.append(Action(call(number, role), run(role, files, *rest), before))
        before = found[-1].after
    return found


def score_of(files, earlier=(), well=False):
    view = ActionView("w", ENGINEER, call(9, "engineer"), {"given": GIVEN}, earlier=tuple(earlier), observations=(run("engineer", files),))
    return pipeline_rubric(facts(well=well))(view)[0]


@pytest.mark.parametrize(("files", "want"), [("", 2.0), ("a", 4.0), ("ab", 6.0), ("abc", 8.0)])
def test_a_run_is_scored_by_the_share_of_the_files_that_its_role_owes(files, want):
    assert score_of(dict.fromkeys(files, "good")) == want
    assert score_of(dict.fromkeys(files, "good"), well=True) == (9.0 if want == 8.0 else want)
    assert score_of(dict.fromkeys(files, "good") | dict.fromkeys(set("abc") - set(files), "")) == want  # an empty file is none


@pytest.mark.parametrize("times", [1, 2, 5])
def test_each_repetition_of_an_identical_program_costs_one_down_to_nothing(times):
    again = [event for n in range(times) for event in (call(n, "engineer"), run("engineer", {}))]
    assert score_of(dict.fromkeys("abc", "good"), again) == 8.0 - times
    assert score_of({}, again) == max(0.0, 2.0 - times)
    others = [dataclasses.replace(one, text="another") if isinstance(one, RoleCall) else one for one in again]
    assert score_of(dict.fromkeys("abc", "good"), others) == 8.0


def test_the_action_that_wrote_a_bad_file_last_is_to_blame():
    files = {"a": "bad", "b": "good", "c": "good"}
    fails = ("modeler", files, "error", "ValueError: shapes")
    first, second = ("engineer", files | {"a": "fine"}), ("engineer", files)
    assert list(blame(actions(first, second, fails), GIVEN, facts(), over=False)) == ["engineer:1"]
    untouched = ("engineer", files | {"d": "more"})  # writes another file and leaves the bad one as it is
    assert list(blame(actions(second, untouched, fails), GIVEN, facts(), over=False)) == ["engineer:0"]


def test_an_invalid_submission_is_blamed_on_its_writer_or_on_what_the_writer_was_given():
    good = dict.fromkeys("abc", "good")
    end = {**good, "model": "good", SUBMISSION: "ids"}
    steps = [("engineer", good), ("modeler", {**good, "model": "good"}), ("analyst", end)]
    invalid = facts(submission="ids are missing")
    assert blame(actions(*steps), GIVEN, invalid, over=True) == {"analyst:2": f"{SUBMISSION}: ids are missing"}
    assert blame(actions(*steps), GIVEN, facts(), over=True) == {}
    assert blame(actions(*steps), GIVEN, invalid, over=False) == {}  # nobody knows yet whether it is the last
    bad = [("engineer", good), ("modeler", {**good, "model": "bad"}), ("analyst", {**end, "model": "bad"})]
    assert blame(actions(*bad), GIVEN, invalid, over=True) == {"modeler:1": "model: is bad"}
    none = [*steps[:2], ("analyst", {**end, SUBMISSION: ""})]
    assert blame(actions(*none), GIVEN, invalid, over=True) == {}
