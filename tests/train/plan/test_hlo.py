"""Figures of compiled programs: of this CPU's, and of text as the TPU compiler prints it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flaxzoo.train.plan.hlo.collectives import collective_ops, first_group
from flaxzoo.train.plan.hlo.cost import hbm_bytes, matmul_flops
from flaxzoo.train.plan.hlo.parser import parse_hlo
from flaxzoo.train.plan.jaxpr_flops import matmul_flops as traced_flops
from jax.sharding import Mesh, NamedSharding, PartitionSpec

L, B, D = 5, 16, 32


def scanned(x, kernels, unroll=1):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, kernels, unroll=unroll)[0]


def loss(x, kernels, unroll=1):
    return jnp.sum(jnp.square(scanned(x, kernels, unroll)))


SHAPES = (jax.ShapeDtypeStruct((B, D), jnp.float32), jax.ShapeDtypeStruct((L, D, D), jnp.float32))


def compiled(function, *shapes):
    return jax.jit(function).lower(*shapes).compile()


def parsed(program):
    """Parse the text of a compiled program."""
    text = program.as_text()
    assert text is not None
    return parse_hlo(text)


def test_a_loop_is_counted_as_often_as_it_runs():
    once = compiled(scanned, *SHAPES)
    program = parsed(once)
    assert matmul_flops(program) == L * 2 * B * D * D
    # XLA's own count has the body once, and everything where the loop is unrolled.
    unrolled = compiled(functools.partial(scanned, unroll=L), *SHAPES)
    whole = matmul_flops(parsed(unrolled))
    assert whole == L * 2 * B * D * D
    elementwise = 16 * L * B * D
    assert (unrolled.cost_analysis() or {})["flops"] == pytest.approx(whole, abs=elementwise)


@pytest.mark.parametrize("unroll", [1, L])
def test_matmuls_are_counted_alike_before_and_after_compilation(unroll):
    step = jax.grad(functools.partial(loss, unroll=unroll), argnums=(0, 1))
    before = traced_flops(jax.make_jaxpr(step)(*SHAPES))
    program = parsed(compiled(step, *SHAPES))
    assert before == matmul_flops(program) == 3 * L * 2 * B * D * D


def test_recomputed_matmuls_are_counted():
    def layer(x, w):
        return jnp.tanh(jnp.tanh(x @ w) @ w), None

    def gradient(layer):
        return jax.grad(lambda x, w: jnp.sum(jax.lax.scan(layer, x, w)[0]), argnums=1)

    step, plain = gradient(jax.checkpoint(layer)), gradient(layer)
    more = traced_flops(jax.make_jaxpr(step)(*SHAPES))
    assert traced_flops(jax.make_jaxpr(plain)(*SHAPES)) < more


def test_of_two_branches_the_more_expensive_counts():
    def either(x, w):
        return jax.lax.cond(x[0, 0] > 0, lambda: x @ w[0], lambda: x @ w[0] @ w[1])

    assert traced_flops(jax.make_jaxpr(either)(*SHAPES)) == 2 * 2 * B * D * D


def test_a_loop_reads_only_the_slices_that_it_takes():
    program = parsed(compiled(scanned, *SHAPES))
    kernels, state = 4 * L * D * D, 4 * L * B * D
    # A layer's weights are read at least once, and a few times at most: never the whole stack.
    assert kernels + state <= hbm_bytes(program) <= 4 * kernels + 12 * state


def sharded(function, in_specs, out_spec, shapes):
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
    on_mesh = functools.partial(NamedSharding, mesh)
    jitted = jax.jit(
        function,
        in_shardings=tuple(on_mesh(spec) for spec in in_specs),
        out_shardings=on_mesh(out_spec),
    )
    return parsed(jitted.lower(*shapes).compile())


P = PartitionSpec


def test_a_gather_in_a_loop():
    program = sharded(scanned, (P("b"), P(None, "b")), P("b"), SHAPES)
    found = collective_ops(program, 8)
    gathered = [c for c in found if c.kind == "all-gather" and c.count == L]
    assert sum(c.bytes_sent for c in gathered) == 4 * D * D * 3 // 4
    assert {c.group for c in gathered} == {(0, 1, 2, 3)}


def test_an_all_reduce_over_the_other_axis():
    program = sharded(lambda x, w: x @ w[0], (P(None, "a"), P(None, "a")), P(), SHAPES)
    (found,) = collective_ops(program, 8)
    assert (found.kind, found.count, found.group) == ("all-reduce", 1, (0, 4))
    assert found.bytes_sent == 2 * 4 * B * D // 2


@pytest.mark.parametrize(
    ("attributes", "group"),
    [
        ("replica_groups={{0,2},{1,3}}, use_global_device_ids=true", (0, 2)),
        ("replica_groups=[2,4]<=[8]", (0, 1, 2, 3)),
        ("replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}", (0, 4)),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}, dimensions={0}", (0, 1, 2, 3)),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0'}", (0, 4)),
        ("replica_groups=mesh['a'=4,'b'=1,'c'=2], device_ids=([2,4]T(1,0)) {'a'}", (0, 1, 2, 3)),
        ("replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", (0, 4)),
        ("replica_groups=mesh['axis_0'=8] {'axis_0':(2)2}", (0, 2)),
        ("replica_groups=mesh['axis_0'=8] {'axis_0':(1)4}", (0, 2, 4, 6)),
        ("source_target_pairs={{0,1},{1,2},{2,3}}", (0, 1)),
        ("channel_id=1, source_target_pairs={{0,0},{1,2},{2,1}}, metadata={}", (1, 2)),
        ("source_target_pairs={{3,3}}", (3,)),
        ("replica_groups={}", tuple(range(8))),
    ],
)
def test_groups_as_they_are_printed(attributes, group):
    assert first_group(attributes, 8) == group


TPU = """HloModule jit_step, is_scheduled=true

