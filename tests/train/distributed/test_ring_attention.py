"""Attention over sharded tokens is that of one device; the work is balanced, nothing gathered."""

import collections
import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flaxzoo import models, train
from flaxzoo.data import CausalLMData, TokenizerConfig
from flaxzoo.models.nn.attention import attention_weights, weighted_values
from flaxzoo.models.nn.dropout import drop_weights, head_keys
from flaxzoo.models.nn.fused_attention import AttentionCall, FusedAttention
from flaxzoo.models.nn.kernels import blockwise
from flaxzoo.models.nn.masks import band_mask
from flaxzoo.models.nn.stack import REMAT_POLICIES
from flaxzoo.train.distributed import activations, sharding
from flaxzoo.train.distributed.ring_attention import (
    holder,
    ring_refusal,
    visible_pairs,
    window_steps,
)
from flaxzoo.train.engine.compile import compile_trainer
from flaxzoo.train.objectives.causal_lm import CAUSAL
from flaxzoo.train.plan.hlo.collectives import collective_ops
from flaxzoo.train.plan.hlo.parser import parse_hlo
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel


@pytest.mark.parametrize("n", [2, 3, 8])
def test_causal_work_is_the_same_on_every_device_in_every_step(n):
    parts_of = [(device, 2 * n - 1 - device) for device in range(n)]
    assert all(holder(part, n) == device for device in range(n) for part in parts_of[device])
    seen = collections.Counter()
    for device in range(n):
        for step in range(1, n):
            source = (device - step) % n
            pairs = visible_pairs(int(device < step))
            seen.update((parts_of[device][q], parts_of[source][k]) for q, k in pairs)
    # In the first step a device attends to its own parts; the later steps give all others, once.
    own = {(q, k) for parts in parts_of for q in parts for k in parts}
    earlier = {(q, k) for q in range(2 * n) for k in range(q)}
    assert seen == dict.fromkeys(earlier - own, 1)
    assert len(earlier - own) == 2 * n * (n - 1)  # two for each device and step


@pytest.mark.parametrize("window", [1, 2, 4, 5, 9, 12, 13, 30])
def test_keys_go_as_far_as_a_window_sees(window):
    length, n = 4, 4
    distance = np.arange(length)[:, None] - np.arange(length)
    seen = [(distance + step * length < window) for step in range(1, n)]
    expected = sum(x.all() for x in seen), sum(x.any() for x in seen)
    assert window_steps(length, window, n) == expected


class Case(NamedTuple):
    """A call over a mesh."""

    mesh: dict[str, int]
    causal: bool = True
    window: int | None = None
    cap: float | None = None
    mask: str = "packed"
    num_keys: int = 32
    rate: float = 0.0


B, T, N, K, H, V = 4, 32, 4, 2, 8, 6
CASES = {
    "causal 2": Case({"fsdp": 2, "context": 2, "tensor": 2}, cap=2.0),
    "causal 4": Case({"data": 2, "context": 4}, mask="padded"),
    "causal 8": Case({"context": 8}, mask="none"),
    "both ways 4": Case({"context": 4, "tensor": 2}, causal=False, cap=2.0),
    "another's keys 2": Case({"data": 4, "context": 2}, False, mask="padded", num_keys=16),
    "window 4": Case({"data": 2, "context": 4}, window=11),
    "wide window 8": Case({"context": 8}, window=14, mask="padded"),
}


def arrays(num_keys):
    rng = np.random.default_rng(0)
    shapes = (B, T, N, H), (B, num_keys, K, H), (B, num_keys, K, V), (B, T, N, V)
    query, key, value, gradient = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes)
    return query * H**-0.5, key, value, gradient


def segments_of(case):
    if case.mask == "none":
        return None
    if case.mask == "packed":
        sizes = np.array(([15, 14, 3], [1, 31, 0]) * 2) * T // 32
        ids = np.stack([np.repeat([1, 2, 0], x) for x in sizes])
        return (jnp.asarray(ids, jnp.int32),) * 2
    # Padding on the left: in causal order the first queries have no keys.
    real = np.arange(case.num_keys) >= np.array([0, 3, 9, 14])[:, None]
    return jnp.ones((B, T), jnp.int32), jnp.asarray(real, jnp.int32)


ROWS = models.row_keys(jax.random.key(5), B)


