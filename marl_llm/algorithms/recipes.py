"""Recipes: the five choices of a published method, as data.

A recipe says how a team is sampled, what a sample is paid, with whom it is compared, on which scale, and which loss is stepped.
`make_recipe` (in `published`) gives a published one with any field changed, and refuses what does not exist or would do nothing. The two
functions that carry a recipe out on plain arrays, `advantages_for` and `loss_for`, are in `apply`; nothing here knows about
models or games.

Each recipe has the preset "paper" (what the text says) and, where the authors' code is known to differ, "released".
"""

import collections.abc
import dataclasses
import typing

import numpy as np

from marl_llm.algorithms.recipe_rules import (
    AXES,
    CHOICES,
    CLIP_WINDOWS,
    CLIPS,
    FUNCTIONS,
    INTEGERS,
    OPTIONAL,
    RANGES,
    check_known,
    contradictions,
    without_effect,
)
from marl_llm.old_names import convert_recipe_fields


class _OfLoss(float):
    """A clip that nobody chose: `dataclasses.replace(recipe, loss=...)` takes that of the new loss."""


@typing.no_type_check  # __post_init__ checks every field itself, with messages for people who edit configs
@dataclasses.dataclass(frozen=True)
class Recipe:
    """One method as data. Build it with `make_recipe`; `dataclasses.replace` works too but lets useless options through."""

    name: str  # which published method
    preset: str = "paper"  # "paper" or "released"

    # How a team is sampled.
    # "tree": K candidates per prompt, one goes on; "parallel": K plays of an instance, compared with each other; "chain": K plays of an
    # instance, each for itself, so that K may be 1. In plays no prompt has a second candidate. See `plays` and `candidates`.
    sampling: str = "parallel"
    group_size: int = 4  # K
    pick: str = "greedy"  # tree: which candidate goes on: the best paid by `rewards` ("greedy"), "first" or "random"
    temperature: float = 1.0  # of sampling, and of both sides of the ratio
    top_k: int | None = None  # sample among the k likeliest tokens only; None: all
    top_p: float = 1.0  # sample inside the nucleus of this mass only; 1: all
    joint: str = "aligned"  # parallel: the k-th responses of all agents meet ("aligned"), or every one meets every one ("cross")
    joint_subset: int | None = None  # cross: how many joint actions per task are judged, a multiple of K; None: all K^N

    # What a sample is paid.
    rewards: str = "mixed"  # "mixed": α team + local; or "team" or "local" alone
    alpha: float = 1.0  # α, weight of the team's reward in "mixed"
    overlong_buffer: float | None = None  # share of a role's token budget over whose end a response is punished more and more; None: never
    overlong_penalty: float = 1.0  # overlong_buffer: what a response that uses up its budget loses; see returns.overlong_penalty
    center: str = "none"  # "score": CENTER is taken off every reward first, the middle of a coach's scale from 0 to 1
    # "immediate", "to_go", "to_go_mean", "outcome" (last turn's), "outcome_plus_local" (the team's last one, and each response's own pay),
    # "trajectory" (sum over turns), "gae" or "counterfactual" (what the response added to the team's last reward, by replay)
    returns: str = "immediate"
    exchange: str = "candidate"  # counterfactual: a replay has another "candidate" of the prompt in its place, or "silence"
    replays: int | None = None  # counterfactual: at most how many responses of each play are replayed and trained on; None: all
    scope: str = "trajectory"  # to_go, to_go_mean: whose later rewards count; see returns.rewards_to_go
    gamma: float = 1.0  # discount per turn (to_go) or per token (gae)
    gae_lambda: float = 1.0  # gae: λ

    # With whom it is compared, and on which scale.
    baseline: str = "none"  # global: the mean per "role", or per role and "place" in its play, is taken off first; then one scale for all
    # "group", "leave_one_out", "preference" (how many of its group it beats), "global" (the whole batch), "ema" (a running mean per role is
    # taken off) or "critic" (learned values, then whitened)
    advantage_estimator: str = "group"
    ema_decay: float = 0.95  # ema: how much of a role's running mean stays after each play
    group_by: tuple[str, ...] = ("instance", "agent")  # axes that name a group, out of AXES; () is one group of everything
    scale_advantages: str = "std"  # group: "std", "none", "range", "batch" or "mean" (MaxRL)
    ddof: int = 1  # degrees of freedom of every standard deviation
    epsilon: float = 1e-6  # group: added to the divisor; global and critic: added to the variance
    singleton: str = "zero"  # what a group of one gets: "zero" or "raw", its return
    statistics_weight: str = "sample"  # who has one vote in the statistics: a "sample", a "trajectory", or each "token"
    filter_zero_variance: bool = False  # leave groups of equal returns out of the forward pass (they then feel no KL and no entropy term)
    zero_variance_in_denominator: bool = True  # whether skipped samples still count in the denominator of the loss

    mask_truncated: bool = False  # leave responses that their token budget ended out of the loss; they still count in their groups

    # Which loss is stepped.
    # "gmpo": geometric mean of clipped ratios; "dppo_tv", "dppo_kl": ratio within a bound of the divergence; see trust_regions
    loss: str = "clip"  # "clip": clipped ratio; "cispo", "vespo": weight on log π; "sapo": soft gate; "reinforce": no ratio at all
    importance_level: str = "token"  # ratio per "token", "sequence" (GSPO), "sequence_token" or "product" (of the whole response)
    clip_low: float | None = _OfLoss(0.2)  # lower clip: ratio >= 1 - clip_low; None: the loss's own, 0.2 for "clip" and 1 for "cispo"
    clip_high: float | None = _OfLoss(0.2)  # upper clip: ratio <= 1 + clip_high; None: the loss's own, 0.2 for "clip" and 4 for "cispo"
    dual_clip: float | None = None  # largest ratio that a negative advantage may count with; None: no bound
    gate_positive: float = 1.0  # sapo: temperature of the gate of positive advantages
    gate_negative: float = 1.05  # sapo: and of negative ones
    loss_aggregation: str = "sequence_mean_token_mean"  # see losses.reduce_parts
    max_length: int | None = None  # loss_aggregation="constant": Dr. GRPO's constant, in tokens
    kl_coef: float = 0.0  # β, weight of the KL to the reference
    kl_kind: str = "k3"  # estimator, see losses.kl
    # β·KL is added to the "loss" or taken off the "reward"; of an outcome, which all samples of a play share, each takes off its own
    kl_where: str = "loss"
    kl_target: float | None = None  # measured KL that β is steered to after each step, see `next_kl_coef`; None: β stays
    kl_horizon: float = 10_000.0  # kl_target: over how many samples β may change by a fifth
    entropy_coef: float = 0.0  # weight of the entropy bonus
    entropy_quantile: float = 1.0  # share of a step's tokens, those of the highest entropy, in the policy term; 1: all
    off_policy_kl: float | None = None  # nats per token beyond which a bad response leaves the policy term, see on_policy_rows; None: never
    policy_coef: float = 1.0  # weight of the policy term; 0: rewards teach nothing, only teachers and KL do
    distill_coef: float = 0.0  # weight of the divergence from the role's teacher, beside the policy term; 0: no teacher is read
    distill_divergence: str = "reverse_kl"  # exact "reverse_kl", "forward_kl" or "jsd"; or "sampled", one token's estimate of reverse_kl
    distill_beta: float = 0.5  # jsd: the teacher's share of the mixture
    distill_top_k: int | None = None  # the teacher's k likeliest tokens and all others as one; None: the whole vocabulary
    rollout_correction: str = "none"  # of the gap between sampler and scorer: "none", "truncate" or "mask"; see ratios
    rollout_correction_level: str = "token"  # weight per "token", "sequence" or "product"
    rollout_correction_threshold: float = 2.0  # largest weight
    value_coef: float = 0.5  # critic: weight of the value loss
    value_clip: float | None = 0.5  # critic: the value may move this far from the old one; None: no clip

    # Functions of one's own, in place of what the fields above say; see `marl_llm.algorithms.functions`.
    advantages: collections.abc.Callable | None = None  # (samples, returns [S]) -> [S], in place of baseline, advantage estimator and scale
    policy_loss: collections.abc.Callable | None = None  # (log_probs, old_log_probs, advantages, mask) -> [S, R], in place of `loss`

    @property
    def plays(self) -> int:
        """Plays of each instance: 1 in a tree, otherwise K."""
        return 1 if self.sampling == "tree" else self.group_size

    @property
    def candidates(self) -> int:
        """Responses to each prompt: K in a tree, otherwise 1."""
        return self.group_size if self.sampling == "tree" else 1

    @property
    def reward_weights(self) -> tuple[float, float]:
        """Weights of the team's and of the agent's own reward in the reward of this recipe: what it trains on, picks by and reports."""
        return {"mixed": (self.alpha, 1.0), "team": (1.0, 0.0), "local": (0.0, 1.0)}[self.rewards]

    def reward_of(self, team, local):
        """The reward of this recipe, of numbers or arrays."""
        of_team, of_local = self.reward_weights
        return of_team * team + of_local * local

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0):
                object.__setattr__(self, field.name, value.item())
        if isinstance(self.group_by, str):
            object.__setattr__(self, "group_by", tuple(axis.strip() for axis in self.group_by.split(",") if axis.strip()))
        object.__setattr__(self, "group_by", tuple(self.group_by))
        for axis in self.group_by:
            check_known(f"{self.name}: an axis of group_by", axis, AXES)
        for field, choices in CHOICES.items():
            check_known(f"{self.name}: {field}", getattr(self, field), choices)
        for field, window in zip(CLIPS, CLIP_WINDOWS.get(self.loss, CLIP_WINDOWS["clip"]), strict=True):
            if getattr(self, field) is None or isinstance(getattr(self, field), _OfLoss):
                object.__setattr__(self, field, _OfLoss(window))
        for field, low, high in RANGES:
            value = getattr(self, field)
            if value is None and field in OPTIONAL:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
                raise ValueError(f"{self.name}: {field}={value!r} must be a number in [{low}, {high}].")
            if field in INTEGERS and not isinstance(value, int):
                raise ValueError(f"{self.name}: {field}={value!r} must be a whole number.")
            if field not in INTEGERS and not isinstance(value, _OfLoss):
                object.__setattr__(self, field, float(value))
        for field in FUNCTIONS:
            if getattr(self, field) is not None and not callable(getattr(self, field)):
                raise ValueError(f"{self.name}: {field}={getattr(self, field)!r} must be a function.")
        for field in ("filter_zero_variance", "zero_variance_in_denominator", "mask_truncated"):
            if not isinstance(getattr(self, field), bool):
                raise ValueError(f"{self.name}: {field}={getattr(self, field)!r} must be True or False.")
        for broken, why in contradictions(self):
            if broken:
                raise ValueError(f"{self.name}: {why}")


