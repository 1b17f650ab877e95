"""Recipes: the five choices of a published method, as data.

A recipe says how a team is sampled, what a sample is paid, with whom it is compared, on which scale, and which loss is stepped.
`make_recipe` (in `published`) gives a published one with any field changed, and refuses what does not exist or would do nothing. The two
functions that carry a recipe out on plain arrays, `advantages_for` and `loss_for`, are in `apply`; nothing here knows about
models or games.

Each recipe has the preset "paper" (what the text says) and, where the authors' code is known to differ, "released".
"""

import collections.abc
import dataclasses
import difflib
import math
import types
import typing

import numpy as np

from marl_llm.algorithms.advantages import SCALES, SINGLETONS
from marl_llm.algorithms.credit import EXCHANGES
from marl_llm.algorithms.distillation import DIVERGENCES
from marl_llm.algorithms.losses import KL_KINDS, LEVELS, REDUCTIONS
from marl_llm.algorithms.ratios import CORRECTIONS
from marl_llm.algorithms.returns import SCOPES
from marl_llm.old_names import convert_recipe_fields

CENTER = 0.5  # the middle of a coach's scale when a score from 0 to 10 is paid with the weight 0.1
TO_GO = ("to_go", "to_go_mean")
AXES = ("instance", "env", "agent", "turn", "trajectory")
GROUPED = ("group", "leave_one_out", "preference")  # advantage estimators that compare within groups
CHOICES = types.MappingProxyType(
    {
        "sampling": ("tree", "parallel", "chain"),
        "pick": ("greedy", "first", "random"),
        "joint": ("aligned", "cross"),
        "rewards": ("mixed", "team", "local"),
        "returns": ("immediate", "to_go", "to_go_mean", "outcome", "outcome_plus_local", "trajectory", "gae", "counterfactual"),
        "exchange": EXCHANGES,
        "center": ("none", "score"),
        "baseline": ("none", "role", "place"),
        "scope": SCOPES,
        "advantage_estimator": (*GROUPED, "global", "ema", "critic"),
        "scale_advantages": SCALES,
        "singleton": SINGLETONS,
        "statistics_weight": ("sample", "trajectory", "token"),
        "loss": ("clip", "cispo", "sapo", "vespo", "reinforce", "gmpo", "dppo_tv", "dppo_kl"),
        "importance_level": LEVELS,
        "loss_aggregation": REDUCTIONS,
        "kl_kind": KL_KINDS,
        "kl_where": ("loss", "reward"),
        "distill_divergence": DIVERGENCES,
        "rollout_correction": CORRECTIONS,
        "rollout_correction_level": ("token", "sequence", "product"),
    }
)

CLIPS = ("clip_low", "clip_high")
FUNCTIONS = ("advantages", "policy_loss")  # fields that hold a function of one's own, or None
# each loss's own defaults of them; of "gmpo" they bound log ratios, of "dppo_*" divergences
_CLIP_WINDOWS = {"clip": (0.2, 0.2), "cispo": (1.0, 4.0), "gmpo": (0.4, 0.4), "dppo_tv": (0.2, 0.2), "dppo_kl": (0.2, 0.2)}


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
        for field, window in zip(CLIPS, _CLIP_WINDOWS.get(self.loss, _CLIP_WINDOWS["clip"]), strict=True):
            if getattr(self, field) is None or isinstance(getattr(self, field), _OfLoss):
                object.__setattr__(self, field, _OfLoss(window))
        for field, low, high in _RANGES:
            value = getattr(self, field)
            if value is None and field in _OPTIONAL:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
                raise ValueError(f"{self.name}: {field}={value!r} must be a number in [{low}, {high}].")
            if field in _INTEGERS and not isinstance(value, int):
                raise ValueError(f"{self.name}: {field}={value!r} must be a whole number.")
            if field not in _INTEGERS and not isinstance(value, _OfLoss):
                object.__setattr__(self, field, float(value))
        for field in FUNCTIONS:
            if getattr(self, field) is not None and not callable(getattr(self, field)):
                raise ValueError(f"{self.name}: {field}={getattr(self, field)!r} must be a function.")
        for field in ("filter_zero_variance", "zero_variance_in_denominator", "mask_truncated"):
            if not isinstance(getattr(self, field), bool):
                raise ValueError(f"{self.name}: {field}={getattr(self, field)!r} must be True or False.")
        for broken, why in _contradictions(self):
            if broken:
                raise ValueError(f"{self.name}: {why}")


