"""report.html: complete, honest about what is missing, and self-contained. Hostile runs: test_hostile_runs.py."""

import base64
import json
import re
import subprocess
import sys
import warnings

import pytest
import stored

from marl_llm.reporting import EpisodeWriter, MetricsWriter, WriteError, formats
from marl_llm.viewing import StoredRun, ViewError, charts, write_report
from marl_llm.viewing.command import main
from marl_llm.viewing.summary import pairs, summary


def write_metrics(folder, records):
    folder.mkdir(parents=True, exist_ok=True)
    with MetricsWriter(folder, tensorboard=False) as writer:
        for record in records:
            writer.write(record)


def make_run(folder, ended=True, steps=30):
    """The files of a run of the roles guide and walker, as far as they are written while it goes on, or when it has `ended`."""
    plays = [stored.play("train-6/9/0", 9, step=6)]
    plays += [stored.play(f"{when}-{i}/0", i, when, steps, score=0.5) for when in ("before", "after") for i in range(5)] if ended else []
    stored.make_run(folder, plays)
    config = {"config_file": "experiments/configs/quickstart.py", "seed": 3, "commit": "abc1234", "command": "python -m x",
              "hardware": {"cpu": 2}, "config": {"assignment": {"guide": "big", "walker": "small"}}}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "metrics.jsonl").unlink()
    records = [{"phase": "sft", "step": step, "loss": 3.0 / step} for step in range(1, 6)]
    for step in range(steps + 1):
        success = 0.1 + step / 100
        figures = {"turns": 3.0, "wall_s": 0.5 * step, "time/sample": 0.2, "time/update": 0.1, "time/other": 0.1}
        for role, model in (("guide", "big"), ("walker", "small")):
            for key in ("reward", "team", "local", "entropy", "zero_variance", "well_formed", "mixed_groups", "component/progress"):
                figures[f"role/{role}/{key}"] = 0.5
            for key, value in (("log_prob_gap", 1e-6), ("grad_norm", 0.5), ("clip_fraction", 0.01)):
                figures[f"model/{model}/{key}"] = value
        if step:
            records.append({"phase": "train", "step": step, "success": success, **figures})
        if step % 10 == 0:
            ends = {"success_low": success - 0.05, "success_high": success + 0.05}
            records.append({"phase": "eval", "step": step, "success": success, "turns": 3.5, **ends})
    write_metrics(folder, records)
    if ended:
        part = {"interval": [0.1, 0.4], "episodes": 500, "aborted": 2, "turns": 3.0, "roles": {"walker": {"well_formed": 0.07}}}
        found = {name: {"success": x, **part} for name, x in (("before", 0.255), ("after", 0.904), ("swapped", 0.013))}
        found |= {"pairs": {"guide=trained, walker=untrained": {"success": 0.425, **part}}, "random": {"success": 0.012}}
        gain = {"difference": 0.4, "interval": [0.25, 0.55]}
        (folder / "evaluation.json").write_text(json.dumps(found | {"headline": "all_passed", "steps": steps, "gain": gain}))
    return folder


def summary_of(folder):
    run = StoredRun(folder)
    return summary(run, run.rows())


def data_of(path):
    return json.loads(re.search(r'id="data">(.*?)</script>', path.read_text())[1])


