"""The environment of an OpenEnv server, played by one role; by default its whole response is the action's `message`.

Command:   pip install 'marl_llm[openenv]'          and a server, here on this machine
           python -m experiments.train --config=experiments/configs/openenv.py --workdir=runs/env --config.game.url=http://127.0.0.1:8000
           ... --config.game.action='{"guess": "{int}"}' --config.game.observation=hint --config.game.sayings='1|2|3'
Expected:  docs/external_games.md, which has the options. The server's seeds are tried before anything is trained.
Variants:  :smoke; :chat, for a checkpoint: ...:chat --config.game.url=... --config.model.path=Qwen3-1.7B
"""

from experiments.configs.sizes import real_model, small_workflow, smoke_workflow, without_tied
from marl_llm.runs.base import base_config, variant


def get_config(arg=None):
    """`arg` may be 'smoke' or 'chat'."""
    arg = variant("openenv", arg, ("smoke", "chat"))
    if arg == "chat":
        c = real_model(base_config("openenv", game="openenv", recipe="grpo"))
        c.game.form, c.game.reads = "tags", "conversation"
        c.rollout.update(tasks=16, max_num_seqs=64, decode_steps=32, timeout_s=900.0)
        c.optimizer.update(minibatch=64, learning_rate=1e-6)
    else:
        c = without_tied(small_workflow("openenv", "openenv", "grpo"))
        c.game.max_prompt, c.game.max_tokens = 320, 12
        c.steps, c.rollout.tasks = 30, 8
        c.sft.steps, c.sft.tasks = 0, 16  # with config.game.sayings there is somebody to imitate
        c.optimizer.learning_rate = 3e-4
        c.evaluation.update(tasks=64, final_tasks=200)
    c.recipe.group_size = 8
    c.rollout.concurrency = c.game.sessions = 8  # a play has a session for itself; OpenEnv's servers allow one unless they say otherwise
    return smoke_workflow(c) if arg == "smoke" else c
