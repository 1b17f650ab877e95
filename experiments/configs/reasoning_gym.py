"""Problems of reasoning-gym (arXiv 2505.24760), scored by its own scorers; by default words spelled backwards, for a tiny model.

Command:   pip install 'marl_llm[rg]'
           python -m experiments.train --config=experiments/configs/reasoning_gym.py --workdir=runs/backward
           ... --config.game.agents=pair                      a verifier reads the solver's answer and gives the final one
           ... --config.game.dataset=chain_sum --config.game.settings=max_terms=2,max_digits=2
Expected:  docs/external_games.md, which lists what plays and what is refused.
Variants:  :smoke; :chat, for a checkpoint: ...:chat --config.game.dataset=knights_knaves --config.model.path=Qwen3-1.7B
"""

from experiments.configs.sizes import real_model, small_workflow, smoke_workflow, without_tied
from marl_llm.runs.base import base_config, variant


def get_config(arg=None):
    """`arg` may be 'smoke' or 'chat'."""
    arg = variant("reasoning_gym", arg, ("smoke", "chat"))
    if arg == "chat":
        c = real_model(base_config("reasoning_gym", game="reasoning_gym", recipe="grpo"))
        c.rollout.update(tasks=32, max_num_seqs=64, decode_steps=32, timeout_s=900.0)
        c.optimizer.update(minibatch=64, learning_rate=1e-6)
        return c
    c = without_tied(small_workflow("reasoning_gym", "reasoning_gym", "grpo"))
    c.game.dataset, c.game.settings = "spell_backward", "min_word_len=3,max_word_len=5"
    c.game.form, c.game.max_prompt, c.game.max_tokens, c.game.question_characters = "plain", 96, 8, 80
    c.recipe.update(group_size=8, rewards="mixed", returns="immediate")  # in a pair each role is paid for its own answer too
    c.steps, c.rollout.tasks = 40, 16
    c.sft.steps = 400
    c.optimizer.learning_rate = 3e-4
    c.evaluation.update(tasks=64, final_tasks=200)
    return smoke_workflow(c) if arg == "smoke" else c