def test_the_report_of_a_run_holds_all_its_figures(tmp_path):
    path = write_report(make_run(tmp_path / "run"))
    data = data_of(path)
    shown = data["of"][0]["summary"]
    text = re.sub(r"\s+", " ", json.dumps(shown, ensure_ascii=False))
    for words in (
        "quickstart", "abc1234", "python -m x", "cpu 2", "step 30 · 15 s", "25.5 % before training, 90.4 % after",
        "10.0–40.0 %, 500 episodes", "task by task +40.0 points (interval +25.0 to +55.0)", "sample 50 %", "Band: 95 % interval",
        '"All passed, before → after", "25.5 % → 90.4 %", "after: 10.0–40.0; well-formed: walker 7 %"',
        '"Turns, before → after", "3.00 → 3.00"', '"Random play", "1.2 %", "all passed of random play"',
        '"Roles swapped", "1.3 %", "well-formed: walker 7 %"', '"guide=trained, walker=untrained", "42.5 %", "10.0–40.0"',
        '"500 2 aborted", "walker 7 %"', '"walker", "small", "–", "0.5", "0.5", "50.0 %"',
    ):  # fmt: skip
        assert words in text, words
    assert shown["alarms"] == shown["absent"] == []
    drawn = {chart["name"]: chart for _, group in shown["charts"] for chart in group}
    assert list(drawn) == ["success", "turns", "rewards_guide", "rewards_walker", "sft", "entropy", "zero_variance", "well_formed",
                           "log_prob_gap", "grad_norm", "clip_fraction", "mixed_groups", "time"]  # fmt: skip
    assert all(chart["lines"] for chart in drawn.values())
    assert [line["name"] for line in drawn["success"]["lines"]] == ["", "sampled, while training", "evaluation, fresh instances"]
    assert drawn["success"]["lines"][2]["band"][0] == [0, 0.05, 0.15]
    assert drawn["time"]["lines"][2]["band"][0] == [1, 0.3, 0.4]
    assert shown["pairs"] == [{when: f"{when}-{i}/0" for when in ("before", "after")} for i in range(3)]
    assert data["view"] == "summary"
    assert data["of"][0]["play"].keys() >= {"before-0/0", "after-2/0", "train-6/9/0"}
    assert {png.stem for png in (path.parent / "plots").iterdir()} == set(drawn)
    assert all(png.read_bytes().startswith(b"\x89PNG") for png in (path.parent / "plots").iterdir())


def test_a_run_that_goes_on_has_a_report_that_says_so(tmp_path):
    make_run(tmp_path, ended=False, steps=10)
    for name in ("metrics.jsonl", "episodes.jsonl"):
        with open(tmp_path / name, "a") as file:
            file.write('{"phase": "train", "st')  # a line that is being written
    before = {name: (tmp_path / name).read_bytes() for name in ("metrics.jsonl", "episodes.jsonl", "config.json")}
    assert main([str(tmp_path), "--report"]) == 0
    shown = data_of(tmp_path / "report.html")["of"][0]["summary"]
    said = "Found on evaluation instances: 10.0\u00a0% before training, 20.0\u00a0% after 10 steps so far (interval 15.0–25.0\u00a0%)."
    assert shown["lead"] == said
    assert shown["tiles"][0][2] == "after: 15.0–25.0; from the evaluation curve: the run has not ended"
    assert (shown["absent"], shown["alarms"]) == (["evaluation.json"], [])
    assert before == {name: (tmp_path / name).read_bytes() for name in before}


def test_a_run_that_has_just_begun_says_what_it_lacks(tmp_path):
    write_metrics(tmp_path, [{"phase": "train", "step": 1, "success": 0.25, "role/tool/entropy": float("nan")}])
    write_report(tmp_path)
    shown = summary_of(tmp_path)
    assert shown["absent"] == ["config.json", "evaluation.json", "episodes.jsonl"]
    assert shown["alarms"] == ["Lines of metrics.jsonl with NaN or infinity: 1, first at step 1: role/tool/entropy."]
    (entropy,) = [chart for _, group in shown["charts"] for chart in group if chart["name"] == "entropy"]
    assert (entropy["lines"], entropy["absent"]) == ([], "metrics.jsonl holds no number under `role/<role>/entropy` in its train lines.")
    assert [png.name for png in (tmp_path / "plots").iterdir()] == ["success.png"]


WRONG_TYPES = b'{"before": 3, "pairs": [1], "after": {"success": "high"}, "assignment": 4, "name": [2]}'