_INTEGERS = ("group_size", "replays", "top_k", "joint_subset", "ddof", "max_length", "distill_top_k")
_OPTIONAL = (
    "replays", "top_k", "overlong_buffer", "joint_subset", "dual_clip", "max_length", "value_clip", "kl_target", "off_policy_kl",
    "distill_top_k",
)  # fmt: skip
_RANGES = (
    ("group_size", 1, math.inf),
    ("replays", 1, math.inf),
    ("temperature", 1e-3, math.inf),
    ("top_k", 1, math.inf),
    ("top_p", 1e-6, 1),
    ("joint_subset", 1, math.inf),
    ("alpha", -math.inf, math.inf),
    ("overlong_buffer", 1e-6, 1),
    ("overlong_penalty", 0, math.inf),
    ("gamma", 0, 1),
    ("gae_lambda", 0, 1),
    ("ddof", 0, 1),
    ("epsilon", 0, math.inf),
    ("ema_decay", 0, 1),
    ("clip_low", 0, 1),
    ("clip_high", 0, math.inf),
    ("dual_clip", 1 + 1e-9, math.inf),
    ("gate_positive", 1e-6, math.inf),
    ("gate_negative", 1e-6, math.inf),
    ("max_length", 1, math.inf),
    ("kl_coef", 0, math.inf),
    ("kl_target", 1e-9, math.inf),
    ("kl_horizon", 1, math.inf),
    ("entropy_coef", 0, math.inf),
    ("entropy_quantile", 1e-6, 1),
    ("off_policy_kl", 0, math.inf),
    ("policy_coef", 0, math.inf),
    ("distill_coef", 0, math.inf),
    ("distill_beta", 1e-6, 1 - 1e-6),
    ("distill_top_k", 1, math.inf),
    ("value_coef", 0, math.inf),
    ("value_clip", 0, math.inf),
    ("rollout_correction_threshold", 1, math.inf),
)


def pay_reach(recipe: Recipe) -> dict[str, str]:
    """Whom the "team" pay and a role's own ("local") pay reach, in words: what of each enters which response's return.

    >>> from marl_llm.algorithms import make_recipe
    >>> pay_reach(make_recipe("grpo", rewards="mixed"))["local"]
    'all responses of the play, if it is paid in the last turn; earlier pay reaches nobody'
    """
    own, last = "the response that it is paid to", "all responses of the play, if it is paid in the last turn; earlier pay reaches nobody"
    later = {
        "token": own,
        "agent": "this and the earlier responses of the same role",
        "trajectory": "this and all earlier responses of the play",
        "joint": "all responses of this turn and of the earlier ones, as the mean of the turn",
    }[recipe.scope]
    both = {
        "to_go": later,
        "to_go_mean": f"{later}, one vote per role",
        "outcome": last,
        "outcome_plus_local": last,
        "trajectory": "all responses of the play, added up over its turns",
        "counterfactual": "the responses that changed the last one, each by its difference",
    }.get(recipe.returns, own)
    reach = {"team": both, "local": own if recipe.returns in ("outcome_plus_local", "counterfactual") else both}
    return {name: reach[name] if recipe.rewards in ("mixed", name) else "nobody" for name in reach}


