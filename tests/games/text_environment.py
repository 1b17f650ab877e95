"""The whole path of an environment in text, with a chat checkpoint of 1,000 parameters: plays, trains two steps, resumes, is exported."""

import importlib
import json
import pathlib
import sys

import jax
import numpy as np

ROOT = pathlib.Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "text")]

from checkpoint_text import template_source, tokenizer_of, write_checkpoint  # noqa: E402

from experiments.configs.sizes import smoke_workflow  # noqa: E402
from marl_llm.models import ModelConfig, init_params, load_pretrained, save_pretrained  # noqa: E402
from marl_llm.runs import building  # noqa: E402
from marl_llm.runs.resolve import resolve  # noqa: E402
from marl_llm.training import Checkpoints, make_mesh  # noqa: E402


def write_qwen3(folder):
    """A Hugging Face checkpoint of Qwen3's form."""
    folder.mkdir()
    shape = ModelConfig(
        vocab_size=max(512, tokenizer_of("qwen3").vocab_size), width=8, layers=1, query_heads=1, key_value_heads=1, head_dim=8,
        feed_forward=8, max_position=32_768,
    )  # fmt: skip
    save_pretrained(folder, shape, init_params(shape, jax.random.key(0)))
    made = json.loads((folder / "config.json").read_text())
    write_checkpoint(folder, "qwen3", template_source("qwen3"))
    theirs = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(theirs | made | {"eos_token_id": theirs["eos_token_id"]}))
    return folder


def whole_path(folder, name, game, variant="smoke"):
    """Trains the config's team for two steps, and from its checkpoint after the first another one; the figures of the first step.

    `game` are options of the environment. Two models would be compiled twice; here all roles share one.
    """
    config = importlib.import_module(f"experiments.configs.{name}").get_config(variant)
    config = config if variant == "smoke" else smoke_workflow(config)
    config.model.path, config.devices, config.assignment = str(write_qwen3(folder / "tiny")), 1, "shared"
    config.game.update(game)
    config.rollout.update({"tasks": 2, "max_num_seqs": 4, "decode_steps": 8, "max_prompt": 1536, "max_tokens": 8})
    checkpoints, figures, ends = Checkpoints(folder / "checkpoints", keep=3), [], []
    for start in (0, 1):
        with resolve(config) as plan, building.build_team(plan, config, make_mesh(1)) as team:
            assert team.learners["shared"].spec.renderer.options == {"enable_thinking": False}
            assert set(plan.budgets.values()) == {(1536, 8)}
            if start:
                like = team.policies()
                team.restore_start(checkpoints.restore_params(0, like))
                team.restore(checkpoints.restore(1, like), checkpoints.state(1)["team"])
            else:
                team.start_rl()
                checkpoints.save(0, team.policies(), {"team": team.state()})
            for step in range(start, 2):
                batch = team.play(step, first=2 * step, count=2)
                found = team.learn(batch, 1e-2)
                figures.append(dict(batch.figures) | {"loss": float(found["shared"]["loss"])})
                if step == 0:
                    checkpoints.save(1, team.policies(), {"team": team.state()})
            learner = team.learners["shared"]
            ends.append(jax.device_get(learner.params))
            out = save_pretrained(folder / f"out{start}", learner.config, learner.params, like=plan.options["shared"]["path"])
    for one, other in zip(*map(jax.tree.leaves, ends), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)
    assert load_pretrained(out[0].parent)[0].width == 8
    assert all(np.isfinite(one["loss"]) for one in figures)
    return figures[0]
