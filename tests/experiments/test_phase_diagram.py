"""The phase diagram of a team against a single agent: cells from learning curves, and configs that can be swept."""

import pytest

from benchmarks.phase_diagram import PLAYERS, cell_of, config_of, draw
from marl_llm.runs.resolve import resolve

SINGLE = [([0, 200], [0.2, 0.4]), ([0, 200], [0.2, 0.2])]


def curves(*ends):
    """From .2 at the start to these figures at 100 tokens."""
    return [([0, 100], [0.2, end]) for end in ends]


@pytest.mark.parametrize(
    ("ends", "differences", "better"),
    [((0.6, 0.8), (0.15, 0.3), "undecided"), ((0.8, 0.7), (0.25, 0.25), "team"), ((0.1, 0.0), (-0.1, -0.1), "single")],
)
def test_a_cell_is_the_difference_over_seeds_at_equal_tokens(ends, differences, better):
    cell = cell_of(50.0, curves(*ends), SINGLE)
    half = 12.7062 * abs(differences[0] - differences[1]) / 2  # Student's t with one degree of freedom
    mean = sum(differences) / 2
    assert [cell[name] for name in ("difference", "low", "high")] == pytest.approx([mean, mean - half, mean + half], abs=1e-4)
    assert (cell["better"], cell["seeds"], cell["tokens"]) == (better, 2, 50)


def test_both_players_have_equally_large_models_and_as_many_samples_per_minibatch():
    sizes = []
    for player in PLAYERS:
        with resolve(config_of(player, "split", 4, 2, "shared")) as plan:
            sizes.append((len(plan.shapes), {shape.parameters for shape in plan.shapes.values()}, plan.recipe.group_size))
    assert sizes[0] == sizes[1]
    assert sizes[0][0] == 1


def test_the_picture_has_a_row_for_each_view_and_side(tmp_path):
    cells = [
        {"view": view, "side": side} | cell_of(tokens, curves(0.6, 0.8), SINGLE)
        for view in ("full", "split")
        for side in (4, 6)
        for tokens in (0.0, 50.0)
    ]
    draw(cells, tmp_path / "diagram.png")
    assert (tmp_path / "diagram.png").read_bytes().startswith(b"\x89PNG")
