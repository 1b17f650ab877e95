"""The files of a run directory that grow while it trains: metrics, plays, the report, and the outcomes of the final evaluation."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import tempfile
import time

REPORT_S = 60.0
WORST, AMONG = 3, 32  # plays that are kept behind the first ones: the worst of so many


def shortened(outcome) -> dict:
    """An outcome as JSON, without the further metrics."""
    return {name: getattr(outcome, name) for name in ("task", "play", "score", "turns", "aborted")}


class RunFiles:
    """The files of a run directory that grow, and those that describe the game. Of many processes, only the first one's are kept."""

    def __init__(self, workdir: pathlib.Path, plan, config, resume_step: int | None):
        from marl_llm import reporting
        from marl_llm.reporting import files
        from marl_llm.runs.workdir import plain
        from marl_llm.training import processes
        from marl_llm.workflows import Environment, to_svg
        from marl_llm.workflows.storage import FILE_NAME

        self._scratch = None if processes.leads() else tempfile.TemporaryDirectory()
        if self._scratch is not None:
            workdir, resume_step = pathlib.Path(self._scratch.name), None
        self.workdir, self.hosted, self._reported, self._looked = workdir, plan.hosted, time.time(), False
        if resume_step is not None:  # the plays of an end that was cut short are played again
            files.keep_lines(workdir / "episodes.jsonl", lambda play: play.get("when") == "train")
            files.keep_lines(workdir / FILE_NAME, lambda play: play.get("when") == "train" and play["step"] <= resume_step)
        tracker = reporting.Tracker(config.logger, workdir, plain(config)) if config.logger and self._scratch is None else None
        self.metrics = reporting.MetricsWriter(workdir, resume_step=resume_step, tracker=tracker)
        self.episodes = reporting.EpisodeWriter(workdir, resume_step=resume_step)
        if isinstance(plan.game, Environment):
            (workdir / "graph.svg").write_text(to_svg(plan.game.workflow, dict(plan.assignment.roles)))
        elif hasattr(plan.game.tokenizer, "save"):
            plan.game.tokenizer.save(workdir / "tokenizer.model")

    def plays(self, played, count: int, when: str, step: int, advantages=None) -> None:
        """The first plays of a batch or an evaluation and the worst of those behind them; hosted ones as graphs too, to be replayed."""
        from marl_llm.reporting import worst_plays
        from marl_llm.workflows.storage import named, write_trajectories

        first = played.episodes(count, when, advantages)
        others = played.episodes(count + AMONG, when, advantages)[len(first) :] if count and when != "before" else []
        kept = [*first, *worst_plays(others, WORST)]
        for play, tokens in kept:
            self.episodes.write(play | {"step": step}, tokens)
        if self.hosted:
            graphs = named(played.rollout.episodes, when, {play["episode"] for play, _ in kept})
            write_trajectories(self.workdir, dataclasses.replace(played.rollout, episodes=graphs), when, step)

    def looked_at(self, played):
        """The batch. Of the first one a play is prepared but not written, so that a task or picture that fails is reported at once."""
        for play, tokens in () if self._looked else played.episodes(1, "train"):
            self.episodes.look(play, tokens)
        self._looked = True
        return played

    def report_now_and_then(self) -> None:
        """The page of a run that goes on, at most once in `REPORT_S`: its PNGs come at the end."""
        from marl_llm import viewing

        if self._scratch is None and time.time() - self._reported >= REPORT_S:
            viewing.write_report(self.workdir, pictures=False)
            self._reported = time.time()

    def outcomes(self, records: dict) -> None:
        """outcomes.jsonl: one line per play of the final evaluation, so that two runs can be compared task by task."""
        outcomes = [(name, outcome) for name, evaluation in records.items() for outcome in evaluation.outcomes]
        lines = [json.dumps({"seats": name} | shortened(outcome)) + "\n" for name, outcome in outcomes]
        (self.workdir / "outcomes.jsonl").write_text("".join(lines))

    def table(self, parts: dict, tasks: int) -> None:
        """before_after.md, of what hosted play measures of roles and tools."""
        from marl_llm.workflows.metrics import before_after

        if not self.hosted:
            return
        text = [
            f"## {name}, {tasks} tasks of the test split\n\n{before_after(evaluations['before'].figures, evaluations['after'].figures)}"
            for name, evaluations in parts.items()
        ]
        (self.workdir / "before_after.md").write_text("\n".join(text))

    def close(self) -> None:
        """Closes what grows."""
        self.metrics.close()
        self.episodes.close()
        if self._scratch is not None:
            self._scratch.cleanup()
