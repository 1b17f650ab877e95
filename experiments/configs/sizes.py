"""What configs have in common: the small worlds, boards, games in text, and the sizes of the experiments of UnityMAS-O and Stronger-MAS."""

from marl_llm.runs.base import base_config, smoke, variant


def small_workflow(name: str, game: str, recipe: str):
    """A workflow of a small generated world, with micro models."""
    c = base_config(name, game=game, recipe=recipe)
    c.rollout.update(tasks=32, timeout_s=600.0)
    c.optimizer.update(minibatch=64, learning_rate=6e-4, warmup=10)
    c.sft.tasks = 48
    c.evaluation.update(tasks=100, final_tasks=400, sampled=True)
    c.devices = 1
    return c


def without_tied(c):
    """Advantages without a scale, one mean over all tokens, and groups of equal rewards left out of the step and its denominator."""
    c.recipe.update(scale_advantages="none", loss_aggregation="token_mean", filter_zero_variance=True, zero_variance_in_denominator=False)
    return c


def mini_debate(name: str, game: str, grpo: bool):
    """What the two debates have in common in their small worlds; with `grpo`, whole plays are compared call by call."""
    c = without_tied(small_workflow(name, game, "grpo" if grpo else "at_grpo"))
    c.steps = 80
    c.rollout.tasks = 16
    c.optimizer.update(learning_rate=8e-5, minibatch=16)  # larger steps cost right responses a lot: see `benchmarks.step_sizes`
    c.evaluation.final_tasks = 300
    if grpo:
        c.recipe.update(group_size=4, group_by="instance,agent,turn", rewards="mixed", returns="immediate")
        c.optimizer.minibatch *= 4  # prompts of a tree have K responses, those of whole plays one
    return c


def real_model(config):
    """What a checkpoint of real size needs, wherever it runs: products in bfloat16 beside float32 masters, every layer computed again in
    the backward pass and one packed row at a time, layers stacked (one layer's program), parameters split over all devices."""
    config.model.update(preset=None, compute_dtype="bfloat16", remat="full")
    config.stacked_layers = True
    config.mesh.fsdp = 0
    return config


def small_real_model(config, smoke: bool = False):
    """A checkpoint of 10^8 parameters on two CPU cores: one base, an adapter per role, 4 tasks of 4 plays a step. `smoke`: two steps."""
    config.steps = 2 if smoke else 60
    config.model.update(preset=None, lora_rank=16, remat="dots")
    config.recipe.update(temperature=0.8, group_size=4, kl_coef=0.0)
    config.rollout.update(tasks=4, max_num_seqs=16, decode_steps=16)
    config.optimizer.update(minibatch=64, learning_rate=1e-3, warmup=2, row_tokens=400, microbatch_tokens=400)
    config.stacked_layers = True
    config.checkpoint.every = 10  # ten minutes of two cores
    config.evaluation.update(every=30, tasks=16, final_tasks=4 if smoke else 64, sampled=True, ablate_roles=False)
    return config


def full_size(config):
    """The sizes of UnityMAS-O's experiments: PPO with a critic per model, learning rates 1e-6 and 1e-5, minibatches of 64."""
    config.steps = 300
    real_model(config)
    config.rollout.update(tasks=128, max_num_seqs=128, decode_steps=32, timeout_s=900.0)
    config.optimizer.update(minibatch=64, row_tokens=16_384, learning_rate=1e-6, critic_learning_rate=1e-5, warmup=10, b2=0.999)
    config.evaluation.update(every=10, sampled=True)
    return config


def at_grpo_full(config):
    """The constants of Stronger-MAS (§5.1, App. C.1) for Qwen3-1.7B and 8B; `config` has the recipe "at_grpo", whose K is 4 and alpha 1.

    150 steps; Adam with rate 1e-6, weight decay 0.01, gradients clipped at 1.0, one epoch, no entropy bonus; thinking off; greedy
    validation. Prompt and response budgets are those of the environment's roles, and so is T = 4.

    Readings, where the paper is silent or short: the global batch of 128 is 32 tasks with K = 4 candidates; the PPO minibatch of 64 is in
    prompts; the ratio is clipped at 0.2. The rate decays linearly to 5 %, as all runs here do; the paper states no schedule.

    Set `config.model.path` to the checkpoint. Models of one team may differ: `config.models.<name>.path`.
    """
    config.steps = 150
    real_model(config)
    config.model.thinking = "off"
    config.rollout.update(tasks=32, max_num_seqs=128, decode_steps=32, timeout_s=900.0)
    config.optimizer.update(minibatch=64, learning_rate=1e-6, warmup=0, weight_decay=0.01, b2=0.999)
    config.evaluation.update(every=10, tasks=100, final_tasks=200)
    return config


def in_text(name: str, arg: str | None):
    """What the games in text have in common, whose game is named as the config; `arg` may be 'full', which is the same, or 'smoke'."""
    c = at_grpo_full(base_config(name, game=name, recipe="at_grpo"))
    if variant(name, arg, ("full", "smoke")) == "smoke":
        c = smoke_workflow(c)
        c.game.turns = 2
        c.rollout.max_prompt, c.rollout.max_tokens = 2048, 64
    return c


def board(name: str):
    """What Sokoban and Sudoku have in common, compiled."""
    c = without_tied(base_config(name, game=name, recipe="at_grpo"))
    c.recipe.entropy_coef = 0.005
    c.optimizer.learning_rate = 1e-3
    c.evaluation.sampled = True
    return c


def magrpo_full(config):
    """The constants of MAGRPO (App. C) that writing and coding share; `config` has the recipe "magrpo".

    1,500 steps, beta .02 (reading: in coding too), groups of 4 (a reading; the release's), one optimizer step per rollout. The paper states
    neither batch nor schedule: 8 tasks a step here, and the rate decays linearly to 5 %, as all runs here do.
    Set `config.model.path` to the checkpoint.
    """
    config.steps = 1500
    real_model(config)
    config.model.thinking = "off"
    config.recipe.group_size = 4
    config.rollout.update(tasks=8, max_num_seqs=64, decode_steps=32, timeout_s=900.0)
    config.optimizer.update(minibatch=64, warmup=0, b2=0.999)
    config.evaluation.update(every=50, tasks=32, final_tasks=200, sampled=True)
    return config


def search(name: str, arg: str | None, steps: int = 120, **keys):
    """Workflows A, B and C of UnityMAS-O in the small world of facts, with 'full' at the paper's size; `keys` are for both."""
    way = name.removeprefix("search_")
    if variant(name, arg, ("smoke", "full")) == "full":
        c = full_size(base_config(name, game=f"question_{way}", recipe="ppo"))
    else:
        c = without_tied(small_workflow(name, f"fact_{way}", "grpo"))
        c.steps = steps
        c.sft.steps = 700
        # a call is paid for itself: the workflow's rewards say what it earned
        c.recipe.update(group_size=8, rewards="mixed", returns="immediate")
    c.update(keys)
    return smoke_workflow(c) if arg == "smoke" else c


def smoke_workflow(config):
    """The `:smoke` variant of a workflow, whose plays take longer than a compiled game's."""
    config = smoke(config)
    config.steps = min(config.steps, 2)
    config.sft.steps = min(config.sft.steps, 4)
    config.rollout.tasks = 4
    config.rollout.max_num_seqs = 16
    config.evaluation.every = config.checkpoint.every = 1
    config.evaluation.tasks = config.evaluation.final_tasks = 8
    config.evaluation.samples = 1
    return config
