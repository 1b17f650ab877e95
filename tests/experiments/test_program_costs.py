"""What a compiled program's text says: products in loops, what is read of what is sliced, and gathers in loops."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from marl_llm.planning.engine_programs import NAME, EnginePrograms, step_reads
from marl_llm.planning.program_costs import ProgramText
from marl_llm.training import make_mesh

MAIN, CHIP = "{1,0:T(8,128)(2,1)}", "{1,0:T(8,128)(2,1)S(1)}"


def compiled(f, *shapes):
    return ProgramText(jax.jit(f).lower(*(jax.ShapeDtypeStruct(s, np.float32) for s in shapes)).compile().as_text())


def test_a_product_in_a_loop_counts_as_often_as_the_loop_runs():
    def f(x, w):
        return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x @ w, None, length=10)[0]

    assert compiled(f, (64, 128), (128, 128)).flops() == 11 * 2 * 64 * 128 * 128


def test_a_loop_whose_length_is_data_counts_once_and_is_told():
    def f(x, w, n):
        return jax.lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] @ w), (jnp.int32(0), x))[1]

    shapes = [jax.ShapeDtypeStruct((64, 128), np.float32), jax.ShapeDtypeStruct((128, 128), np.float32), jax.ShapeDtypeStruct((), np.int32)]
    program = ProgramText(jax.jit(f).lower(*shapes).compile().as_text())
    (loop,) = program.loops()
    assert loop.flops == program.flops() == 2 * 64 * 128 * 128
    assert loop.depth == 0


@pytest.mark.parametrize(("step", "runs"), [(1, 9), (2, 5), (4, 3)])
def test_a_loop_that_counts_in_steps_runs_as_often_as_they_fit(step, runs):
    """XLA for TPUs unrolls products whose weights travel meanwhile by two, and notes nothing of how often they run."""

    def f(x, w):
        return jax.lax.while_loop(lambda c: c[0] < 9, lambda c: (c[0] + step, jnp.tanh(c[1] @ w)), (jnp.int32(0), x))[1]

    lowered = jax.jit(f).lower(*(jax.ShapeDtypeStruct(s, np.float32) for s in ((64, 128), (128, 128))))
    text = lowered.compile().as_text()
    unsaid = re.sub(r'"known_\w+":\{[^}]*\},?', "", text)
    assert "known_trip_count" in text
    assert "known" not in unsaid
    for one in (text, unsaid):
        assert ProgramText(one).flops() == runs * 2 * 64 * 128 * 128


def test_weights_that_a_loop_gathers_are_found():
    mesh = make_mesh(1, 1, 4)

    def place(shape, *spec):
        return jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(mesh, P(*spec)))

    def f(x, w, n, gather):
        def once(c):
            w = jnp.sin(c[2])  # another one each time, so that no compiler can gather it before the loop
            whole = jax.lax.with_sharding_constraint(w, NamedSharding(mesh, P())) if gather else w
            return c[0] + 1, jnp.tanh(c[1] @ whole), w

        return jax.lax.while_loop(lambda c: c[0] < n, once, (jnp.int32(0), x, w))[1]

    shapes = place((8, 64)), place((64, 64), None, "tensor"), jax.ShapeDtypeStruct((), np.int32)

    def found(gather):
        return ProgramText(jax.jit(f, static_argnums=3).lower(*shapes, gather).compile().as_text()).gathers()

    assert (64 * 64 * 4, 1) in [(g.bytes, g.depth) for g in found(True)]
    assert all(g.bytes < 64 * 64 * 4 for g in found(False))


def of_lines(*lines, fused="", **known):
    body = "\n".join(f"  {line}" for line in lines)
    return ProgramText(f"HloModule m\n\n{fused}ENTRY %main (p: bf16[1024,256]) -> bf16[8,256] {{\n{body}\n}}\n", **known)


def test_a_kernel_computes_what_the_caller_says_of_its_result():
    call = 'custom-call(%a), custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/jvp(my_kernel)/pallas_call"}'
    lines = f"%a = bf16[1024,256]{MAIN} parameter(0)", f"ROOT %c = (bf16[8,256]{MAIN}, f32[8]) {call}"
    assert of_lines(*lines).flops() == 0
    assert of_lines(*lines, kernels={"my_kernel": lambda shape: 3 * shape[0] * shape[1], "other": lambda shape: 1}).flops() == 3 * 8 * 256


def test_what_lies_on_the_chip_is_not_read_from_memory():
    program = of_lines(
        f"%a = bf16[1024,256]{MAIN} parameter(0)",
        f"%b = bf16[1024,256]{CHIP} copy(%a)",
        f"ROOT %c = bf16[1024,256]{CHIP} negate(%b)",
    )
    assert program.read() == 1024 * 256 * 2


def loop(name: str, *lines: str) -> str:
    """A computation of three carried values: %i, %a on the chip, %b in main memory."""
    chip, main = f"bf16[4,8]{CHIP}", f"bf16[4,8]{MAIN}"
    whole = (
        f"%p = (s32[], {chip}, {main}) parameter(0)", "%i = s32[] get-tuple-element(%p), index=0",
        f"%a = {chip} get-tuple-element(%p), index=1", f"%b = {main} get-tuple-element(%p), index=2", *lines,
    )  # fmt: skip
    carried = "(s32[], bf16[4,8], bf16[4,8])"
    return f"%{name} (p: {carried}) -> {carried} {{\n" + "\n".join(f"  {line}" for line in whole) + "\n}\n\n"


def ends(handed_on: str) -> str:
    return f"ROOT %t = (s32[], bf16[4,8]{CHIP}, bf16[4,8]{MAIN}) tuple({handed_on})"


@pytest.mark.parametrize(("handed_on", "read"), [("%i, %a, %b", 64), ("%i, %b, %a", 0), ("%i, %n, %b", 0), ("%i, %same, %b", 64)])
def test_what_a_loop_keeps_on_the_chip_is_read_from_memory_where_there_is_no_room(handed_on, read):
    body = loop("body", f"%n = bf16[4,8]{CHIP} negate(%a)", f"%same = bf16[4,8]{CHIP} bitcast(%a)", ends(handed_on))
    program = of_lines(f"%x = bf16[4,8]{MAIN} parameter(0)", fused=body)
    assert program.read("body") == 0
    assert program.moved_out("body").read("body") == read
    assert program.read("body") == 0  # which is still as it was


@pytest.mark.parametrize(("inside", "after", "read"), [("%i, %a, %b", "%c", 3 * 64), ("%i, %a, %b", "%a", 3 * 64), ("%i, %n, %b", "%c", 0)])
def test_loops_inside_hand_on_what_a_loop_keeps(inside, after, read):
    """Read once by the body and in each of two iterations of the loop in it, through which it comes."""
    kinds = f"(s32[], bf16[4,8]{CHIP}, bf16[4,8]{MAIN})"
    inner = loop("inner", f"%n = bf16[4,8]{CHIP} negate(%a)", ends(inside))
    body = loop(
        "body", f"%given = {kinds} tuple(%i, %a, %b)",
        f'%w = {kinds} while(%given), condition=%test, body=%inner, backend_config={{"known_trip_count":{{"n":"2"}}}}',
        f"%c = bf16[4,8]{CHIP} get-tuple-element(%w), index=1", f"%m = bf16[4,8]{CHIP} negate(%c)", ends(f"%i, {after}, %b"),
    )  # fmt: skip
    program = of_lines(f"%x = bf16[4,8]{MAIN} parameter(0)", fused=inner + body)
    assert program.read("body") == 0
    assert program.moved_out("body").read("body") == read


def test_what_a_known_kernel_reads_is_the_callers_to_say():
    call = 'custom-call(%a, %a), custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/my_kernel/pallas_call"}'
    lines = f"%a = bf16[1024,256]{MAIN} parameter(0)", f"%b = bf16[8,256]{MAIN} {call}", f"ROOT %c = bf16[8,256]{MAIN} {call}"
    assert of_lines(*lines).read() == 4 * 1024 * 256 * 2
    program = of_lines(*lines, known="my_kernel")
    assert (program.read(), program.calls("my_kernel", "main"), program.calls("other", "main")) == (0, 2, 0)


def test_a_decode_steps_kernels_add_what_they_fetch_in_each_layer():
    call = f'bf16[8,256]{MAIN} custom-call(%b, %b), custom_call_target="tpu_custom_call", metadata={{op_name="a/{NAME}/pallas_call"}}'
    body = loop("body", *(f"%k{n} = {call}" for n in range(2)), f"%m = bf16[4,8]{CHIP} negate(%b)", ends("%i, %m, %b"))
    test = loop("test", "ROOT %less = pred[] compare(%i, %i), direction=LT")
    kinds = f"(s32[], bf16[4,8]{CHIP}, bf16[4,8]{MAIN})"
    lines = f"%x = {kinds} parameter(0)", f"ROOT %w = {kinds} while(%x), condition=%test, body=%body"
    text = of_lines(*lines, fused=body + test, known=NAME)
    programs = EnginePrograms({}, 1, (), 1000, 2, 0, 0)
    assert step_reads(text, programs) == 64 + 2 * 1000
    with pytest.raises(ValueError, match="{'loops': 0, 'kernels': 2} over pages in its chunk, not {'loops': 0, 'kernels': 3}"):
        step_reads(text, dataclasses.replace(programs, layers=3))
    with pytest.raises(ValueError, match="not {'loops': 4, 'kernels': 0}"):
        step_reads(text, dataclasses.replace(programs, fetched=0, blocks=(1, 1)))


@pytest.mark.parametrize(("inner", "read"), [("dynamic-slice(%x, %i, %i)", 8), ("negate(%x)", 1024)])
def test_of_what_is_sliced_only_the_slice_is_read(inner, read):
    fused = f"%f (x: bf16[1024,256], i: s32[]) -> bf16[8,256] {{\n  %x = bf16[1024,256]{MAIN} parameter(0)\n"
    fused += f"  %i = s32[] parameter(1)\n  ROOT %y = bf16[8,256]{CHIP} {inner}\n}}\n\n"
    program = of_lines(
        f"%a = bf16[1024,256]{MAIN} parameter(0)",
        "%i = s32[]{:T(128)S(6)} constant(3)",
        f"ROOT %c = bf16[8,256]{CHIP} fusion(%a, %i), kind=kLoop, calls=%f",
        fused=fused,
    )
    assert program.read() == read * 256 * 2


def test_a_slice_that_starts_early_reads_what_it_takes():
    program = of_lines(
        f"%a = bf16[1024,256]{MAIN} parameter(0)",
        f"%s = (bf16[1024,256]{MAIN}, bf16[64,256]{CHIP}, u32[]{{:S(2)}}) slice-start(%a), slice={{[0:64], [0:256]}}",
        f"ROOT %d = bf16[64,256]{CHIP} slice-done(%s)",
    )
    assert program.read() == 64 * 256 * 2


def test_products_that_are_written_as_windows_count_what_falls_on_elements():
    """A batch of 4 products [8, 32] x [32, 16], as TPU compilers write it: the batch is a window that meets a position once."""
    program = of_lines(
        "%a = bf16[4,8,32]{2,1,0} parameter(0)",
        "%b = bf16[4,32,16]{2,1,0} parameter(1)",
        "ROOT %c = bf16[4,8,16]{2,1,0} convolution(%a, %b), window={size=4 stride=3 pad=0_0 lhs_dilate=4}, dim_labels=0bf_0io->0bf",
    )
    assert program.flops() == 4 * 2 * 8 * 32 * 16
    plain = of_lines(
        "%a = bf16[8,32]{1,0} parameter(0)",
        "%b = bf16[32,16]{1,0} parameter(1)",
        "ROOT %c = bf16[8,16]{1,0} convolution(%a, %b), dim_labels=bf_io->bf",
    )
    assert plain.flops() == 2 * 8 * 32 * 16


def test_a_text_without_a_program_is_told():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        ProgramText("HloModule m")
