"""Runs of workflows in one table and one picture: the right figures from the right files, and plain words for what is missing."""

import json
import subprocess
import sys

import pytest

from marl_llm.cli import collect
from marl_llm.cli.collect import check_picture, curve, draw, group_runs, headline, read_groups, table
from marl_llm.runs.base import ConfigError
from marl_llm.runs.figures import band, draw_figure, role_rewards, turns
from marl_llm.runs.reported import DOMAINS, TABLE_6, TABLES, TABLES_7_8, reported


def part(success, turns=1.5):
    return {"success": success, "turns": turns, "interval": [success - 0.1, success + 0.05]}


def write_run(folder, after, sampled_tokens, untrained=0.2):
    """Two steps; validation rises from 0.1 to `after` and is measured at 0 and 2."""
    folder.mkdir()
    pairs = {"answer untrained": part(untrained)}
    kinds = {"before": part(0.1, 2.0), "after": part(after), "pairs": pairs}
    sampled = {"before": part(0.05, 3.0), "after": part(after / 2, 2.0), "pairs": {"answer untrained": part(untrained / 2)}}
    evaluation = {"headline": "f1", "seed": 0, "steps": 2, "train_wall_s": 10.0, **kinds, "sampled": sampled}
    (folder / "evaluation.json").write_text(json.dumps(evaluation))
    lines = [{"phase": "sft", "step": 1}, {"phase": "eval", "step": 0, "success": 0.1}]
    lines += [{"phase": "train", "step": n, "sampled_tokens": n * sampled_tokens // 2} for n in (1, 2)]
    lines += [{"phase": "eval", "step": 2, "success": after}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture
def groups(tmp_path):
    a0, a1 = write_run(tmp_path / "a0", 0.5, 1000), write_run(tmp_path / "a1", 0.7, 1000)
    b0 = write_run(tmp_path / "b0", 0.9, 4000)
    return read_groups([f"A:{a0},{a1}", f"B:{b0}"])


def test_the_table_has_means_spreads_gains_and_the_figure_at_equal_tokens(groups):
    head, _, a, b = table(groups).splitlines()

    def cells(row):
        return [cell.strip() for cell in row.strip("|").split("|")]

    named = dict(zip(cells(head), cells(a)))
    assert len(cells(head)) == len(cells(a)) == len(cells(b))
    assert named["seeds"] == "2"
    assert named["greedy after"] == "0.600 [0.500, 0.700]"
    assert cells(a)[4] == "0.500 [0.400, 0.600]"  # the gain of greedy play
    assert named["turns sampled"] == "3.00 → 2.00"
    assert named["one role untrained: greedy / sampled"] == "answer 0.200 / 0.100"
    assert "validation at 1,000 tokens" in named
    assert cells(b)[3] == "0.900 [0.800, 0.950]"  # of a single run its interval over tasks
    assert dict(zip(cells(head), cells(b)))["validation at 1,000 tokens"] == "0.300"  # a quarter of the way from 0.1 to 0.9
    assert named["sampled tokens"] == "1,000"


def test_sampled_figures_stand_in_the_table_where_every_run_has_them(groups):
    del groups["B"][0]["evaluation"]["sampled"]
    head = table(groups).splitlines()[0]
    assert "greedy after" in head
    assert "sampled after" not in head


def test_the_headline_figure_has_its_name(groups):
    assert headline(groups) == "headline figure: f1"
    groups["B"][0]["evaluation"]["headline"] = "solved"
    assert headline(groups) == "headline figures: A: f1, B: solved"


def test_curves_go_over_steps_or_tokens_and_are_drawn(groups, tmp_path):
    assert curve(groups["B"][0], "step") == ([0.0, 2.0], [0.1, 0.9])
    assert curve(groups["B"][0], "sampled_tokens") == ([0.0, 4000.0], [0.1, 0.9])
    draw(groups, "sampled_tokens", tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_column_says_what_the_paper_reports_where_it_reports_anything(groups):
    assert reported("plan_path_programs", "at_grpo_shared") == "96.0 (1.7B), 93.0 (8B)"
    assert (reported("sudoku", "single"), reported("sokoban_text", "team_grpo")) == ("7.0 (1.7B), 48.0 (8B)", "1.0 (1.7B), 30.0 (8B)")
    assert (reported("plan_path", "imitation"), reported("functions", "team")) == ("", "")
    assert reported("function_debate", "single").startswith("11.6 lcb, 16.2 apps, 3.6 codecontests (1.7B), 22.8 lcb")
    assert all(len(row) == len(DOMAINS) for rows in TABLES.values() for row in rows.values())
    assert all(len(row) == 6 for rows in TABLES_7_8.values() for row in rows.values())
    assert all(len(row) == 3 for row in TABLE_6.values())


def test_each_table_of_the_paper_has_its_own_figures():
    assert reported("plan_path_programs", "tool_alone", "4") == "11.0 (1.7B)"
    assert (reported("sudoku", "tool_alone", "4"), reported("plan_path", "swapped", "4")) == ("", "")
    for variant in ("single", "team"):  # the paper prints those of Sokoban and Sudoku exchanged
        for game in ("sudoku_text", "sokoban", "plan_path"):
            assert reported(game, variant).endswith(reported(game, variant, "6"))
    assert reported("sokoban", "at_grpo_outcome", "6") == "93.0 (8B)"
    large = "16.7 aime24, 23.3 aime25, 51.2 olympiad (8B)"
    assert reported("sums", "again_grpo", "7") == f"6.67 aime24, 3.3 aime25, 16.9 olympiad (1.7B), {large}"
    assert (reported("sudoku", "once", "7"), reported("sums", "once")) == ("", "")
    assert (reported("sums_ensemble", "at_grpo_7", "figure5"), reported("sums_ensemble", "grpo_3", "figure5")) == ("47.7 aime24 (8B)", "")


def test_a_column_stands_where_a_group_has_a_text(groups):
    head, _, a, b = table(groups, {"the paper reports": {"A": "96.0 (1.7B)", "B": ""}}).splitlines()
    assert head.endswith("| the paper reports |")
    assert (a.endswith("| 96.0 (1.7B) |"), b.endswith("| – |")) == (True, True)
    assert table(groups, {"the paper reports": {"A": "", "B": ""}}) == table(groups)


def test_the_figures_of_roles_and_turns_have_a_band_over_the_seeds(tmp_path):
    def run(rewards):
        lines = [{"phase": "train", "step": n, "turns": 4.0 - n, "role/tool/reward": r} for n, r in enumerate(rewards, 1)]
        return {"metrics": [{"phase": "eval", "step": 0}, *lines], "evaluation": {}}

    seeds = [run([1.0, 2.0, 3.0]), run([5.0, 5.0, 5.0, 7.0])]
    steps, scores = role_rewards(seeds[0])["tool"]
    assert steps.tolist() == [1, 2, 3]
    assert scores.tolist() == pytest.approx([-1.224745, 0.0, 1.224745], abs=1e-5)
    assert role_rewards(run([2.0, 2.0]))["tool"][1].tolist() == [0.0, 0.0]
    steps, mean, low, high = band([turns(seed) for seed in seeds])
    assert (steps.tolist(), mean.tolist(), low.tolist(), high.tolist()) == ([1, 2, 3], *[[3.0, 2.0, 1.0]] * 3)
    for figure in ("roles", "turns"):
        draw_figure({"a": seeds}, figure, tmp_path / f"{figure}.png")
        assert (tmp_path / f"{figure}.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="no reward per role"):
        draw_figure({"a": [{"metrics": []}]}, "roles", tmp_path / "x.png")
    with pytest.raises(ConfigError, match="without training steps"):
        draw_figure({"a": [{"metrics": []}]}, "turns", tmp_path / "x.png")


def test_what_is_no_run_is_told(tmp_path):
    with pytest.raises(ConfigError, match="--group='runs/a' is not like 'shared:runs/s0,runs/s1'"):
        read_groups(["runs/a"])
    with pytest.raises(ConfigError, match="nothing is no finished run: .*evaluation.json"):
        read_groups([f"A:{tmp_path / 'nothing'}"])


def test_runs_can_be_named_one_by_one_and_those_that_differ_in_the_seed_alone_are_one_group(tmp_path):
    for name, seed, recipe in (("a0", 0, "grpo"), ("a1", 1, "grpo"), ("b0", 0, "ppo")):
        write_run(tmp_path / name, 0.5, 1000)
        (tmp_path / name / "config.json").write_text(json.dumps({"config": {"seed": seed, "recipe": {"name": recipe}}}))
    runs = [str(tmp_path / name) for name in ("a0", "b0", "a1")]
    assert group_runs(runs) == [f"a0:{runs[0]},{runs[2]}", f"b0:{runs[1]}"]
    done = subprocess.run([sys.executable, "-m", "marl_llm", "collect", *runs], capture_output=True, text=True, timeout=120, check=True)
    assert "| a0 | 2 |" in done.stdout
    assert "of several the smallest and the largest seed, which is no interval" in done.stdout
    with pytest.raises(ConfigError, match="gone is no run directory"):
        group_runs([str(tmp_path / "gone")])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"before": 3}, "before.success is missing, or not a number"),
        ({"after": {"success": "x", "turns": 1}}, "after.success is missing, or not a number"),
        ({"after": {"success": 1.0}}, "after.turns is missing"),
        ({"pairs": []}, "its pairs must be objects"),
        ({"sampled": None}, "must be objects"),
        ({"random": []}, "random.success is not a number"),
        ({"before": {"success": 1.0, "turns": 1.0, "interval": [None]}}, "before.interval is not a pair"),
        ({"train_wall_s": "x"}, "train_wall_s is not a number"),
    ],
)
def test_an_evaluation_of_other_types_is_named_by_file_and_field(tmp_path, change, message):
    run = write_run(tmp_path / "a", 0.5, 1000)
    path = run / "evaluation.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match=rf"a/evaluation\.json: .*{message}"):
        table(read_groups([f"A:{run}"]))


def test_lines_of_other_types_take_no_run_away(tmp_path):
    run = write_run(tmp_path / "a", 0.5, 1000)
    before = table(read_groups([f"A:{run}"]))
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"phase": "eval", "step": "x"}\n{"phase": [], "step": 1}\n{"phase": "train", "step": 9, "sampled_tokens": {}}\n')
    assert table(read_groups([f"A:{run}"])) == before


