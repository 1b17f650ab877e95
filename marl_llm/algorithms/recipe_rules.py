"""What a recipe may say: the choices and ranges of its fields, and which of them contradict or leave each other without effect."""

from __future__ import annotations

import difflib
import math
import types
from typing import TYPE_CHECKING

from marl_llm.algorithms.advantages import SCALES, SINGLETONS
from marl_llm.algorithms.credit import EXCHANGES
from marl_llm.algorithms.distillation import DIVERGENCES
from marl_llm.algorithms.losses import KL_KINDS, LEVELS, REDUCTIONS
from marl_llm.algorithms.ratios import CORRECTIONS
from marl_llm.algorithms.returns import SCOPES

if TYPE_CHECKING:
    from marl_llm.algorithms.recipes import Recipe

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
CLIP_WINDOWS = {"clip": (0.2, 0.2), "cispo": (1.0, 4.0), "gmpo": (0.4, 0.4), "dppo_tv": (0.2, 0.2), "dppo_kl": (0.2, 0.2)}
INTEGERS = ("group_size", "replays", "top_k", "joint_subset", "ddof", "max_length", "distill_top_k")
OPTIONAL = (
    "replays", "top_k", "overlong_buffer", "joint_subset", "dual_clip", "max_length", "value_clip", "kl_target", "off_policy_kl",
    "distill_top_k",
)  # fmt: skip
RANGES = (
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


def contradictions(r: Recipe) -> list[tuple[bool, str]]:
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
        (
            r.advantages is not None and r.advantage_estimator == "ema",
            "advantage_estimator='ema' reads its running means off its own advantages, and advantages are of your own: use another recipe.",
        ),
    ]


def without_effect(r: Recipe) -> list[tuple[tuple[str, ...], bool, str]]:
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
        (CLIPS, r.loss not in CLIP_WINDOWS, f"loss={r.loss!r} clips no ratio"),
        (("importance_level",), r.loss not in ("clip", "sapo"), f"only loss='clip' and 'sapo' read it, and this is {r.loss!r}"),
        (("dual_clip",), r.loss != "clip", f"only loss='clip' reads it, and this is {r.loss!r}"),
        (("gate_positive", "gate_negative"), r.loss != "sapo", f"only loss='sapo' reads it, and this is {r.loss!r}"),
        (
            ("loss", "importance_level", *CLIPS, "dual_clip", "gate_positive", "gate_negative"),
            r.policy_loss is not None,
            "policy_loss is a function of your own",
        ),
        (
            ("baseline", "scale_advantages", "ddof", "epsilon", "statistics_weight", "singleton"),
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