def by_one(case, segments, *given):
    query, key, value = given
    mask = jnp.ones((1, 1, 1, 1), bool)
    if case.causal:
        mask = band_mask(jnp.arange(T), jnp.arange(T), case.window)
    if segments is not None:
        mask &= (segments[0][:, :, None] == segments[1][:, None])[:, None]
    keys, values = jnp.einsum("BSKH->BKHS", key), jnp.einsum("BSKH->BKSH", value)
    weights = attention_weights(query, keys, mask, scale=1.0, cap=case.cap)
    weights = drop_weights(weights, case.rate, ROWS)
    return weighted_values(weights, values), mask.any(-1)[:, 0, :, None, None]


def assert_is_one_device(case, kernel="blocks", use_window=None, remat="none"):
    """Compares output and gradients; returns the program of the ring."""
    mesh = sharding.make_mesh(train.MeshConfig(**{"data": 1, **case.mesh}))
    *given, gradient = arrays(case.num_keys)
    segments = segments_of(case)
    fused = FusedAttention(kernel, case.causal, case.window, case.cap, case.rate)
    on_ring = activations.shard_map_attention(functools.partial(fused.apply, {}), mesh)
    alone = case if use_window in (None, True) else case._replace(window=None)
    expected, pull = jax.vjp(lambda *x: by_one(alone, segments, *x)[0], *given)
    has_keys = by_one(alone, segments, *given)[1]
    gradient = jnp.where(has_keys, gradient, 0)

    def both(gradient, segments, use_window, *given):
        keys = head_keys(ROWS, N) if case.rate > 0 else None

        def attend(*given):
            # An operation for the backward pass to recompute, as a layer has.
            given = (1.0 * x for x in given)
            return on_ring(*given, segments=segments, use_window=use_window, keys=keys)

        if remat != "none":
            attend = jax.checkpoint(attend, policy=REMAT_POLICIES[remat])
        output, pull = jax.vjp(attend, *given)
        return output, *pull(gradient)

    spec = jax.sharding.PartitionSpec(sharding.BATCH_AXES, "context", "tensor")
    sharded = [jax.device_put(x, jax.sharding.NamedSharding(mesh, spec)) for x in given]
    compiled = jax.jit(both).lower(gradient, segments, use_window, *sharded).compile()
    output, *gradients = compiled(gradient, segments, use_window, *sharded)
    assert jnp.isfinite(output).all()
    found = jnp.where(has_keys, output, expected), *gradients
    for ours, theirs in zip(found, (expected, *pull(gradient)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)
    return compiled


@pytest.fixture
def small_blocks(monkeypatch):
    """Several blocks to the part of a device."""
    monkeypatch.setattr(blockwise, "LARGEST_BLOCK", 2)
    monkeypatch.setattr(blockwise, "SMALLEST_BLOCK", 1)


QUICK = "causal 2", "window 4"


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES],
)
def test_a_ring_is_one_device(name):
    assert_is_one_device(CASES[name])


DROPPING = {
    "causal 2": Case({"fsdp": 2, "context": 2, "tensor": 2}, cap=2.0),
    "another's keys 2": Case({"data": 4, "context": 2}, False, mask="padded", num_keys=128),
    "window 4": Case({"data": 2, "context": 4}, window=90),
}


@pytest.mark.parametrize(
    "name",
    [
        name if name == "causal 2" else pytest.param(name, marks=pytest.mark.slow)
        for name in DROPPING
    ],
)
def test_a_ring_drops_the_weights_that_one_device_drops(name, monkeypatch):
    """Several blocks to a part; parts of at least 32 keys, whose bits are drawn together."""
    monkeypatch.setattr(blockwise, "LARGEST_BLOCK", 32)
    monkeypatch.setattr(blockwise, "SMALLEST_BLOCK", 32)
    monkeypatch.setitem(globals(), "T", 256)
    case = DROPPING[name]
    num_keys = case.num_keys if name == "another's keys 2" else 256
    assert_is_one_device(case._replace(rate=0.2, num_keys=num_keys))


@pytest.mark.slow
@pytest.mark.parametrize("use_window", [True, False])
def test_layers_with_and_without_a_window(use_window):
    assert_is_one_device(CASES["window 4"], use_window=jnp.asarray(use_window))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("remat", ["none", pytest.param("dots", marks=pytest.mark.slow)])
