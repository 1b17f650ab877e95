"""docs/workflows.md: its example runs, is as short as promised, and does what the page says."""

import pathlib
import re

import numpy as np
import pytest
from wordy import Says

from marl_llm.algorithms import advantages_for, make_recipe
from marl_llm.workflows import to_mermaid

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "workflows.md"
BLOCKS = re.findall(r"<!-- example -->\n```python\n(.*?)```\n<!-- end -->", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def answer(prompt, request):
    draw = np.random.default_rng(request.seed).random()
    if prompt.endswith("one line."):
        return "from the source to the delta"
    return "the source" if draw < 0.5 else "source and delta"


@pytest.fixture(scope="module")
def page():
    names = {"generator": Says(answer)}
    for block in BLOCKS:
        exec(compile(block, str(PAGE), "exec"), names)
    return names


def test_a_team_of_three_roles_takes_at_most_sixty_lines():
    lines = [line for line in BLOCKS[0].splitlines() if line.strip()]
    assert len(BLOCKS) == 2
    assert len(lines) <= 60


def test_the_example_plays_and_pays_as_the_page_says(page):
    assert list(page["team"].roles) == ["planner", "writer", "critic"]
    assert len(page["rollout"].episodes) == 32
    ends = [way.fields["coverage"] for way in page["rollout"].trajectories]
    assert set(ends) == {0.5, 1.0}
    for way in page["rollout"].trajectories:
        rows = [s for s in page["table"].samples if s.call in way.calls]
        gains = [s.components["delta"] for s in rows if s.call.role == "writer"]
        assert sum(gains) == way.fields["coverage"]
        assert len(gains) == way.turns - 1
        assert [s.components["final"] for s in rows if s.call.role == "planner"] == [way.fields["coverage"]]
    assert page["figures"]["role/writer/well_formed"] == 1.0
    assert page["figures"]["team/coverage"] == np.mean(ends)


def test_its_rows_train_the_roles_that_have_a_policy(page):
    trained = {s.call.role for s in page["table"].trained("a")}
    assert trained == {"planner", "writer"}
    advantages, metrics, _ = advantages_for(make_recipe("grpo", group_size=4), page["columns"])
    assert np.isfinite(np.asarray(advantages)).all()
    assert int(metrics["samples"]) == len(page["table"].trained())


def test_every_name_of_the_page_exists():
    import marl_llm.workflows as room
    from marl_llm.workflows import metrics, replay, rewards, samples, storage

    text = (PAGE.parent / "team_rules.md").read_text(encoding="utf-8")
    known = {name for module in (room, metrics, replay, rewards, samples, storage) for name in dir(module)}
    parts = set(re.findall(r"^\| `(\w+)\(", text, re.M)) | {
        "write_trajectories",
        "replay",
        "report_episodes",
        "alternate",
    }
    assert len(parts) > 10
    assert parts <= known


def test_the_team_is_drawn(page):
    text = to_mermaid(page["team"])
    assert "complete?" in text
    assert "loop: at most 3 rounds" in text
