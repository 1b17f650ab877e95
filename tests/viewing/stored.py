"""A run directory as training writes it, with texts that would break a careless page."""

import json

from marl_llm.reporting import EpisodeWriter, MetricsWriter

HOSTILE = "<script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">&lt;\u202e\u0007</pre>"


def play(name, number, when="train", step=1, calls=2, text="left", score=0.0, local=0.5):
    """(episode, tokens): `calls` calls by two roles in turn, two candidates each, and a tool call after the first."""
    steps, drawn = [], []
    for call in range(calls):
        role = ("guide", "walker")[call % 2]
        said = [{"text": f"{text} {call}", "chosen": True, "team": score, "local": local, "components": {"goal": score, "format": local}}]
        said.append(said[0] | {"text": "right", "chosen": False, "local": -local, "components": {"goal": score, "format": -local}})
        marks = {"well_formed": True, "truncated": False}
        prompt = f"{role} reads task {number} {text}"
        where = {"turn": call // 2, "role": role}
        steps.append(where | {"prompt": prompt, "group": f"{name}/{call}", "responses": [one | marks for one in said]})
        ids = {"ids": [1, 2], "log_probs": [-0.5, -2.0], "entropy": [0.1, 0.9]}
        drawn.append(where | {"prompt_ids": [3, 9, 1], "responses": [ids | {"advantage": worth} for worth in (1.0, -1.0)]})
    tool = {"after": 1, "node": "look", "turn": 0, "seconds": 0.25, "reads": {"where": text}, "writes": {"seen": text}}
    head = {"episode": name, "step": step, "when": when, "task": {"number": number, "question": "find it", "map": ["A.", "#G"]}}
    head |= {"roles": {"guide": "a", "walker": "b"}, "status": "success" if score >= 1 else "failed", "headline": "found", "score": score}
    pieces = {"": {"1": "go", "2": text, "3": "read", "9": "<|im_start|>"}}
    tokens = {"episode": name, "steps": drawn, "pieces": pieces, "specials": ["<|im_start|>"]}
    return head | {"turns": 1, "steps": steps, "tools": [tool]}, tokens


def make_run(folder, plays, outcomes=()):
    """Writes a run directory: `plays` as `play` gives them, and (task, score) of the final evaluation."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"name": folder.name, "headline": "found", "config": {}}))
    with EpisodeWriter(folder) as writer:
        for one in plays:
            writer.write(*one)
    with MetricsWriter(folder) as metrics:
        for step in (1, 2):
            metrics.write({"phase": "train", "step": step, "success": step / 2, "turns": 1.0, "role/guide/reward": 0.1 * step})
    lines = [{"seats": "after", "task": task, "play": 0, "score": score, "turns": 1, "aborted": False} for task, score in outcomes]
    (folder / "outcomes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder
