"""report.html: complete, honest about what is missing, inert whatever a model wrote, and self-contained."""

import base64
import html.parser
import json
import math
import re
import subprocess
import sys
import warnings

import pytest
from test_episodes import changed, episode

from marl_llm.reporting import EpisodeWriter, MetricsWriter, WriteError, charts, page, report, transcripts, turns, write_report

EVIL = '</pre><script>alert("x")</script><img src=x onerror=alert(1)>&amp;\x00\x1b[31m\u202eabc\ud800 \'"'


class Page(html.parser.HTMLParser):
    """Tags, ids, visible text and every reference of a page; fails on tags that are not closed in order."""

    VOID = {"meta", "img", "br", "use", "path", "rect", "circle", "link", "i/"}

    def __init__(self, path):
        super().__init__(convert_charrefs=True)
        self.text, self.tags, self.ids, self.references, self.open = "", [], [], [], []
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        self.close()
        assert self.open == []

    def handle_startendtag(self, tag, attributes):
        self.note(tag, attributes)

    def handle_starttag(self, tag, attributes):
        self.note(tag, attributes)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text += data

    def note(self, tag, attributes):
        self.tags.append(tag)
        for name, value in attributes:
            assert not name.startswith("on"), f"event handler {name}={value}"
            if name == "id":
                self.ids.append(value)
            if name in ("src", "href", "xlink:href", "action", "srcset"):
                self.references.append(value)


def make_run(workdir, steps=30, roles=("tool", "planner"), text="R R ;"):
    config = {"config_file": "experiments/configs/quickstart.py", "seed": 3, "commit": "abc1234", "command": "python -m x",
              "hardware": {"cpu": 2}, "config": {"assignment": {role: f"{role}_model" for role in roles}}}  # fmt: skip
    workdir.mkdir(parents=True, exist_ok=True)
    (workdir / "config.json").write_text(json.dumps(config))
    with MetricsWriter(workdir, tensorboard=False) as writer:
        for step in range(1, 6):
            writer.write({"phase": "warm_start", "step": step, "loss": 3.0 / step})
        for step in range(1, steps + 1):
            record = {"phase": "train", "step": step, "success": step / steps, "turns": 3.0, "wall_s": 0.5 * step,
                      "time/sample": 0.2, "time/update": 0.1, "time/other": 0.1}  # fmt: skip
            for role in roles:
                for key in ("reward", "team", "local", "entropy", "zero_variance", "well_formed", "component/progress"):
                    record[f"role/{role}/{key}"] = 0.5
                model = {"log_prob_gap": 1e-6, "grad_norm": 0.5, "clip_fraction": 0.01}
                record |= {f"model/{role}_model/{key}": value for key, value in model.items()}
            writer.write(record)
        for step in (0, 10, 20, 30):
            writer.write({"phase": "eval", "step": step, "success": 0.2 + step / 50, "turns": 3.5})
    part = {"interval": [0.1, 0.4], "episodes": 500, "turns": 3.0, "roles": {role: {"well_formed": 0.07} for role in roles}}
    shares = {"before": 0.255, "after": 0.904, "swapped": 0.013}
    evaluation = {name: {"success": share, **part} for name, share in shares.items()}
    evaluation |= {"pairs": {"tool=trained, planner=untrained": {"success": 0.425, **part}}, "random": {"success": 0.012}}
    (workdir / "evaluation.json").write_text(json.dumps(evaluation))
    with EpisodeWriter(workdir) as writer:
        for when in ("before", "after"):
            for i in range(5):
                one = changed(episode(f"{when}-{i}", 0, when), ("task", "seed"), i)
                writer.write(changed(one, ("steps", 0, "responses", 1, "text"), text))


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    """A complete run with its report; tests only read it."""
    workdir = tmp_path_factory.mktemp("complete") / "run"
    make_run(workdir)
    return write_report(workdir)


@pytest.fixture
def no_charts(monkeypatch):
    """For tests that look elsewhere: drawing takes most of the time of a report."""
    monkeypatch.setattr(charts.Chart, "figure_html", lambda self, plots: "")


