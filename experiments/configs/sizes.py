"""What configs of workflows have in common: the small generated worlds, and the sizes of the experiments of UnityMAS-O and Stronger-MAS."""

from experiments.base import base_config, smoke, variant


def small_workflow(name: str, game: str, recipe: str):
    """A workflow of a small generated world, with micro models."""
    c = base_config(name, game=game, recipe=recipe)
    c.rollout.tasks = 32
    c.rollout.timeout_s = 600.0
    c.optimizer.minibatch = 64
    c.optimizer.learning_rate = 6e-4
    c.optimizer.warmup = 10
    c.warm_start.tasks = 48
    c.evaluation.tasks = 100
    c.evaluation.final_tasks = 400
    c.evaluation.sampled = True
    c.devices = 1
    return c


def without_tied(c):
    """Advantages without a scale, one mean over all tokens, and groups of equal rewards left out of the step and its denominator."""
    c.recipe.scale = "none"
    c.recipe.reduce = "token_mean"
    c.recipe.skip_tied = True
    c.recipe.tied_in_denominator = False
    return c


def whole_plays(c):
    """GRPO on a debate: whole plays, compared call by call, in minibatches of as many samples as a tree of K = 4 has."""
    c.recipe.branches = 4
    c.recipe.group_by = "instance,agent,turn"
    c.recipe.rewards, c.recipe.returns = "mixed", "immediate"
    c.optimizer.minibatch *= 4  # prompts of a tree have K responses, those of whole plays one
    return c


def mini_debate(name: str, game: str, grpo: bool):
    """What the two debates have in common in their small worlds."""
    c = without_tied(small_workflow(name, game, "grpo" if grpo else "at_grpo"))
    c.steps = 80
    c.rollout.tasks = 16
    c.optimizer.learning_rate = 2e-4
    c.optimizer.minibatch = 8
    c.evaluation.final_tasks = 300
    return whole_plays(c) if grpo else c


def mini_search(name: str, game: str):
    """What the three question-answering workflows have in common in the small world of facts."""
    c = small_workflow(name, game, "grpo")
    c.steps = 120
    c.warm_start.steps = 700
    c.recipe.branches = 8
    c.recipe.rewards = "mixed"
    c.recipe.returns = "immediate"  # a call is paid for itself: the workflow's rewards say what it earned
    return without_tied(c)


def full_size(config):
    """The sizes of UnityMAS-O's experiments: PPO with a critic per model, learning rates 1e-6 and 1e-5, minibatches of 64."""
    config.steps = 300
    config.model.preset = None
    config.rollout.tasks = 128
    config.rollout.slots = 128
    config.rollout.chunk = 32
    config.rollout.timeout_s = 900.0
    config.optimizer.minibatch = 64
    config.optimizer.row_tokens = 16_384
    config.optimizer.learning_rate = 1e-6
    config.optimizer.critic_learning_rate = 1e-5
    config.optimizer.warmup = 10
    config.optimizer.b2 = 0.999
    config.evaluation.every = 10
    config.evaluation.sampled = True
    return config


def at_grpo_full(config):
    """The constants of Stronger-MAS (§5.1, App. C.1) for Qwen3-1.7B and 8B; `config` has the recipe "at_grpo", whose K is 4 and alpha 1.

    150 steps; Adam with rate 1e-6, weight decay 0.01, gradients clipped at 1.0, one epoch, no entropy bonus; thinking off; greedy
    validation. Prompt and response budgets are those of the world's roles, and so is T = 4.

    Readings, where the paper is silent or short: the global batch of 128 is 32 tasks with K = 4 candidates; the PPO minibatch of 64 is in
    prompts; the ratio is clipped at 0.2. The rate decays linearly to 5 %, as all runs here do; the paper states no schedule.

    Set `config.model.path` to the checkpoint. Models of one team may differ: `config.models.<name>.path`.
    """
    config.steps = 150
    config.model.preset = None
    config.model.thinking = "off"
    config.rollout.tasks = 32
    config.rollout.slots = 128
    config.rollout.chunk = 32
    config.rollout.timeout_s = 900.0
    config.optimizer.minibatch = 64
    config.optimizer.learning_rate = 1e-6
    config.optimizer.warmup = 0
    config.optimizer.weight_decay = 0.01
    config.optimizer.b2 = 0.999
    config.evaluation.every = 10
    config.evaluation.tasks = 100
    config.evaluation.final_tasks = 200
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


def full_search(name: str, game: str):
    """Workflows A, B and C at the paper's size."""
    return full_size(base_config(name, game=game, recipe="ppo"))


def smoke_workflow(config):
    """The `:smoke` variant of a workflow, whose plays take longer than a compiled game's."""
    config = smoke(config)
    config.steps = min(config.steps, 2)
    config.warm_start.steps = min(config.warm_start.steps, 4)
    config.rollout.tasks = 4
    config.rollout.slots = 16
    config.evaluation.every = config.checkpoint.every = 1
    config.evaluation.tasks = config.evaluation.final_tasks = 8
    return config
