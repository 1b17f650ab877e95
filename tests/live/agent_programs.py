"""The programs of examples/agents with the packages that they are written for, trained for two steps. The suite has no such packages.

    python -m venv V && V/bin/pip install -e '.[test,agents]'
    V/bin/python -m pytest -n 0 -s tests/live/agent_programs.py

What is seen: a step's episodes are paid, no prompt is encoded twice where a program only adds to its history, and the scorer gives the
ids that were drawn the log-probs that they were drawn with.
"""

import json
import pathlib
import sys

import pytest

from marl_llm.cli.attach import main
from marl_llm.cli.tiny import make

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples" / "agents"
SIZES = dict(width=32, layers=1, query_heads=2, key_value_heads=1, head_dim=16, feed_forward=32)
SETTINGS = (
    "rollout.max_prompt=512", "rollout.max_tokens=8", "rollout.max_num_seqs=8", "optimizer.row_tokens=1024", "optimizer.minibatch=8",
    "evaluation.tasks=2", "evaluation.final_tasks=2", "evaluation.ablate_roles=false", "recipe.rewards=mixed", "quick_compile=true",
)  # fmt: skip
PROGRAMS = {
    "langgraph_two_roles.py": (("titler", "tagger"), {"post": "Return the words of a text, in the order in which they stand"}, 2, True),
    "openai_asyncio.py": (("solver", "checker"), {"question": "2 + 2?", "answer": "4"}, 4, False),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_is_trained_as_it_stands(program, tmp_path):
    roles, task, requests, stays = PROGRAMS[program]
    tiny = make(tmp_path / "tiny", "qwen2", 320, **SIZES)
    rows = [task | {"number": number} for number in range(20)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = [f"--roles={','.join(f'{role}={tiny}' for role in roles)}", f"--tasks={tmp_path / 'tasks.jsonl'}", "--tasks_per_step=2"]
    flags += [f"--workdir={tmp_path / 'run'}", "--steps=2", "--group_size=2", "--processes=2", *(f"--set={one}" for one in SETTINGS)]
    with pytest.raises(SystemExit) as ended:
        main([*flags, *["--stays"] * stays, "--", sys.executable, str(EXAMPLES / program), *["--task", "{task}"] * (not stays)])
    assert not ended.value.code
    steps = [row for row in map(json.loads, (tmp_path / "run" / "metrics.jsonl").open()) if row["phase"] == "train"]
    assert len(steps) == 2
    for row in steps:
        print(program, {name: x for name, x in row.items() if name.startswith("aborted/") or name in ("refused", "forked", "reencoded")})
        assert (row["episodes"], row["aborted"], row["reencoded"]) == (4, 0, 0)
        assert all(x <= 1e-4 for name, x in row.items() if name.endswith("log_prob_gap"))
    assert steps[-1]["samples"] >= 2 * 4 * requests