def test_a_complete_run(complete):
    path, run = complete, complete.parent
    assert path.name == "report.html"
    seen = Page(path)
    text = re.sub(r"\s+", " ", seen.text)
    for words in (
        "quickstart", "abc1234", "python -m x", "cpu 2", "25.5 % before training, 90.4 % after", "10.0–40.0", "500 episodes",
        "Roles swapped1.3 %", "tool=trained, planner=untrained", "42.5 %", "Random floor1.2 %", "tool 7 %", "Rewards of planner",
        "sample 50 %", "tool_model", "Instance 3", "Before training", "After training", "step 30", "15 s",
    ):  # fmt: skip
        assert words in text, words
    assert "Instance 4" not in text
    assert "holds no number" not in text
    assert "Look at this first" not in text
    assert seen.tags.count("details") >= 3 * 2 * 2 * 2  # instances × plays × steps × (prompt, branches)
    names = {png.name for png in (run / "plots").iterdir()}
    assert {"success.png", "turns.png", "rewards_tool.png", "entropy.png", "zero_variance.png", "log_prob_gap.png"} <= names
    assert all(png.read_bytes().startswith(b"\x89PNG") for png in (run / "plots").iterdir())


def test_the_page_is_self_contained_and_its_ids_are_unique(complete):
    seen = Page(complete)
    assert seen.references, "the charts use references; none found means that this test looks in the wrong place"
    assert all(reference.startswith("#") for reference in seen.references)
    assert {reference[1:] for reference in seen.references} <= set(seen.ids)
    assert len(set(seen.ids)) == len(seen.ids)
    assert "script" not in seen.tags
    assert "@import" not in seen.source
    assert set(re.findall(r"url\((.)", seen.source)) <= {"#"}


@pytest.mark.parametrize("where", ["response", "prompt", "status", "role", "task", "config", "metrics"])
def test_text_from_outside_is_inert(tmp_path, where):
    one = episode("e", 0, "after")
    if where == "response":
        one = changed(one, ("steps", 0, "responses", 1, "text"), EVIL)
    elif where == "prompt":
        one = changed(one, ("steps", 0, "prompt"), EVIL)
    elif where == "status":
        one["status"] = EVIL
    elif where == "role":
        one["roles"] = {EVIL: EVIL, "planner": "b"}
        one["steps"][0]["role"] = EVIL
    elif where == "task":
        one["task"] = {EVIL: EVIL, "map": ["A<", "&G"]}
    elif where == "config":
        (tmp_path / "config.json").write_text(json.dumps({"name": "n", "command": EVIL, EVIL: [EVIL]}))
    with EpisodeWriter(tmp_path) as writer:
        writer.write(one)
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        name = EVIL.replace("/", "") if where == "metrics" else "tool"
        for step in range(12):
            writer.write({"phase": "train", "step": step, f"role/{name}/team": 0.5, f"role/{name}/component/$x_{name}$": 1.0})
    seen = Page(write_report(tmp_path))
    assert "script" not in seen.tags
    assert "img" not in seen.tags
    assert "alert" in seen.text
    assert not re.search("[\x00-\x08\x0b-\x1f\u202e\ud800]", seen.source)


def test_escape_shows_controls_and_quotes():
    assert page.escape('<a b="c">&\x1b\u202e') == "&lt;a b=&quot;c&quot;&gt;&amp;␛\ufffd"


def test_an_empty_directory_says_what_is_missing(tmp_path):
    text = Page(write_report(tmp_path)).text
    for name in ("config.json", "metrics.jsonl", "evaluation.json", "episodes.jsonl"):
        assert re.search(rf"{name}:.{{0,20}}there is no such file", text), name
    assert tmp_path.name in text


