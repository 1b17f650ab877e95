"""Arrays lie in one vector and come out of it as they went in."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marl_llm.sampling.model_runner import _given, decoded_layout, entered_layout
from marl_llm.sampling.transfer import layout_of, packed, unpacked
from marl_llm.training import make_mesh


class Some(NamedTuple):
    ids: np.ndarray
    real: np.ndarray
    where: np.ndarray
    nothing: None
    one: np.int32


SOME = Some(
    np.arange(-3, 3, dtype=np.int32).reshape(2, 3)[:, ::-1],
    np.asarray([[0.0, -0.0, 1e-42, np.inf], [-np.inf, np.nan, np.pi, -1e38]], np.float32).T,
    np.asarray([True, False, True]),
    None,
    np.int32(7),
)


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert x.dtype == y.dtype
        assert x.shape == y.shape
        np.testing.assert_array_equal(x.view(np.int32) if x.dtype == np.float32 else x, y.view(np.int32) if y.dtype == np.float32 else y)


def test_what_the_host_packs_the_host_and_a_program_unpack():
    vector, layout = packed(SOME), layout_of(SOME)
    assert isinstance(vector, np.ndarray)
    assert vector.dtype == np.int32
    assert vector.shape == (layout.words,)
    same(unpacked(vector, layout), SOME)
    same(jax.jit(unpacked, static_argnums=1)(vector, layout), SOME)
    assert hash(layout) == hash(layout_of(SOME))
    assert layout != layout_of(SOME._replace(one=np.float32(7)))


def test_what_a_program_packs_the_host_unpacks():
    vector = jax.jit(packed)(jax.tree.map(jnp.asarray, SOME))
    same(unpacked(np.asarray(vector), layout_of(SOME)), SOME)


def test_what_has_no_place_in_a_vector_is_refused():
    with pytest.raises(TypeError, match="array of int64 cannot be packed; the types are int32, float32, bool"):
        layout_of({"a": np.zeros(3, np.int64)})
    for size in (3, 5):
        with pytest.raises(ValueError, match=rf"shape \({size},\) does not hold arrays of 4 words"):
            unpacked(np.zeros(size, np.int32), layout_of(np.zeros(4, np.float32)))


def test_what_the_host_gave_lies_whole_on_every_device():
    """Left to XLA's partitioner for TPUs, a program on a mesh with a tensor axis held a further copy of every layer's pages."""
    mesh, layout = make_mesh(fsdp=2, tensor=2, devices=jax.devices()[:4]), layout_of(SOME)
    given = jax.make_jaxpr(lambda vector: _given(vector, layout, mesh))(packed(SOME))
    said = [x.params["sharding"] for x in given.eqns if x.primitive.name == "sharding_constraint"]
    assert len(said) == len(layout.shapes)
    assert all(one.is_fully_replicated for one in said)


@pytest.mark.parametrize("width", [0, 2])
def test_layouts_of_the_engines_programs_are_told_apart(width):
    assert entered_layout(3, width).words == 3 * (4 + (width + 1) * bool(width)) + 6
    assert decoded_layout(5, 3, width).words == 5 * 3 * (5 + (width + 1) * bool(width)) + 6
