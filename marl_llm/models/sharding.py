"""Which axis of which array lies on which axis of the mesh: logical names, and rule tables for training and for sampling.

A rule table maps a logical axis to mesh axes. `TRAIN` shards parameters over `fsdp` and `tensor` and rows over `data` and `fsdp`;
`SAMPLE` leaves parameters whole along `fsdp`, because a decode step would gather them for every token (MaxText and T5X call these tables
logical axis rules). An axis that does not divide stays whole: two key heads on a tensor axis of four are copied.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
import re
from typing import NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AXES = ("data", "fsdp", "tensor")
Rules = dict[str, tuple[str, ...]]

TRAIN: Rules = {
    "batch": ("data", "fsdp"),
    "vocab": ("tensor",),
    "embed": ("fsdp",),
    "heads": ("tensor",),
    "key_value_heads": ("tensor",),
    "feed_forward": ("tensor",),
    "experts": (),
}
SAMPLE: Rules = TRAIN | {"embed": ()}
REPLICATED: Rules = {"batch": ("data", "fsdp")}
RULES = {"train": TRAIN, "sample": SAMPLE, "replicated": REPLICATED}

# a leaf's path (its end) -> the logical name of each axis; stacked layers and stacked adapters have one axis more in front
_LEAVES: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    (r"v_(row|col)/.*", ()),  # means of Adafactor's, small
    (r"embedding", ("vocab", "embed")),
    (r"output", ("embed", "vocab")),
    (r"query/kernel", ("embed", "heads", None)),
    (r"(key|value)/kernel", ("embed", "key_value_heads", None)),
    (r"query/bias", ("heads", None)),
    (r"(key|value)/bias", ("key_value_heads", None)),
    (r"output/kernel", ("heads", None, "embed")),
    (r"experts/(gate|up)", ("experts", "embed", "feed_forward")),
    (r"experts/down", ("experts", "feed_forward", "embed")),
    (r"experts/router", ("embed", None)),
    (r"(gate|up)/kernel", ("embed", "feed_forward")),
    (r"(gate|up)/bias", ("feed_forward",)),
    (r"down/kernel", ("feed_forward", "embed")),
    (r"(down|output)/bias", (None,)),
    (r".*norm/weight", (None,)),
    (r"value_head/(kernel|bias)", (None,)),
    (r"lora/.*/(a|b)", ()),
    (r"ns_coeffs", (None,)),  # of Muon
)


class _Context(NamedTuple):
    mesh: Mesh
    rules: Rules


_context: contextvars.ContextVar[_Context | None] = contextvars.ContextVar("sharding", default=None)


@contextlib.contextmanager
def use_rules(mesh: Mesh, rules: Rules):
    """Within it, models traced under `jit` place their activations by `rules` on `mesh`. Without it they leave that to the compiler."""
    token = _context.set(_Context(mesh, rules))
    try:
        yield
    finally:
        _context.reset(token)


def path_name(path) -> str:
    """A pytree path as 'block_0/attention/query/kernel'."""
    return "/".join(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path)


def logical_axes(path: str, ndim: int) -> tuple[str | None, ...]:
    """Logical names of a parameter's axes; a scalar has none. Raises `ValueError` for a leaf that the table does not know."""
    if ndim == 0:  # a bias of the value head, an optimizer's count
        return ()
    for pattern, axes in _LEAVES:
        if re.fullmatch(rf"(.*/)?{pattern}", path):
            return (None,) * (ndim - len(axes)) + axes if ndim >= len(axes) else (None,) * ndim  # where moments are factored
    raise ValueError(f"parameter {path!r} has no logical axes; add it to marl_llm/models/sharding.py")


def spec_for(axes: tuple[str | None, ...], shape: tuple[int, ...], sizes: dict[str, int], rules: Rules, skip=frozenset()) -> P:
    """The partition of an array: each logical axis on its mesh axes where the size divides, and no mesh axis twice."""
    out, used = [], set(skip)
    for name, size in zip(axes, shape, strict=True):
        mesh_axes = tuple(a for a in rules.get(name, ()) if a not in used and sizes.get(a, 1) > 1)
        ways = 1
        for a in mesh_axes:
            ways *= sizes[a]
        if not mesh_axes or size % ways:
            out.append(None)
            continue
        used |= set(mesh_axes)
        out.append(mesh_axes if len(mesh_axes) > 1 else mesh_axes[0])
    return P(*out)


def param_shardings(params, mesh: Mesh, rules: Rules):
    """A `NamedSharding` per leaf of a pytree of parameters or policies (arrays or `jax.ShapeDtypeStruct`s).

    An optimizer's moments lie as their parameters do, scalars everywhere.
    """

    def of(path, leaf):
        axes = logical_axes(path_name(path), leaf.ndim)
        return NamedSharding(mesh, spec_for(axes, leaf.shape, dict(mesh.shape), rules))

    return jax.tree_util.tree_map_with_path(of, params)


def place(params, mesh: Mesh, rules: Rules):
    """Moves parameters onto the mesh as the rules say: the one reshard between update and sampling."""
    return jax.device_put(params, param_shardings(params, mesh, rules))


def constrain(x, *axes: str | None):
    """Pins an activation's logical axes, if rules are in force; mesh axes that are manual here (`shard_map`) are left out."""
    context = _context.get()
    if context is None:
        return x
    here = jax.sharding.get_abstract_mesh()
    manual = frozenset(here.manual_axes) if not here.empty else frozenset()
    spec = spec_for(axes, x.shape, dict(context.mesh.shape), context.rules, manual)
    if all(part is None for part in spec):
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(here if manual else context.mesh, spec))


def constrain_params(params):
    """Pins every leaf of parameters, of their gradient or of a policy as the rules in force say; nothing without rules."""
    if _context.get() is None:
        return params
    return jax.tree_util.tree_map_with_path(lambda path, x: constrain(x, *logical_axes(path_name(path), x.ndim)), params)


def ways(axis: str) -> int:
    """Over how many devices the rules in force split a logical axis (1 without rules)."""
    context = _context.get()
    sizes = dict(context.mesh.shape) if context else {}
    return math.prod(sizes.get(a, 1) for a in (context.rules.get(axis, ()) if context else ()))


def per_device(f, in_axes: tuple[tuple[str | None, ...], ...], out_axes: tuple[str | None, ...]):
    """`f` run on each device's part of its arguments (for kernels that the compiler cannot split); plain `f` without rules."""
    context = _context.get()
    if context is None:
        return f

    def mapped(*args):
        here = jax.sharding.get_abstract_mesh()
        manual = frozenset(here.manual_axes) if not here.empty else frozenset()

        def spec(axes, x):
            return spec_for(axes, x.shape, dict(context.mesh.shape), context.rules, manual)

        specs = tuple(spec(axes, x) for axes, x in zip(in_axes, args, strict=True))
        if not any(part is not None for s in specs for part in s):
            return f(*args)
        out = spec(out_axes, jax.eval_shape(f, *args))
        free = frozenset(context.mesh.axis_names) - manual
        mesh = None if manual else context.mesh
        return jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=out, axis_names=free, check_vma=False)(*args)

    return mapped