@pytest.mark.parametrize("junk", [b"", b"{", b"[]", b"\xff\xfe", WRONG_TYPES, b"null"])
def test_damaged_files_never_stop_the_report(tmp_path, junk):
    for name in ("config.json", "metrics.jsonl", "evaluation.json", "episodes.jsonl"):
        (tmp_path / name).write_bytes(junk + b"\n" + junk + b"\n")
    assert write_report(tmp_path, pictures=False).exists()


def test_damaged_lines_are_alarms_and_the_rest_is_shown(tmp_path):
    make_run(tmp_path)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('oops\n{"phase": "train", "step": "x", "success": []}\n')
    with open(tmp_path / "episodes.jsonl", "a") as file:
        file.write('{"episode": 1}\n')
    shown = summary_of(tmp_path)
    assert [bool(re.search(r"metrics.jsonl, line \d+: not JSON", alarm)) for alarm in shown["alarms"]] == [False, True]
    assert len(shown["pairs"]) == 3
    assert "90.4" in shown["lead"]


def test_the_gap_alarm_reads_each_models_bound_and_a_model_without_gradient_is_named(tmp_path):
    bound = {"model/half/log_prob_gap_bound": 0.25, "model/half/log_prob_gap": 0.017}
    gaps = [{"model/a/log_prob_gap": gap, "model/a/grad_norm": 1.0, "model/b/grad_norm": 0.0} | bound for gap in (1e-6, 3e-4, 2e-4)]
    write_metrics(tmp_path, [{"phase": "train", "step": step} | gap for step, gap in enumerate(gaps, 1)])
    shown = summary_of(tmp_path)
    assert shown["alarms"] == [
        "The log-probs of a differ between sampler and scorer by up to 0.0003 nats (alarm: 0.0001), first at step 2.",
        "b never got a gradient: its gradient norm is zero at every step.",
    ]
    (gap,) = [chart for _, group in shown["charts"] for chart in group if chart["name"] == "log_prob_gap"]
    assert gap["levels"] == [[1e-4, "alarm of b"], [0.25, "alarm of half"]]


def test_an_evaluation_that_the_run_has_outgrown_is_named(tmp_path):
    path = make_run(tmp_path) / "evaluation.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"steps": 5}))
    assert summary_of(tmp_path)["alarms"] == ["evaluation.json tells of the run as it was at step 5; it has gone on to step 30 since."]


def test_the_graph_of_a_workflow_is_the_source_of_a_picture(tmp_path):
    write_metrics(tmp_path, [{"phase": "train", "step": 1}])
    assert summary_of(tmp_path)["graph"] == ""
    (tmp_path / "graph.svg").write_text("<svg><script>")
    kind, _, picture = summary_of(tmp_path)["graph"].partition(",")
    assert (kind, base64.b64decode(picture)) == ("data:image/svg+xml;base64", b"<svg><script>")


def test_pairs_take_the_same_instance_in_file_order():
    def row(name, when, key):
        return {"id": name, "when": when, "key": str(key)}

    rows = [row(f"b{seed}", "before", seed) for seed in (0, 1, 2)] + [row(f"a{seed}", "after", seed) for seed in (2, 1)]
    assert pairs(rows) == [{"before": "b1", "after": "a1"}, {"before": "b2", "after": "a2"}]
    assert pairs(rows[:2] + [row("t", "train", 7)]) == [{"train": "t"}, {"before": "b0"}, {"before": "b1"}]
    assert pairs([]) == []