%fused (p0: ROWS, p1: ROWS) -> f32[40,2048,2048] {
  %p0 = ROWS{2,1,0:T(8,128)(2,1)} parameter(0)
  %p1 = ROWS{2,1,0:T(8,128)(2,1)S(1)} parameter(1)
  ROOT %c = f32[40,2048,2048]{1,2,0:T(8,128)} convolution(%p0, %p1), \
window={size=40 stride=39 lhs_dilate=40}, dim_labels=0bf_0oi->0bf, metadata={op_name="a(b)"}
}

%body (arg: (u32[], ROWS, ROWS)) -> (u32[], ROWS, ROWS) {
  %arg = (u32[]{:T(128)}, ROWS{2,1,0:T(8,128)(2,1)}, ROWS{2,1,0:T(8,128)(2,1)S(1)}) parameter(0)
  %i = u32[]{:T(128)} get-tuple-element(%arg), index=0
  %x = ROWS{2,1,0:T(8,128)(2,1)} get-tuple-element(%arg), index=1
  %y = ROWS{2,1,0:T(8,128)(2,1)S(1)} get-tuple-element(%arg), index=2
  %f = f32[40,2048,2048]{1,2,0:T(8,128)} fusion(%x, %y), kind=kOutput, calls=%fused
  %two = u32[]{:T(128)} constant(2)
  %next = u32[]{:T(128)} add(%i, %two)
  ROOT %t = (u32[]{:T(128)}, ROWS{2,1,0}, ROWS{2,1,0}) tuple(%next, %x, %y)
}

%cond (arg.1: (u32[], ROWS, ROWS)) -> pred[] {
  %limit = u32[]{:T(128)} constant(8)
  %arg.1 = (u32[]{:T(128)}, ROWS{2,1,0}, ROWS{2,1,0}) parameter(0)
  %i.1 = u32[]{:T(128)} get-tuple-element(%arg.1), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i.1, %limit), direction=LT
}