def test_a_run_that_has_just_begun(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write({"phase": "train", "step": 1, "success": 0.25, "role/tool/entropy": math.nan})
    with EpisodeWriter(tmp_path) as writer:
        writer.write(changed(episode(), ("steps",), []))
    text = Page(write_report(tmp_path)).text
    assert re.search("Entropy:? .*holds no number under `role/<role>/entropy`", text)
    assert "NaN or infinity: 1, first at step 1: role/tool/entropy" in text
    assert "No plays after training" in text
    assert "recorded without any response" in text
    assert (tmp_path / "plots" / "success.png").exists()
    assert not (tmp_path / "plots" / "entropy.png").exists()


WRONG_TYPES = b'{"before": 3, "pairs": [1], "after": {"success": "high"}, "assignment": 4, "name": [2]}'


@pytest.mark.parametrize("junk", [b"", b"{", b"[]", b"\xff\xfe", WRONG_TYPES, b"null"])
def test_damaged_files_never_stop_the_report(tmp_path, junk):
    for name in ("config.json", "metrics.jsonl", "evaluation.json", "episodes.jsonl"):
        (tmp_path / name).write_bytes(junk + b"\n" + junk + b"\n")
    assert "In short" in Page(write_report(tmp_path)).text


def test_damaged_lines_are_named_and_the_rest_is_shown(tmp_path, no_charts):
    make_run(tmp_path)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('oops\n{"phase": "train", "step": "x", "success": []}\n')
    with open(tmp_path / "episodes.jsonl", "a") as file:
        file.write('{"episode": 1}\n')
    text = Page(write_report(tmp_path)).text
    assert re.search(r"metrics.jsonl, line \d+: not JSON", text)
    assert "does not follow the schema" in text
    assert "Instance 3" in text
    assert "90.4" in text


def test_the_gap_alarm_and_a_model_without_gradient_are_reported(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        for step, gap in enumerate((1e-6, 3e-4, 2e-4), start=1):
            norms = {"model/a/grad_norm": 1.0, "model/b/grad_norm": 0.0}
            writer.write({"phase": "train", "step": step, "model/a/log_prob_gap": gap, **norms})
    text = Page(write_report(tmp_path)).text
    assert "log-probs of a differ between sampler and scorer by up to 0.0003 nats" in text
    assert "first at step 2" in text
    assert "b never got a gradient" in text
    assert "a never got a gradient" not in text


def test_without_evaluation_json_the_curve_stands_in(tmp_path, no_charts):
    make_run(tmp_path)
    (tmp_path / "evaluation.json").unlink()
    text = Page(write_report(tmp_path)).text
    assert "20.0\u00a0% before training, 80.0\u00a0% after" in text
    assert "from the evaluation curve" in text


def test_the_graph_of_a_workflow_is_drawn_and_inert(tmp_path, no_charts):
    make_run(tmp_path / "run")
    assert "Who speaks when" not in write_report(tmp_path / "run").read_text()
    picture = f"<svg xmlns='http://www.w3.org/2000/svg'><text>{EVIL[:20]}</text></svg>"
    (tmp_path / "run" / "graph.svg").write_text(picture)
    found = Page(write_report(tmp_path / "run"))
    assert "Who speaks when" in found.text
    (image,) = [r for r in found.references if r.startswith("data:image/svg+xml")]
    assert base64.b64decode(image.split(",")[1]).decode() == picture
    assert EVIL[:20] not in found.source


def test_the_headline_names_the_figure_of_a_workflow(tmp_path, no_charts):
    make_run(tmp_path / "run")
    path = tmp_path / "run" / "evaluation.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"headline": "all_passed"}))
    assert "All passed on evaluation instances" in Page(write_report(tmp_path / "run")).text


def test_pairs_take_the_same_instance_in_file_order():
    def play(name, when, seed):
        return changed(episode(name, 0, when), ("task", "seed"), seed)

    plays = [play(f"b{seed}", "before", seed) for seed in (0, 1, 2)] + [play(f"a{seed}", "after", seed) for seed in (2, 1)]
    shown = [{when: e["episode"] for when, e in pair.items()} for pair in transcripts.pairs(plays, 3)]
    assert shown == [{"before": "b1", "after": "a1"}, {"before": "b2", "after": "a2"}]
    assert [list(pair) for pair in transcripts.pairs(plays[:2], 1)] == [["before"]]
    assert transcripts.pairs([], 3) == []


def test_a_gap_of_exactly_zero_is_drawn_without_a_warning(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        for step in range(20):
            writer.write({"phase": "train", "step": step, "model/a/log_prob_gap": 0.0, "model/a/grad_norm": 1.0})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text = Page(write_report(tmp_path)).text
    assert "Look at this first" not in text
    assert (tmp_path / "plots" / "log_prob_gap.png").exists()


def test_a_task_of_text_is_shown_whole_and_without_a_map_legend(tmp_path):
    question = "Write a function that " + "doubles " * 40 + "END"
    one = changed(episode("e", 0, "after"), ("task",), {"question": question, "id": 3})
    for step in one["steps"]:
        del step["state_after"]
    with EpisodeWriter(tmp_path) as writer:
        writer.write(one)
    seen = Page(write_report(tmp_path))
    assert question in seen.text
    assert "Blue disc" not in seen.text
    assert "svg" not in seen.tags


def test_map_picture_marks_every_kind_of_cell():
    svg = transcripts.map_svg(["A#G", ".<*"], trail=[(1, 0)])
    assert 'viewBox="-.5 -.5 31 21"' in svg
    assert svg.count("<circle") == 3  # agent, agent on the goal, one dot of the trail
    assert svg.count("M10 0h10") == 1  # the wall
    assert svg.count('stroke="var(--s2)"') == 2  # goal, and goal under the agent
    assert "&lt;" in svg


def test_long_curves_are_thinned_and_a_single_peak_still_crosses_the_alarm(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        for step in range(1, 5001):
            gap = 8e-4 if step == 2500 else 1e-6  # a mean over neighbours would hide it
            writer.write({"phase": "train", "step": step, "success": 0.5, "model/a/log_prob_gap": gap})
    path = write_report(tmp_path)
    assert path.stat().st_size < 150_000
    chart = re.search(r'aria-label="Sampler against scorer".*?</svg>', path.read_text(), re.DOTALL)[0]
    drawn = re.findall(r' d="([^"]*)" clip-path="[^"]*" style="([^"]*var\(--s\d\)[^"]*)"', chart)  # legend and grid are not
    heights = {"dasharray" in style: re.findall(r"[ML] [\d.]+ ([\d.]+)", path) for path, style in drawn}
    curve, alarm = heights[False], heights[True]
    assert len(drawn) == 2
    assert 3 <= len(curve) <= 300
    assert len(set(alarm)) == 1
    assert min(map(float, curve)) < float(alarm[0]) < max(map(float, curve))


def test_full_disk_keeps_the_old_page(tmp_path, monkeypatch):
    path = write_report(tmp_path)
    before = path.read_bytes()

    def refuse(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(report.files.os, "fsync", refuse)
    with pytest.raises(WriteError, match="disk is full.*report.html"):
        write_report(tmp_path)
    assert path.read_bytes() == before


def test_command_line(tmp_path, capsys):
    command = [sys.executable, "-W", "error", "-m", "marl_llm.reporting.report", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.strip() == str(tmp_path / "report.html")
    assert report.main([str(tmp_path / "nowhere")]) == 1
    assert "nowhere is not a directory" in capsys.readouterr().err


def test_importing_the_room_is_light():
    code = "import sys, marl_llm.reporting as r; assert not {'numpy', 'matplotlib', 'tensorboardX', 'jax'} & set(sys.modules); "
    code += "r.MetricsWriter, r.Progress, r.EpisodeWriter, r.write_report; assert not {'matplotlib', 'jax'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def workflow_play(when, step, score):
    """A play of a workflow: a role, a tool, a role in the next turn."""
    said = {"chosen": True, "team": score, "local": 0.0, "components": {}, "well_formed": True, "truncated": False}
    steps = [
        {"turn": turn, "role": "writer", "prompt": "write", "group": f"{turn}:0", "responses": [{"text": f"draft {turn}", **said}]}
        for turn in (0, 1)
    ]
    return {
        "episode": f"{when}-3/0", "step": step, "when": when, "task": {"number": 3, "question": "Who?"}, "hidden": {"gold": "Ada <b>"},
        "roles": {"writer": "small"}, "status": "success" if score >= 1 else "failed", "headline": "all_passed", "score": score,
        "turns": 2, "steps": steps,
        "tools": [{"after": 1, "node": "verify", "turn": 0, "seconds": 0.1, "writes": {"report": "1 of 2 passed"}}],
    }  # fmt: skip


def workflow_run(workdir, ended, steps=12):
    """The files of a run of a workflow, as far as they are written while it goes on, or when it has `ended`."""
    workdir.mkdir(parents=True, exist_ok=True)
    (workdir / "config.json").write_text(json.dumps({"config_file": "a/plan_code.py", "config": {"assignment": {"writer": "small"}}}))
    with MetricsWriter(workdir, tensorboard=False) as writer:
        for step in range(steps + 1):
            figures = {"success": 0.1 + step / 100, "turns": 2.0}
            if step:
                figures |= {"role/writer/entropy": 0.7, "role/writer/mixed_groups": 0.25, "role/writer/well_formed": 0.9}
                figures |= {"model/small/log_prob_gap": 0.017, "model/small/log_prob_gap_bound": 0.25, "model/small/grad_norm": 1.0}
                writer.write({"phase": "train", "step": step, **figures})
            if step % 6 == 0:
                ends = {"success_low": figures["success"] - 0.05, "success_high": figures["success"] + 0.05}
                writer.write({"phase": "eval", "step": step, "success": figures["success"], "turns": 2.0, **ends})
    with EpisodeWriter(workdir) as writer:
        writer.write(workflow_play("train", 6, 0.5) | {"task": {"number": 0}})
        for when, step, score in (("before", 0, 0.5), ("after", steps, 1.0)) if ended else ():
            writer.write(workflow_play(when, step, score))
    if ended:
        shares = {"roles": {"writer": {"well_formed": 0.9}}, "episodes": 40, "aborted": 2, "turns": 2.0}
        before, after = ({"success": s, "interval": [s - 0.1, s + 0.1], **shares} for s in (0.2, 0.6))
        gain = {"difference": 0.4, "interval": [0.25, 0.55], "tasks": 40}
        found = {"headline": "all_passed", "steps": steps, "gain": gain, "before": before, "after": after}
        (workdir / "evaluation.json").write_text(json.dumps(found))


def plain_text(path):
    return re.sub(r"[ \n]+", " ", Page(path).text.replace("\u00a0", " "))


def test_c4_the_page_of_a_workflow_says_what_was_played(tmp_path, no_charts):
    workflow_run(tmp_path / "run", ended=True)
    path = write_report(tmp_path / "run")
    text = plain_text(path)
    for words in (
        "All passed, before → after20.0 % → 60.0 %after: 50.0–70.0; well-formed: writer 90 %", "task by task +40.0 points",
        "interval +25.0 to +55.0", "40 2 aborted", "teamall passed", "hidden from the roles", '"gold": "Ada <b>"', "verify tool",
        "report: 1 of 2 passed", "writer turn 0", "writer turn 1",
        "Before trainingfailedall_passed 0.52 turnsstep 0", "After trainingsuccessall_passed 12 turnsstep 12",
    ):  # fmt: skip
        assert words in text, words
    for words in ("turn 2", "Success", "No plays", "Look at this first"):
        assert words not in text, words
    first, second = text.index("draft 0"), text.index("draft 1")
    assert first < text.index("1 of 2 passed") < second
    assert '<span class="chip bad">failed' in path.read_text()
    assert '<span class="chip good">success' in path.read_text()


def test_c4_words_of_a_game_are_no_failure_and_an_evaluation_without_a_step_shows_none(tmp_path, no_charts):
    with EpisodeWriter(tmp_path) as writer:
        writer.write(workflow_play("after", None, 0.5) | {"status": "played"})
    source = write_report(tmp_path).read_text()
    assert '<span class="chip ">played</span>' in source
    assert ">step" not in source


def test_c5_a_run_that_goes_on_has_a_report_that_says_so(tmp_path, no_charts):
    workflow_run(tmp_path, ended=False)
    for name in ("metrics.jsonl", "episodes.jsonl"):
        with open(tmp_path / name, "a") as file:
            file.write('{"phase": "train", "st')  # a line that is being written
    before = {name: (tmp_path / name).read_bytes() for name in ("metrics.jsonl", "episodes.jsonl", "config.json")}
    assert report.main([str(tmp_path)]) == 0
    text = plain_text(tmp_path / "report.html")
    assert "All passed on evaluation instances: 10.0 % before training, 22.0 % after 12 steps so far (interval 17.0–27.0 %)" in text
    assert "the run has not ended" in text
    assert "No plays before and after training of these instances. The final evaluation, which is still to come, records" in text
    assert "Look at this first" not in text
    assert before == {name: (tmp_path / name).read_bytes() for name in before}


def test_an_evaluation_that_the_run_has_outgrown_is_named(tmp_path, no_charts):
    workflow_run(tmp_path, ended=True)
    path = tmp_path / "evaluation.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"steps": 5}))
    assert "evaluation.json tells of the run as it was at step 5; it has gone on to step 12" in plain_text(write_report(tmp_path))


def test_b11_intervals_entropy_and_mixed_groups_of_a_workflow_are_drawn(tmp_path):
    workflow_run(tmp_path, ended=True)
    source = write_report(tmp_path).read_text()
    for title in ("All passed", "Entropy", "Mixed groups", "Well-formed responses"):
        assert f'aria-label="{title}"' in source, title
    assert "Band: 95 % interval" in source
    chart = re.search(r'aria-label="All passed".*?</svg>', source, re.DOTALL)[0]
    assert "FillBetween" in chart


def test_b13_the_alarm_reads_each_models_bound(tmp_path, no_charts):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        for step in (1, 2):
            bounds = {"model/half/log_prob_gap_bound": 0.25, "model/whole/log_prob_gap_bound": 1e-4}
            writer.write({"phase": "train", "step": step, "model/half/log_prob_gap": 0.017, "model/whole/log_prob_gap": 0.001, **bounds})
    text = plain_text(write_report(tmp_path))
    assert "log-probs of whole differ between sampler and scorer by up to 0.001 nats (alarm: 0.0001), first at step 1" in text
    assert "log-probs of half" not in text
    records = [{"step": 1, "model/half/log_prob_gap": 0.3, "model/half/log_prob_gap_bound": 0.25}]
    (gap,) = [chart for chart in charts.health_charts(records, []) if chart.name == "log_prob_gap"]
    assert gap.levels == ((0.25, "alarm"),)


def test_a_role_and_a_model_keep_their_colour_through_the_whole_report(tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setattr(charts.Chart, "figure_html", lambda self, plots: drawn.update({self.name: self}) or "")
    make_run(tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for line in lines:  # evaluations name roles, and the warm start models, in another order than training does
        if line["phase"] != "train":
            fields = list(line.items())[::-1]
            line.clear()
            line.update(fields)
    lines.sort(key=lambda line: line["phase"])
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    source = write_report(tmp_path).read_text()
    colours = {}
    for name in ("entropy", "zero_variance", "well_formed", "grad_norm", "log_prob_gap", "warm_start"):
        for line in drawn[name].lines:
            colours.setdefault(line.label.removesuffix(", evaluation"), set()).add(line.color)
    assert {name: len(found) for name, found in colours.items()} == dict.fromkeys(colours, 1)
    of_plays = re.findall(r'<i style="background:var\(--s(\d)\)"></i>(\w+)', source)
    assert {role for _, role in of_plays} == {"tool", "planner"}
    for colour, role in of_plays:
        assert colours[role] == {int(colour)}


def test_the_page_shows_score_and_pay_by_turns_and_leaves_aborted_plays_out(tmp_path, no_charts):
    make_run(tmp_path, steps=2)
    with EpisodeWriter(tmp_path) as writer:
        for number, (turns, score, status) in enumerate([(2, 0.5, "failed"), (2, 0.25, "failed"), (2, 9.0, "aborted")]):
            one = changed(episode(f"long-{number}", 1, "train"), ("turns",), turns)
            writer.write(one | {"score": score, "status": status, "headline": "success", "steps": one["steps"] * 2})
    text = re.sub(r"\s+", " ", Page(write_report(tmp_path, pngs=False)).text)
    shown = text[text.index("Pay by turns") :]
    assert "turnsplayssuccesspay of a play110" + "13" + "22" + "0.375" + "6" in shown  # each response that goes on is paid 1.5


def test_plays_of_one_length_have_no_table_and_very_long_ones_share_a_row():
    assert turns.table_html([episode("a"), episode("b")], "success") == ""
    plays = [changed(episode(str(n)), ("turns",), n) for n in range(40)]
    shown = turns.table_html(plays, "success")
    assert shown.count("<tr>") == 1 + 12
    assert "<td>11 and more</td><td>29</td>" in shown


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0, "0 s"), (60, "1 min 0 s"), (172, "2 min 52 s"), (3599, "59 min 59 s"), (3600, "1 h 0 min"), (9000, "2 h 30 min")],
)
def test_a_length_of_time_is_told_in_the_largest_units_that_fit(seconds, said):
    assert page.duration(seconds) == said