def pay_reach(recipe: Recipe) -> dict[str, str]:
    """Whom the "team" pay and a role's own ("local") pay reach, in words: what of each enters which response's return.

    >>> from marl_llm.algorithms import make_recipe
    >>> pay_reach(make_recipe("grpo", rewards="mixed"))["local"]
    'all responses of the play, if it is paid in the last turn; earlier pay reaches nobody'
    """
    own_response = "the response that it is paid to"
    if_last = "all responses of the play, if it is paid in the last turn; earlier pay reaches nobody"
    later = {
        "token": own_response,
        "agent": "this and the earlier responses of the same role",
        "trajectory": "this and all earlier responses of the play",
        "joint": "all responses of this turn and of the earlier ones, as the mean of the turn",
    }[recipe.scope]
    of_team_pay = {
        "to_go": later,
        "to_go_mean": f"{later}, one vote per role",
        "outcome": if_last,
        "outcome_plus_local": if_last,
        "trajectory": "all responses of the play, added up over its turns",
        "counterfactual": "the responses that changed the last one, each by its difference",
    }.get(recipe.returns, own_response)
    reach = {"team": of_team_pay, "local": own_response if recipe.returns in ("outcome_plus_local", "counterfactual") else of_team_pay}
    return {name: reach[name] if recipe.rewards in ("mixed", name) else "nobody" for name in reach}