ENTRY %main (a: (u32[], ROWS, /*index=2*/ROWS)) -> (u32[], ROWS, ROWS) {
  %a = (u32[]{:T(128)}, ROWS{2,1,0}, /*index=2*/ROWS{2,1,0}) parameter(0)
  ROOT %w = (u32[]{:T(128)}, ROWS{2,1,0}, ROWS{2,1,0}) while(%a), condition=%cond, body=%body
}
""".replace("ROWS", "bf16[40,2048,128]")


def test_a_program_as_the_tpu_compiler_prints_it():
    """Heads as holes of a convolution, a loop that counts in twos, arrays in on-chip memory."""
    program = parse_hlo(TPU)
    assert matmul_flops(program) == 4 * 2 * 40 * 2048 * 2048 * 128
    one, scores = 2 * 40 * 2048 * 128, 4 * 40 * 2048 * 2048
    counter = 4 * 4  # bytes of the loop counter, its step and its limit
    assert hbm_bytes(program) == pytest.approx(4 * (one + scores), abs=4 * counter)


SCATTERED = """HloModule jit_step, is_scheduled=true

%add (x: bf16[], y: bf16[]) -> bf16[] {
  %x = bf16[] parameter(0)
  %y = bf16[] parameter(1)
  ROOT %s = bf16[] add(%x, %y)
}

%all-reduce-scatter (p: bf16[64,16]) -> bf16[16,16] {
  %p = bf16[64,16]{1,0} parameter(0)
  %r = bf16[64,16]{1,0} all-reduce(%p), channel_id=1, replica_groups={{0,1,2,3}}, to_apply=%add
  %o = u32[] constant(0)
  ROOT %d = bf16[16,16]{1,0} dynamic-slice(%r, %o, %o), dynamic_slice_sizes={16,16}
}

ENTRY %main (a: bf16[64,16], b: bf16[16,16]) -> bf16[16,16] {
  %a = bf16[64,16]{1,0} parameter(0)
  %b = bf16[16,16]{1,0} parameter(1)
  %g = bf16[64,16]{1,0} all-gather(%b), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}
  ROOT %f = bf16[16,16]{1,0} fusion(%a), kind=kCustom, calls=%all-reduce-scatter
}
"""


def test_an_all_reduce_fused_with_a_slice_is_a_reduce_scatter():
    """As the TPU compiler prints it; here another collective has the same channel."""
    found = collective_ops(parse_hlo(SCATTERED), 4)
    sent = 2 * 64 * 16 * 3 // 4
    assert {(x.kind, x.bytes_sent) for x in found} == {
        ("all-gather", sent),
        ("reduce-scatter", sent),
    }


STACKED = """HloModule jit_step, is_scheduled=true

%relabelled (q: pred[24,64]) -> pred[24,64] {
  %q = pred[24,64]{1,0:T(32,128)(4,1)} parameter(0)
  ROOT %c = pred[24,64]{1,0:T(8,128)(4,1)} copy(%q)
}

%inner (m: pred[24,64], n: s32[]) -> pred[1,64] {
  %m = pred[24,64]{1,0:T(32,128)(4,1)} parameter(0)
  %n = s32[] parameter(1)
  %z = s32[] constant(0)
  %l = pred[24,64]{1,0:T(8,128)(4,1)} fusion(%m), kind=kLoop, \
output_to_operand_aliasing={{}: (0, {})}, calls=%relabelled
  ROOT %e = pred[1,64]{1,0} dynamic-slice(%l, %n, %z), dynamic_slice_sizes={1,64}
}

%outer (p: pred[24,64], i: s32[], s: f32[24,64]) -> (f32[24,64], f32[1,64]) {
  %p = pred[24,64]{1,0:T(32,128)(4,1)} parameter(0)
  %i = s32[] parameter(1)
  %s = f32[24,64]{1,0} parameter(2)
  %o = s32[] constant(0)
  %f = pred[1,64]{1,0} fusion(%p, %i), kind=kLoop, calls=%inner
  %v = f32[1,64]{1,0} convert(%f)
  %u = f32[24,64]{1,0} dynamic-update-slice(%s, %v, %i, %o)
  ROOT %t = (f32[24,64]{1,0}, f32[1,64]{1,0}) tuple(%u, %v)
}

