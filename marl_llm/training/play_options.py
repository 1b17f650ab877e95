"""How a team plays on the host, and which options cannot be had together."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax.sharding import Mesh

from marl_llm.algorithms import Recipe
from marl_llm.coaching import Coaching
from marl_llm.sampling.sequences import WEIGHT_UPDATES
from marl_llm.training import processes
from marl_llm.training.mesh import own_mesh
from marl_llm.training.refills import refill_conflict
from marl_llm.workflows import WorkflowError


@dataclasses.dataclass(frozen=True)
class PlayOptions:
    """How a team plays on the host; see `marl_llm.workflows.Controller`."""

    max_num_seqs: int = 64  # hosted play: requests that each model decodes at once; None: 64
    decode_steps: int = 8  # hosted play: tokens between two looks at the queue; None: 8
    cache_gib: float | None = None  # hosted play: GiB of keys and values per device; None: what all slots can need, or half of the free
    attempts: int = 2  # hosted play: how often a play is tried before it is aborted; None: 2
    timeout_s: float | int | None = None  # hosted play: seconds for one attempt at a play; None: only the deadlines of its tools
    concurrency: int = 1024  # hosted play: most plays under way; None: 1,024
    batch_invariant: bool = False  # hosted play: a response's bytes depend on nobody else, as docs/resume.md says; None: False
    oversample: int = 0  # hosted play: tasks begun beyond `tasks`; the late ones belong to the next step (docs/async.md); None: 0
    lora_serving: str = "auto"  # hosted play: adapters on one base are sampled "multi" or "merged" (docs/real_models.md); None: auto
    max_staleness: int = 0  # hosted play: 1 plays the next step beside an update, with the parameters of before it (docs/async.md); None: 0
    block_pool: str = "own"  # hosted play: "shared": models of one shape draw pages from one pool (docs/real_models.md); None: own
    tensor: int | None = None  # hosted play: devices that share a layer's products in the engine (docs/real_models.md); None: mesh.tensor
    # hosted play: "in_flight" gives new parameters to responses under way (docs/async.md); None: blocking, once they have ended
    weight_update: str = "blocking"
    replay: int = 0  # hosted play: tasks of earlier steps that are kept to replay rare successes (docs/signal.md); 0: none
    draft_tokens: int = 0  # hosted play: tokens of a draft that one step verifies (docs/performance.md); None: 0, no drafts

    @classmethod
    def of(cls, section: Any) -> PlayOptions:
        """Those of a config's section: a mapping that holds more."""
        return cls(**{field.name: section[field.name] for field in dataclasses.fields(cls)})


def oversample_conflict(play: PlayOptions, recipe: Recipe, *, coached: bool, served: Sequence[str]) -> str:
    """Why `play.oversample` cannot be had beside these; empty if it can. `served`: models that a server draws for."""
    reasons = (
        (play.max_staleness, "max_staleness=1 already plays a whole step beside an update; use one of them"),
        (recipe.rollout_correction == "none", "late plays meet the parameters of before an update, which the loss must weigh: set "
         "recipe.rollout_correction=truncate (or mask)"),
        (recipe.joint == "cross", "recipe.joint='cross' was not tried with plays of two steps"),
        (coached, "a coach is told of whole steps"),
        (play.batch_invariant, "batch_invariant promises equal bytes, and who is late depends on time"),
        (served, f"model {served[0] if served else ''} is drawn by a server, which refuses answers begun before a push of parameters"),
    )  # fmt: skip
    return next((f"oversample={play.oversample}: {why}" for wrong, why in reasons if play.oversample and wrong), "")


def weight_update_conflict(play: PlayOptions, recipe: Recipe, *, served: Sequence[str], several: bool = False) -> str:
    """Why `play.weight_update` cannot be had beside these; empty if it can. `several`: processes."""
    how = play.weight_update
    if how not in WEIGHT_UPDATES:
        return f"weight_update={how!r} is unknown; the ways are {', '.join(WEIGHT_UPDATES)}"
    reasons = (
        (play.batch_invariant,
         "batch_invariant promises equal bytes, and when parameters arrive depends on time; use weight_update=blocking"),
        (not play.oversample and not play.max_staleness,
         "it would have no effect: nothing is under way when parameters change; set max_staleness=1 or oversample"),
        (recipe.rollout_correction == "none",
         "responses are drawn with the parameters of before and after an update, which the loss must weigh: "
         "set recipe.rollout_correction=truncate (or mask)"),
        (served, f"model {served[0] if served else ''} is drawn by a server, which takes parameters only while nothing is under way"),
        (several, "several processes would not take parameters at the same moment; use one, or weight_update=blocking"),
    )  # fmt: skip
    return next((f"weight_update={how}: {why}" for wrong, why in reasons if how == "in_flight" and wrong), "")


def background_conflict(play: PlayOptions, mesh: Mesh, coach_trains: bool) -> str:
    """Why no episode can be played beside an update here, as with `max_staleness` and `oversample`; empty if one can."""
    if coach_trains and play.max_staleness:
        return (
            f"max_staleness={play.max_staleness}: a coach that trains would change while it scores; use max_staleness=0, or a coach that "
            f"stays as it is"
        )
    name, value = ("max_staleness", play.max_staleness) if play.max_staleness else ("oversample", play.oversample)
    if value and (devices := own_mesh(mesh).size) > 1:
        return (
            f"{name}={value} needs one device in each process and found {devices}: an update and an engine that enter several devices in "
            f"different orders wait for each other; use one device, or {name}=0"
        )
    if play.oversample and processes.spans(mesh):
        return f"oversample={play.oversample} needs one process: several would not agree on who was late; use one, or oversample=0"
    return ""


def check_play(
    play: PlayOptions, recipe: Recipe, mesh: Mesh, *, coaching: Coaching | None, refills: int, served: Sequence[str]
) -> None:
    """Raises `WorkflowError` where these options cannot be had together. `served`: models that a server draws for."""
    coached = coaching is not None
    why = (
        background_conflict(play, mesh, coached and coaching.trained is not None)
        or weight_update_conflict(play, recipe, served=served, several=processes.spans(mesh))
        or oversample_conflict(play, recipe, coached=coached, served=served)
        or refill_conflict(refills, recipe, max_staleness=play.max_staleness, oversample=play.oversample, coached=coached)
    )
    if why:
        raise WorkflowError(why)