def test_a_gap_of_exactly_zero_is_drawn_without_a_warning(tmp_path):
    write_metrics(tmp_path, [{"phase": "train", "step": s, "model/a/log_prob_gap": 0.0, "model/a/grad_norm": 1.0} for s in range(20)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write_report(tmp_path)
    assert summary_of(tmp_path)["alarms"] == []
    assert (tmp_path / "plots" / "log_prob_gap.png").exists()


def test_long_curves_are_thinned_and_a_single_peak_still_crosses_the_alarm():
    gaps = [{"step": step, "model/a/log_prob_gap": 8e-4 if step == 2500 else 1e-6} for step in range(1, 5001)]
    (gap,) = [chart.to_json() for chart in charts.health_charts(gaps, []) if chart.name == "log_prob_gap"]
    heights = [y for _, y in gap["lines"][0]["points"]]  # a mean over neighbours would hide the peak
    assert 3 <= len(heights) <= 300
    assert min(heights) < gap["levels"][0][0] < max(heights)


def test_a_role_and_a_model_keep_their_colour_in_all_charts(tmp_path):
    make_run(tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    lines = [dict(list(line.items())[::-1]) if line["step"] % 2 else line for line in lines]  # named in another order
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    drawn = {chart["name"]: chart for _, group in summary_of(tmp_path)["charts"] for chart in group}
    for names, (first, second) in ((("entropy", "zero_variance", "well_formed"), ("guide", "walker")),
                                   (("grad_norm", "log_prob_gap"), ("big", "small"))):  # fmt: skip
        for name in names:
            assert {line["name"]: line["color"] for line in drawn[name]["lines"] if line["name"]} == {first: 0, second: 1}, name


def test_full_disk_keeps_the_old_page(tmp_path, monkeypatch):
    write_metrics(tmp_path, [{"phase": "train", "step": 1}])
    path = write_report(tmp_path)
    before = path.read_bytes()

    def refuse(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("marl_llm.reporting.files.os.fsync", refuse)
    with pytest.raises(WriteError, match="disk is full.*report.html"):
        write_report(tmp_path)
    assert path.read_bytes() == before


def test_a_directory_that_is_no_run_gets_no_report(tmp_path):
    with pytest.raises(ViewError, match="is no run directory"):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_importing_the_room_is_light():
    code = "import sys, marl_llm.reporting as r; assert not {'numpy', 'matplotlib', 'tensorboardX', 'jax'} & set(sys.modules); "
    code += "import marl_llm.viewing as v; r.MetricsWriter, r.Progress, r.EpisodeWriter, v.write_report; "
    subprocess.run([sys.executable, "-c", code + "assert not {'matplotlib', 'jax'} & set(sys.modules)"], check=True)


def test_score_and_pay_by_turns_leave_aborted_plays_out(tmp_path):
    make_run(tmp_path)
    with EpisodeWriter(tmp_path) as writer:
        for number, (score, status) in enumerate([(0.5, "failed"), (0.25, "failed"), (9.0, "aborted")]):
            one, tokens = stored.play(f"train-7/{number}/0", number, step=7, calls=4, score=score)
            writer.write(one | {"turns": 2, "status": status}, tokens)
    (table,) = [table for table in summary_of(tmp_path)["tables"] if table["title"] == "Pay by turns"]
    assert table["rows"] == [["1", "11", "0.455", "1.91"], ["2", "2", "0.375", "3.5"]]  # of a call: the team's pay and 0.5


def test_plays_of_one_length_have_no_table_and_very_long_ones_share_a_row(tmp_path):
    for folder, turns in (("short", [1, 1]), ("long", range(40))):
        stored.make_run(tmp_path / folder, [(stored.play(f"p{n}", n)[0] | {"turns": turns_of}, None) for n, turns_of in enumerate(turns)])
    titles, tables = ([(table["title"], table["rows"]) for table in summary_of(tmp_path / name)["tables"]] for name in ("short", "long"))
    assert "Pay by turns" not in dict(titles)
    assert len(dict(tables)["Pay by turns"]) == 12
    assert dict(tables)["Pay by turns"][-1][:2] == ["11 and more", "29"]


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0, "0 s"), (60, "1 min 0 s"), (172, "2 min 52 s"), (3599, "59 min 59 s"), (3600, "1 h 0 min"), (9000, "2 h 30 min")],
)
def test_a_length_of_time_is_told_in_the_largest_units_that_fit(seconds, said):
    assert formats.duration(seconds) == said