ENTRY %main (a: pred[24,64], b: s32[], d: f32[24,64]) -> (f32[24,64], f32[1,64]) {
  %a = pred[24,64]{1,0:T(32,128)(4,1)} parameter(0)
  %b = s32[] parameter(1)
  %d = f32[24,64]{1,0} parameter(2)
  ROOT %g = (f32[24,64]{1,0}, f32[1,64]{1,0}) fusion(%a, %b, %d), kind=kLoop, calls=%outer
}
"""


def test_permutes_of_one_channel_and_size():
    permutes = "\n".join(
        f"  %r{n} = f32[8]{{0}} collective-permute(%a), channel_id=1, "
        "source_target_pairs={{0,1},{1,0}}"
        for n in range(3)
    )
    program = parse_hlo(
        f"ENTRY %main (a: f32[8]) -> f32[] {{\n  %a = f32[8]{{0}} parameter(0)\n{permutes}\n"
        "  ROOT %c = f32[] constant(0)\n}\n"
    )
    assert [x.bytes_sent for x in collective_ops(program, 2)] == [32, 32, 32]


def test_a_channel_may_have_several_all_reduces():
    sums = "\n".join(
        f"  %r{n} = f32[{n}]{{0}} all-reduce(%a{n}), channel_id=1, replica_groups={{{{0,1}}}}, "
        "to_apply=%add"
        for n in (8, 1024)
    )
    program = parse_hlo(
        "ENTRY %main (a8: f32[8], a1024: f32[1024]) -> f32[] {\n"
        "  %a8 = f32[8]{0} parameter(0)\n  %a1024 = f32[1024]{0} parameter(1)\n"
        f"{sums}\n  ROOT %c = f32[] constant(0)\n}}\n"
    )
    found = collective_ops(program, 2)
    assert sorted(x.bytes_sent for x in found) == [4 * 8, 4 * 1024]


@pytest.mark.parametrize(
    ("kind", "slices", "sent"),
    [("ALL_REDUCE", "1,2", 4096), ("ALL_REDUCE", "1:4", 6144), ("ALL_GATHER", "1,2", 4096)],
)
def test_collectives_between_slices_that_hosts_send(kind, slices, sent):
    program = parse_hlo(
        "ENTRY %main (a: f32[8,128]) -> f32[] {\n"
        "  %a = f32[8,128]{1,0} parameter(0)\n  %k = token[] after-all()\n"
        "  %s = (f32[8,128]{1,0}, u32[], token[]) send(%a, %k), channel_id=4, "
        'is_host_transfer=true, frontend_attributes={_xla_megascale_reduce_operation="SUM",'
        f'_xla_megascale_target="{{{slices}}}x{{0:3}}",_xla_megascale_transfer_type="{kind}"}}\n'
        "  ROOT %c = f32[] constant(0)\n}\n"
    )
    (found,) = collective_ops(program, 8)
    assert (found.kind, found.bytes_sent) == (kind.lower().replace("_", "-"), sent)
    assert found.group == ((0, 4) if slices == "1,2" else (0, 2, 4, 6))


def test_a_layer_reads_and_writes_only_its_slice_of_stacked_arrays():
    """Through nested fusions, and for one of several results of a fusion."""
    taken, kept, answered, number = 64, 4 * 64, 4 * 64, 4
    traffic = hbm_bytes(parse_hlo(STACKED))
    assert traffic == taken + kept + answered + number


def test_a_slice_that_is_fetched_beside_other_work_is_read_once():
    line = (
        "((bf16[64,16]{1,0}), bf16[8,16]{1,0:S(1)}, s32[]{:S(2)}) slice-start(%a), "
        "slice={[0:8], [0:16]}"
    )
    program = parse_hlo(
        "ENTRY %main (a: bf16[64,16]) -> bf16[8,16] {\n"
        f"  %a = bf16[64,16]{{1,0}} parameter(0)\n  %s = {line}\n"
        "  ROOT %d = bf16[8,16]{1,0:S(1)} slice-done(%s)\n}\n"
    )
    assert hbm_bytes(program) == 2 * 8 * 16


@pytest.mark.parametrize(
    ("window", "labels", "left", "right", "out", "depth"),
    [
        ("size=1", "0bf_io0->0bf", (64, 2048, 80), (80, 320, 1), (64, 2048, 320), 80),
        ("size=64", "0fb_0io->fb0", (64, 20, 30), (64, 20, 7), (7, 30, 1), 64 * 20),
        (
            "size=1x40 pad=0_0x39_39 rhs_reversal=0x1",
            "0bf1_i1o0->0b1f",
            (64, 2048, 80, 1),
            (80, 40, 128, 1),
            (64, 2048, 40, 128),
            80,
        ),
    ],
)
def test_matmuls_that_are_printed_as_convolutions(window, labels, left, right, out, depth):
    def array(shape):
        return f"f32[{','.join(map(str, shape))}]{{}}"

    text = (
        f"ENTRY %main (a: f32[1], b: f32[1]) -> f32[1] {{\n  %a = {array(left)} parameter(0)\n"
        f"  %b = {array(right)} parameter(1)\n  ROOT %c = {array(out)} convolution(%a, %b), "
        f"window={{{window}}}, dim_labels={labels}\n}}\n"
    )
    program = parse_hlo(text)
    assert matmul_flops(program) == 2 * np.prod(out) * depth


KERNEL = """
%region (x: bf16[2,4,1024,64]) -> bf16[2,4,1024,64] {
  %blocks = s8[1,2,2]{2,1,0} constant({...})
  %places = s32[1024,128]{1,0} iota(), iota_dimension=0
  %x = bf16[2,4,1024,64]{3,2,1,0} parameter(0)
  ROOT %splash_mha_dq_no_residuals.1 = bf16[2,4,1024,64]{3,2,1,0} custom-call(%blocks, %x, %x, %x, %places), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"block_q": 512
}}, metadata={op_name="step"}
}

