"""Third floor: policies on the mesh, the warm start, rollouts, the update, checkpoints."""

from marl_llm.training.checkpoints import CheckpointError, Checkpoints
from marl_llm.training.critic_update import make_critic_update, with_value_head
from marl_llm.training.imitation import make_imitation
from marl_llm.training.learner import Learner, LearnerOptions, ModelSpec
from marl_llm.training.mesh import compile_quickly, make_mesh, over_data, use_cpu_devices
from marl_llm.training.packed_imitation import make_packed_imitation
from marl_llm.training.packed_update import make_packed_update, make_token_kl
from marl_llm.training.packing import PackingError, TokenSample, pack
from marl_llm.training.policy import Policy, fresh_policy, linear_decay, make_optimizer, make_policy, step_policy
from marl_llm.training.rollouts import Batch, make_evaluation, make_random_rollout, make_rollout, summarise
from marl_llm.training.team import PlayOptions, Team
from marl_llm.training.update import Rows, make_update, rows_from, to_samples

__all__ = [
    "compile_quickly",
    "Batch",
    "CheckpointError",
    "Checkpoints",
    "Learner",
    "LearnerOptions",
    "ModelSpec",
    "PackingError",
    "PlayOptions",
    "Policy",
    "Rows",
    "Team",
    "TokenSample",
    "fresh_policy",
    "linear_decay",
    "make_critic_update",
    "make_evaluation",
    "make_imitation",
    "make_mesh",
    "make_optimizer",
    "make_packed_imitation",
    "make_packed_update",
    "make_policy",
    "make_random_rollout",
    "make_rollout",
    "make_token_kl",
    "make_update",
    "pack",
    "rows_from",
    "step_policy",
    "summarise",
    "to_samples",
    "over_data",
    "use_cpu_devices",
    "with_value_head",
]