def test_runs_of_other_roles_are_one_group_of_what_they_share(tmp_path):
    """Of one whose sampled figures lack a pair too."""
    runs = [write_run(tmp_path / name, 0.5, 1000) for name in ("a", "b")]
    path = runs[1] / "evaluation.json"
    evaluation = json.loads(path.read_text())
    evaluation["pairs"] = {"coder untrained": part(0.2)} | evaluation["pairs"]
    path.write_text(json.dumps(evaluation))
    for order in (runs, runs[::-1]):
        assert "| answer 0.200 / 0.100 |" in table(read_groups([f"A:{order[0]},{order[1]}"]))
    path.write_text(json.dumps(evaluation | {"pairs": {"coder untrained": part(0.2)}}))
    for order in (runs, runs[::-1]):
        head, _, row = table(read_groups([f"A:{order[0]},{order[1]}"])).splitlines()
        assert dict(zip(head.split(" | "), row.split(" | ")))["one role untrained: greedy / sampled"] == "–"

    def drawn(*rewards):
        return {"metrics": [{"phase": "train", "step": 1, f"role/{role}/reward": value} for role, value in rewards]}

    seeds = [drawn(("tool", 1.0), ("planner", 2.0)), drawn(("coder", 1.0), ("planner", 3.0))]
    draw_figure({"a": seeds}, "roles", tmp_path / "roles.png")
    with pytest.raises(ConfigError, match="none of a role that all runs of a group have"):
        draw_figure({"a": [drawn(("tool", 1.0), ("planner", "x")), seeds[1]]}, "roles", tmp_path / "x.png")
    assert not (tmp_path / "x.png").exists()