%other (x: bf16[2,4,1024,64]) -> bf16[2,4,1024,64] {
  %blocks = s8[1,2,2]{2,1,0} constant({...})
  %x = bf16[2,4,1024,64]{3,2,1,0} parameter(0)
  ROOT %splash_mha_dkv_no_residuals.1 = bf16[2,4,1024,64]{3,2,1,0} custom-call(%blocks, %x, %x, %x), custom_call_target="tpu_custom_call"
}

ENTRY %main (x: bf16[2,4,1024,64], turn: s32[]) -> bf16[2,4,1024,64] {
  %x = bf16[2,4,1024,64]{3,2,1,0} parameter(0)
  %turn = s32[] parameter(1)
  ROOT %chosen = bf16[2,4,1024,64]{3,2,1,0} conditional(%turn, %x, %x), branch_computations={%region, %other}
}
"""  # noqa: E501


def test_kernels_count_the_blocks_they_compute_and_branches_take_turns():
    program = parse_hlo(KERNEL)
    matmul = 2 * 2 * 4 * 1024**2 * 64
    # Three matmuls over three of four blocks, where later keys are hidden; or four over all.
    assert matmul_flops(program) == matmul * (3 * 3 / 4 + 4) / 2


@pytest.mark.parametrize("batch", ["", "2,"])
@pytest.mark.parametrize(("causal", "part"), [(", %ids", 36 / 64), ("", 1)])
@pytest.mark.parametrize(("phase", "matmuls"), [("fwd", 2), ("dq", 3), ("dkv", 4)])
def test_query_heads_that_share_a_key_head_are_all_counted(batch, causal, part, phase, matmuls):
    """Operands as jax prints them for 3 query heads on each of 5 key heads, causal or not."""
    text = f"""