def _contradictions(r: Recipe) -> list[tuple[bool, str]]:
    """List (is broken, what to do) for combinations that no method can mean."""
    return [
        (
            r.sampling == "tree" and r.returns in (*TO_GO, "outcome", "outcome_plus_local", "trajectory", "counterfactual"),
            f"returns={r.returns!r} needs plays that go on, but in a tree only one candidate per prompt does: "
            "use returns='immediate', or sampling='parallel' or 'chain'.",
        ),
        (
            r.returns == "counterfactual" and r.rewards == "local",
            "returns='counterfactual' asks what the team would have got, and rewards='local' leaves that out: use 'team' or 'mixed'.",
        ),
        (
            r.group_size < 2 and r.advantage_estimator in GROUPED and bool({"instance", "env"} & set(r.group_by)),
            f"group_size=1 makes groups of one for group_by={r.group_by!r}, which teach nothing: use group_size >= 2.",
        ),
        (
            (r.returns == "gae") != (r.advantage_estimator == "critic"),
            f"returns='gae' and advantage_estimator='critic' belong together; got {r.returns!r} and {r.advantage_estimator!r}.",
        ),
        (
            r.advantage_estimator in GROUPED and not r.group_by,
            "group_by is empty: name the axes of a group, or use advantage_estimator='global' for the whole batch.",
        ),
        (
            r.joint == "cross" and (r.sampling != "parallel" or r.group_size < 2),
            f"joint='cross' pairs responses of several plays: use sampling='parallel' (this is {r.sampling!r}) and group_size >= 2.",
        ),
        (
            r.joint_subset is not None and r.joint_subset % r.group_size != 0,
            f"joint_subset={r.joint_subset} must be a multiple of group_size={r.group_size}, to judge all responses equally often.",
        ),
        (r.advantage_estimator in GROUPED[1:] and r.statistics_weight != "sample",
         f"{r.advantage_estimator} has statistics_weight='sample'."),
        ((r.loss_aggregation == "constant") != (r.max_length is not None), "loss_aggregation='constant' and max_length belong together."),
        (
            r.policy_coef == 0 and r.distill_coef == 0,
            "policy_coef=0 leaves nothing to learn from: set distill_coef, and a teacher for the role.",
        ),
        (
            r.distill_coef > 0 and (r.top_k is not None or r.top_p < 1),
            f"distill_coef={r.distill_coef:g} compares whole distributions, but top_k={r.top_k} and top_p={r.top_p:g} sample from a part.",
        ),
        (
            r.distill_coef > 0 and r.filter_zero_variance,
            "filter_zero_variance leaves out samples that a teacher would score: use filter_zero_variance=False with distill_coef.",
        ),
        (
            r.advantages is not None and r.advantage_estimator == "critic",
            "advantages of your own are one number per sample, and advantage_estimator='critic' has one per token: use another recipe.",
        ),
    ]