def test_keys_are_passed_round_and_not_gathered(remat):
    """The program sends what the algorithm says, every run of its loops counted."""
    n = 4
    case = Case({"data": 2, "context": n}, mask="none")
    text = assert_is_one_device(case, remat=remat).as_text()
    sent = collections.Counter()
    for op in collective_ops(parse_hlo(text), 8):
        sent[op.kind] += op.count * op.bytes_sent
    of_query, of_keys, of_output = (
        4 * (B // 2) * (T // n) * size for size in (N * H, K * (H + V), N * V)
    )
    # Keys go round twice, but the compiler sees that they are handed on alike at the beginning of
    # both passes; their gradients go round once, and home. Into zigzag order and back go queries,
    # keys and outputs, and in the backward pass their gradients.
    in_rings = (2 * (n - 1) - 1 + n) * of_keys
    assert sent == {"collective-permute": in_rings + 2 * (of_query + of_keys + of_output)}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["causal", "window"])
def test_splash_attention_on_a_ring(name, monkeypatch):
    """Interpreted; parts of 128 tokens, so that two of three steps of the window see a band."""
    interpreted = functools.partial(splash_attention_kernel.make_splash_mha, interpret=True)
    monkeypatch.setattr(splash_attention_kernel, "make_splash_mha", interpreted)
    cases = {
        "causal": Case({"data": 4, "context": 2}, cap=2.0, num_keys=512),
        "window": Case({"data": 2, "context": 4}, window=300, mask="none", num_keys=1024),
    }
    for size, value in {"T": cases[name].num_keys, "N": 2, "K": 1}.items():
        monkeypatch.setitem(globals(), size, value)
    assert_is_one_device(cases[name], "splash")


def test_a_call_that_a_ring_cannot_divide_is_refused():
    call = AttentionCall(1024, 1024, 64, 64, "float32", 0.0)
    assert ring_refusal("blocks", call, 4) is None
    assert ring_refusal("splash", call, 4) is None
    refused = ring_refusal("splash", call, 8)
    assert refused == "the 16 parts of a row have 64 tokens, not a multiple of 128"
    assert "mesh.context 4" in (ring_refusal("cudnn", call, 4) or "")
    dropping = dataclasses.replace(call, dropout_rate=0.1)
    assert ring_refusal("blocks", dropping, 4) is None
    assert "probability 0.1" in (ring_refusal("splash", dropping, 4) or "")
    refused = ring_refusal("blocks", dataclasses.replace(dropping, num_keys=96), 2)
    assert refused == (
        "the 4 parts of a row have 24 keys, but dropout of weights requires a multiple of 32"
    )
    odd = Case({"context": 8}, num_keys=24)
    mesh = sharding.make_mesh(train.MeshConfig(data=1, **odd.mesh))
    fused = FusedAttention("blocks", causal=False, window=None)
    on_ring = activations.shard_map_attention(functools.partial(fused.apply, {}), mesh)
    with pytest.raises(ValueError, match=r"32 and 24 tokens.*mesh\.context 8 "):
        on_ring(*arrays(24)[:3], segments=None, use_window=None)


MODELS = {
    "gpt": models.GPTConfig(
        vocab_size=48, max_length=16, num_layers=2, d_model=32, num_heads=4, dropout_rate=0.0
    ),
    "windows": models.GPTConfig(
        vocab_size=48,
        max_length=16,
        num_layers=2,
        d_model=32,
        num_heads=4,
        dropout_rate=0.0,
        local_window=5,
    ),
    "dropping": models.GPTConfig(
        vocab_size=48, max_length=128, num_layers=2, d_model=32, num_heads=4, dropout_rate=0.2
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_run_over_a_ring_has_the_losses_of_one_device(name, train_config, batches):
    times = MODELS[name].max_length // 16  # rows of parts that weights can be dropped in
    batches = [{k: np.tile(v, (1, times)) for k, v in batch.items()} for batch in batches]

    def losses(**fields):
        data = CausalLMData(
            source="builtin:python-docs",
            length=MODELS[name].max_length,
            tokenizer=TokenizerConfig(vocab_size=48),
        )
        config = train_config(model=MODELS[name], data=data, **fields)
        program = compile_trainer(config, CAUSAL)
        state, found = program.init(), []
        for batch in batches:
            state, metrics = program.step(state, batch)
            found.append({name: float(x) for name, x in metrics.items()})
        return found, program.memory_summary

    ring = train.MeshConfig(data=1, fsdp=2, context=2, tensor=2)
    ours, refused = losses(mesh=ring, execution=models.Execution(remat="full"), micro_batches=2)
    assert "ring of 2 devices" in refused
    theirs, refused = losses(mesh=train.MeshConfig(data=8))
    assert "ring" not in refused
    for a, b in zip(ours, theirs, strict=True):
        assert a == pytest.approx(b, rel=2e-6)