FIELDS = tuple(field.name for field in dataclasses.fields(Recipe) if field.name not in ("name", "preset"))

# What a sampler and a trainer carry out; all other fields are carried out by `advantages_for`, `loss_for` and their kin in `apply`.
SAMPLER_FIELDS = (
    "sampling", "group_size", "pick", "temperature", "top_k", "top_p", "joint", "joint_subset", "exchange", "replays",
)  # fmt: skip
TRAINER_FIELDS = (
    "filter_zero_variance", "zero_variance_in_denominator", "mask_truncated", "distill_coef", "distill_divergence", "distill_beta",
    "distill_top_k",
)  # fmt: skip


# What each model of a team may have of its own; all other fields say how the team is sampled, paid and compared.
LOSS_FIELDS = (
    "loss", "importance_level", *CLIPS, "dual_clip", "gate_positive", "gate_negative", "loss_aggregation", "max_length", "kl_coef",
    "kl_kind", "kl_target", "kl_horizon", "entropy_coef", "entropy_quantile", "off_policy_kl", "rollout_correction",
    "rollout_correction_level", "rollout_correction_threshold", "value_coef", "value_clip", "policy_loss", "mask_truncated",
    "policy_coef", "distill_coef", "distill_divergence", "distill_beta", "distill_top_k",
)  # fmt: skip


def with_loss(recipe: Recipe, **overrides) -> Recipe:
    """A team's recipe with some of `LOSS_FIELDS` changed, for one of its models.

    Raises:
      ValueError: a field of the team, a value that is not valid, a field that would have no effect, or a KL that is taken off the rewards
        of some models only.
    """
    overrides = convert_recipe_fields(overrides)
    for field in overrides:
        check_known("recipe field of a model", field, LOSS_FIELDS)
    changed = dataclasses.replace(recipe, **overrides)
    refuse_idle(changed, overrides)
    if recipe.kl_where == "reward" and bool(changed.kl_coef) != bool(recipe.kl_coef):
        raise ValueError(f"{recipe.name}: kl_coef={changed.kl_coef:g} for one model: with kl_where='reward' all models have a KL, or none.")
    return changed


def refuse_idle(recipe: Recipe, overrides: typing.Mapping[str, typing.Any]) -> None:
    """Raises `ValueError` for a field that was set on purpose and has no effect."""
    for fields, idle, why in without_effect(recipe):
        for field in fields:
            if idle and field in overrides:
                raise ValueError(f"{recipe.name}: {field}={overrides[field]!r} would have no effect: {why}. Leave it out.")