ENTRY %main (q: bf16[{batch}5,3,1024,64]) -> bf16[{batch}5,3,1024,64] {{
  %blocks = s8[1,8,8]{{2,1,0}} constant({{...}})
  %q = bf16[{batch}5,3,1024,64]{{4,3,2,1,0}} parameter(0)
  %k = bf16[{batch}5,1024,64]{{3,2,1,0}} parameter(1)
  %ids = s32[1024,128]{{1,0}} iota(), iota_dimension=0
  %sides = s32[8,1024]{{1,0}} iota(), iota_dimension=0
  %sum = f32[{batch}5,3,1,1024]{{4,3,2,1,0}} parameter(2)
  ROOT %splash_mqa_{phase}_segmented_no_residuals.1 = bf16[{batch}5,3,1024,64]{{4,3,2,1,0}} custom-call(%blocks, %blocks, %q, %k, %k, %ids, %sides, %sum, %q, %sum{causal}), custom_call_target="tpu_custom_call"
}}
"""  # noqa: E501
    one = 2 * (2 if batch else 1) * 5 * 3 * 1024**2 * 64
    assert matmul_flops(parse_hlo(text)) == matmuls * one * part


@pytest.mark.parametrize(
    ("places", "part"), [(", %ids, %sides, %ids", 3 / 4), (", %ids, %sides", 1)]
)
def test_a_kernel_for_a_single_sequence(places, part):
    text = f"""
ENTRY %main (x: bf16[4,1024,64]) -> bf16[4,1024,64] {{
  %blocks = s8[1,2,2]{{2,1,0}} constant({{...}})
  %ids = s32[1024,128]{{1,0}} iota(), iota_dimension=0
  %sides = s32[8,1024]{{1,0}} iota(), iota_dimension=0
  %x = bf16[4,1024,64]{{2,1,0}} parameter(0)
  ROOT %splash_mha_fwd_segmented.1 = bf16[4,1024,64]{{2,1,0}} custom-call(%blocks, %blocks, %x, %x, %x{places}), custom_call_target="tpu_custom_call"
}}
"""  # noqa: E501
    matmul = 2 * 4 * 1024**2 * 64
    assert matmul_flops(parse_hlo(text)) == 2 * matmul * part


@pytest.mark.parametrize("name", ["flash_fwd.1", "jvp_flash_bwd_.2", "splash_flash.1"])
def test_our_own_kernels_say_what_they_compute(name):
    text = f"""
ENTRY %main (x: bf16[4,64,1024]) -> bf16[4,64,1024] {{
  %x = bf16[4,64,1024]{{2,1,0}} parameter(0)
  ROOT %{name} = bf16[4,64,1024]{{2,1,0}} custom-call(%x, %x, %x), custom_call_target="tpu_custom_call", backend_config={{"custom_call_config":{{"body":"TUzvUg","cost_estimate":{{"flops":"12345","transcendentals":"1"}}}}}}
}}
"""  # noqa: E501
    assert matmul_flops(parse_hlo(text)) == (0 if name.startswith("splash") else 12345)


def gpu_kernel(attributes):
    """A program for a GPU whose kernel gets 8 query heads and 2 key heads, and values of 32."""
    return parse_hlo(f"""
ENTRY %main (q: bf16[2,256,8,64], k: bf16[2,512,2,64], v: bf16[2,512,2,32]) -> bf16[2,256,8,32] {{
  %q = bf16[2,256,8,64]{{3,2,1,0}} parameter(0)
  %k = bf16[2,512,2,64]{{3,2,1,0}} parameter(1)
  %v = bf16[2,512,2,32]{{3,2,1,0}} parameter(2)
  ROOT %c = (bf16[2,256,8,32]{{3,1,2,0}}, f32[2,8,256]{{2,1,0}}) custom-call(%q, %k, %v, %q), {attributes}
}}
""")  # noqa: E501


TRITON = 'custom_call_target="__gpu$xla.gpu.triton", backend_config={{ir = "ML\\EF ROOT %x = {{\\" \n f32[8]{{0}} dot(%q, %k)", name = "flash_triton_{}", num_warps = 4}}'  # noqa: E501
CUDNN = (
    'custom_call_target="__cudnn$fmha{}", backend_config={{"fmha_scale": 1.0, "mask_type": "{}"{}}}'
)
ALL = 256 * 512
CAUSAL, WINDOW = (sum(min(query + 1, seen) for query in range(256)) for seen in (512, 100))


@pytest.mark.parametrize(
    ("attributes", "pairs", "sizes"),
    [
        (TRITON.format("fwd"), ALL, 64 + 32),
        (TRITON.format("dq_causal_window_100"), WINDOW, 2 * 64 + 32),
        (TRITON.format("dkv_causal"), CAUSAL, 2 * 64 + 2 * 32),
        (CUDNN.format("ScaleBiasSoftmax", "NO_MASK", ""), ALL, 64 + 32),
        (CUDNN.format("SoftmaxBackward", "CAUSAL", ""), CAUSAL, 3 * 64 + 2 * 32),
        (CUDNN.format("Softmax", "CAUSAL", ', "sliding_window_length": 100'), WINDOW, 64 + 32),
    ],
)
def test_kernels_of_gpus_count_the_pairs_that_are_visible(attributes, pairs, sizes):
    """What a Triton kernel's program looks like is not read."""
    assert matmul_flops(gpu_kernel(attributes)) == 2 * 2 * 8 * pairs * sizes