def test_a_step_whose_tokens_are_in_no_line_is_left_out_of_its_own_curve_alone(tmp_path, monkeypatch):
    whole, cut = write_run(tmp_path / "a", 0.5, 1000), write_run(tmp_path / "b", 0.7, 1000)
    for run in (whole, cut):
        with open(run / "metrics.jsonl", "a") as file:
            file.write('{"phase": "train", "step": 4, "sampled_tokens": 2000}\n{"phase": "eval", "step": 4, "success": 0.9}\n')
    lines = (cut / "metrics.jsonl").read_text().splitlines()
    (cut / "metrics.jsonl").write_text("\n".join(line for line in lines if '"train", "step": 2' not in line))
    (run,) = read_groups([f"A:{cut}"])["A"]
    assert curve(run, "sampled_tokens") == ([0.0, 2000.0], [0.1, 0.9])
    assert curve(run, "step") == ([0.0, 2.0, 4.0], [0.1, 0.7, 0.9])
    lines = []
    monkeypatch.setattr("matplotlib.axes.Axes.plot", lambda axes, x, y, **style: lines.append((x, y)))
    monkeypatch.setattr("matplotlib.axes.Axes.legend", lambda axes: None)
    draw(read_groups([f"A:{whole},{cut}"]), "sampled_tokens", tmp_path / "curves.png")
    assert lines[-1] == ([0.0, 2000.0], pytest.approx([0.1, 0.9]))  # the mean, at the steps that both have
    (cut / "metrics.jsonl").write_text('{"phase": "train", "step": 1, "sampled_tokens": 5}\n{"phase": "eval", "step": 2, "success": 0.2}\n')
    assert "validation at 2,000 tokens" in table(read_groups([f"A:{whole},{cut}"]))


def test_a_picture_that_cannot_be_is_told_before_the_table(tmp_path, capsys):
    run = write_run(tmp_path / "a", 0.5, 1000)
    refusals = [("x.xyz", "must end in .png"), ("x", "must end in .png"), ("no/x.png", "there is no directory")]
    for name, message in refusals:
        with pytest.raises(ConfigError, match=f"--picture={tmp_path / name}.*{message}"):
            check_picture(str(tmp_path / name))
    check_picture(str(tmp_path / "x.PNG"))
    refusals = [("--picture=x.xyz", "must end in"), ("--axis=step", "--axis would have"), ("--figure=roles", "--figure would have")]
    for given, message in [*refusals, ("--axis=step --figure=turns --picture=x.png", "--axis would have")]:
        collect.FLAGS.unparse_flags()
        collect.FLAGS(["collect", f"--group=A:{run}", *given.split()])
        with pytest.raises(ConfigError, match=message):
            collect.main([])
    for name in collect.FLAGS:
        collect.FLAGS[name].unparse()
    assert capsys.readouterr().out == ""