def _without_effect(r: Recipe) -> list[tuple[tuple[str, ...], bool, str]]:
    """List (fields, have no effect, why), for the check of what a caller set on purpose."""
    grouped = r.advantage_estimator in GROUPED
    return [
        (("pick",), r.sampling != "tree", f"sampling={r.sampling!r} has no candidates to pick from (only 'tree' has)"),
        (("joint_subset",), r.joint == "aligned", "joint='aligned' judges each play as it is (only 'cross' chooses)"),
        (
            ("returns",),
            r.returns == "outcome_plus_local" and r.rewards != "mixed",
            f"rewards={r.rewards!r} has no two parts (only 'mixed' has)",
        ),
        (
            ("exchange", "replays"),
            r.returns != "counterfactual",
            f"returns={r.returns!r} replays nothing (only 'counterfactual' does)",
        ),
        (("alpha",), r.rewards != "mixed", f"rewards={r.rewards!r} mixes nothing (only 'mixed' does)"),
        (("overlong_penalty",), r.overlong_buffer is None, "overlong_buffer=None punishes no length"),
        (("scope",), r.returns not in TO_GO, f"returns={r.returns!r} sums no later rewards (only 'to_go' and 'to_go_mean' do)"),
        (("baseline",), r.advantage_estimator != "global",
         f"advantage_estimator={r.advantage_estimator!r} has baselines of its own (only 'global' has none)"),
        (
            ("center",),
            r.returns not in ("to_go", "trajectory", "gae") or (r.returns == "to_go" and r.scope == "token"),
            f"returns={r.returns!r} adds nothing up, and the baseline takes every constant off",
        ),
        (("gamma",), r.returns not in ("to_go", "gae"), f"returns={r.returns!r} discounts nothing (only 'to_go' and 'gae' do)"),
        (("gamma",), r.returns == "to_go" and r.scope == "token", "scope='token' sums nothing over turns"),
        (("gae_lambda", "value_coef", "value_clip"), r.advantage_estimator != "critic", "only advantage_estimator='critic' has a critic"),
        (("group_by", "singleton"), not grouped, f"advantage_estimator={r.advantage_estimator!r} makes no groups"),
        (("scale_advantages",), r.advantage_estimator != "group", f"advantage_estimator={r.advantage_estimator!r} does not read it"),
        (("ema_decay",), r.advantage_estimator != "ema", f"advantage_estimator={r.advantage_estimator!r} keeps no running mean"),
        (("ddof", "epsilon", "statistics_weight"), r.advantage_estimator == "ema", "advantage_estimator='ema' divides by nothing"),
        (("ddof", "epsilon"), r.advantage_estimator in GROUPED[1:], f"{r.advantage_estimator} divides by no deviation"),
        (("ddof",), r.advantage_estimator == "group" and r.scale_advantages in ("none", "range"),
         f"scale_advantages={r.scale_advantages!r} is no deviation"),
        (("singleton",), r.advantage_estimator == "preference", "a preference is between two"),
        (("epsilon",), r.advantage_estimator == "group" and r.scale_advantages == "none", "scale_advantages='none' divides by nothing"),
        (("statistics_weight",), r.advantage_estimator == "critic", "the critic's advantages are whitened over tokens"),
        (("filter_zero_variance",), not grouped, f"advantage_estimator={r.advantage_estimator!r} makes no groups"),
        (("zero_variance_in_denominator",), not r.filter_zero_variance, "no sample is skipped (filter_zero_variance=False)"),
        (CLIPS, r.loss not in _CLIP_WINDOWS, f"loss={r.loss!r} clips no ratio"),
        (("importance_level",), r.loss not in ("clip", "sapo"), f"only loss='clip' and 'sapo' read it, and this is {r.loss!r}"),
        (("dual_clip",), r.loss != "clip", f"only loss='clip' reads it, and this is {r.loss!r}"),
        (("gate_positive", "gate_negative"), r.loss != "sapo", f"only loss='sapo' reads it, and this is {r.loss!r}"),
        (
            ("loss", "importance_level", *CLIPS, "dual_clip", "gate_positive", "gate_negative"),
            r.policy_loss is not None,
            "policy_loss is a function of your own",
        ),
        (
            ("baseline", "scale_advantages", "ddof", "epsilon", "statistics_weight", "singleton", "ema_decay"),
            r.advantages is not None,
            "advantages is a function of your own",
        ),
        (("distill_divergence", "distill_beta", "distill_top_k"), r.distill_coef == 0, "distill_coef=0 reads no teacher"),
        (("distill_beta",), r.distill_divergence != "jsd", f"only distill_divergence='jsd' mixes, and this is {r.distill_divergence!r}"),
        (("distill_top_k",), r.distill_divergence == "sampled", "distill_divergence='sampled' reads one token"),
        (("rollout_correction_level", "rollout_correction_threshold"), r.rollout_correction == "none", "there is no rollout_correction"),
        (("kl_kind", "kl_where", "kl_target"), r.kl_coef == 0, "kl_coef=0 switches the KL term off"),
        (("kl_horizon",), r.kl_target is None, "kl_target=None leaves kl_coef as it is"),
    ]


def check_known(field: str, value, choices) -> None:
    """`check_choice` with a suggestion, which cares neither for case nor for underscores."""
    if value in choices:
        return
    plain = {str(c).lower().replace("_", ""): c for c in choices}
    close = [plain[c] for c in difflib.get_close_matches(str(value).lower().replace("_", "").replace("-", ""), plain, 1)]
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ValueError(f"{field}={value!r} is unknown.{hint} Valid: {', '.join(repr(c) for c in choices)}.")


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
    for fields, idle, why in _without_effect(recipe):
        for field in fields:
            if idle and field in overrides:
                raise ValueError(f"{recipe.name}: {field}={overrides[field]!r} would have no effect: {why}. Leave it out.")