def test_a_gpu_writes_a_slice_while_it_does_other_work():
    """An asynchronous fusion's result has its operands before it, and a number after it."""
    program = parse_hlo("""
%write (s: f32[24,64], i: s32[], x: f32[64]) -> f32[24,64] {
  %s = f32[24,64]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %x = f32[64]{0} parameter(2)
  %o = s32[] constant(0)
  %r = f32[1,64]{1,0} bitcast(%x)
  ROOT %u = f32[24,64]{1,0} dynamic-update-slice(%s, %r, %i, %o)
}

ENTRY %main (a: f32[24,64], b: s32[], c: f32[64]) -> f32[24,64] {
  %a = f32[24,64]{1,0} parameter(0)
  %b = s32[] parameter(1)
  %c = f32[64]{0} parameter(2)
  %begin = ((f32[24,64]{1,0}, s32[], f32[64]{0}), f32[24,64]{1,0}, u32[]) fusion-start(%a, %b, %c), kind=kLoop, calls=%write
  ROOT %end = f32[24,64]{1,0} fusion-done(%begin)
}
""")  # noqa: E501
    read, number, written = 4 * 64, 4, 4 * 64
    assert hbm_bytes(program) == read + number + written


@pytest.mark.parametrize("is_async", [False, True])
def test_a_fusion_may_end_with_a_reduction_of_several_arrays(is_async):
    result = "(f32[24]{0}, s32[24]{0})"
    call = f"{result} fusion(%a, %b), kind=kInput, calls=%best"
    if is_async:
        operands = "(f32[24,64]{1,0}, s32[24,64]{1,0})"
        call = f"({operands}, {result}, u32[]) fusion-start(%a, %b), kind=kInput, calls=%best"
    program = parse_hlo(f"""
%best (x: f32[24,64], y: s32[24,64]) -> (f32[24], s32[24]) {{
  %x = f32[24,64]{{1,0}} parameter(0)
  %y = s32[24,64]{{1,0}} parameter(1)
  %u = f32[] constant(0)
  %v = s32[] constant(0)
  ROOT %r = {result} reduce(%x, %y, %u, %v), dimensions={{1}}, to_apply=%greater
}}

ENTRY %main (a: f32[24,64], b: s32[24,64]) -> (f32[24], s32[24]) {{
  %a = f32[24,64]{{1,0}} parameter(0)
  %b = s32[24,64]{{1,0}} parameter(1)
  %c = {call}
}}
""")
    assert hbm_bytes(program) == 2 * 4 * 24 * 64 + 2 * 4 * 24


def test_the_branches_of_a_predicate_take_turns():
    program = parse_hlo("""
%region_0.1 (x: f32[8,8]) -> f32[8,8] {
  %x = f32[8,8]{1,0} parameter(0)
  ROOT %d = f32[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%region_1.2 (y: f32[8,8]) -> f32[8,8] {
  ROOT %y = f32[8,8]{1,0} parameter(0)
}

ENTRY %main (p: pred[], a: f32[8,8]) -> f32[8,8] {
  %p = pred[] parameter(0)
  %a = f32[8,8]{1,0} parameter(1)
  ROOT %c = f32[8,8]{1,0} conditional(%p, %a, %a), true_computation=%region_0.1, false_computation=%region_1.2
}
""")  # noqa: E501
    assert matmul_flops(program) == 2 * 8 * 8 * 8 / 2
