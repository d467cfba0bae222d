"""Attention by kernels: those for TPUs interpreted, cuDNN by its arguments and by its calls."""

import dataclasses
import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flaxzoo import models
from flaxzoo.models.decoders.llama import LlamaConfig
from flaxzoo.models.nn import fused_attention as attention_kernels
from flaxzoo.models.nn.attention import attention_weights, weighted_values
from flaxzoo.models.nn.dropout import drop_weights, head_keys, kept_elements
from flaxzoo.models.nn.fused_attention import AttentionCall, FusedAttention, refusal
from flaxzoo.models.nn.kernels import blockwise, flash_triton
from flaxzoo.models.nn.kernels import flash as flash_kernel
from flaxzoo.models.nn.masks import AttentionMask
from jax._src.cudnn import fused_attention_stablehlo
from jax.experimental import pallas
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel
from jax.extend import core

B, T, N, H = 3, 256, 2, 64


@pytest.fixture
def splash(monkeypatch):
    """Splash attention on this machine, four blocks to T × T pairs."""
    interpreted = functools.partial(splash_attention_kernel.make_splash_mha, interpret=True)
    monkeypatch.setattr(splash_attention_kernel, "make_splash_mha", interpreted)
    monkeypatch.setattr(attention_kernels, "LARGEST_BLOCKS", (128,))


@pytest.fixture
def flash(monkeypatch):
    """Flash attention on this machine, four blocks to T × T pairs."""
    interpreted = functools.partial(pallas.pallas_call, interpret=True)
    monkeypatch.setattr(flash_kernel.pl, "pallas_call", interpreted)
    monkeypatch.setattr(flash_kernel, "BLOCKS", (128,))


@pytest.fixture
def triton(monkeypatch):
    """Flash attention for GPUs on this machine, four by two blocks to T × T pairs."""
    interpreted = functools.partial(pallas.pallas_call, interpret=True)
    monkeypatch.setattr(flash_triton.pl, "pallas_call", interpreted)
    # The interpreter takes any precision.
    limits = tuple(x for x in attention_kernels.LIMITS["triton"] if "precision" not in x[1])
    monkeypatch.setitem(attention_kernels.LIMITS, "triton", limits)


@pytest.fixture
def blocks(monkeypatch):
    """Attention block by block, sixteen blocks to T × T pairs."""
    monkeypatch.setattr(blockwise, "LARGEST_BLOCK", 64)


@pytest.fixture
def blocks_dropping(blocks):
    """The same, with weights that are dropped."""


@pytest.fixture
def cudnn(monkeypatch):
    """What cuDNN is asked for, computed by jax itself, which takes the same arguments."""
    real = jax.nn.dot_product_attention

    def by_xla(*args, implementation, **kwargs):
        assert implementation == "cudnn"
        mask = kwargs["mask"]
        assert mask is None or mask.shape[2:] == (args[0].shape[1], args[1].shape[1])
        assert kwargs["is_causal"] or kwargs["local_window_size"] is None
        return real(*args, implementation="xla", **kwargs)

    monkeypatch.setattr(jax.nn, "dot_product_attention", by_xla)


@pytest.fixture
def cudnn_on_a_gpu():
    """The kernel itself."""
    if "cuda" not in os.environ["JAX_PLATFORMS"]:
        pytest.skip(
            "needs an NVIDIA GPU: JAX_PLATFORMS=cuda pytest tests/models/nn/test_fused_attention.py"
        )


# Rows: whole, of half the tokens, of none (a row that fills a batch).
LENGTHS = np.array([[T], [T // 2 + 3], [0]])
PADDED = (np.arange(T) < LENGTHS).astype(np.int32)
# Two documents, the second across the border of two blocks.
PACKED = PADDED * (1 + (np.arange(T) >= 100).astype(np.int32))
MASKS = {
    "padding": AttentionMask(T, T, PADDED, None),
    "padding, causal": AttentionMask(T, T, PADDED[:, ::-1], None, causal=True),
    "packing": AttentionMask(T, T, None, PACKED),
    "packing, causal": AttentionMask(T, T, None, PACKED, causal=True),
    "packing, banded": AttentionMask(T, T, None, PACKED, causal=True, window=90),
    "causal": AttentionMask(T, T, None, None, causal=True),
    "packing, two-sided": AttentionMask(T, T, None, PACKED, window=30),
    "other keys": AttentionMask(
        T, T // 2, PADDED[:, : T // 2], PACKED[:, 64 : 64 + T // 2], PACKED
    ),
}


RATES = {"flash": 0.1, "triton": 0.1, "blocks_dropping": 0.1}
"""The probability that a weight is dropped."""
ROWS = models.row_keys(jax.random.key(5), B)


def by_xla(rate, query, key, value, mask):
    keys_last, values = jnp.einsum("BSKH->BKHS", key), jnp.einsum("BSKH->BKSH", value)
    weights = attention_weights(query, keys_last, mask.materialize(), scale=1.0)
    weights = drop_weights(weights, rate, ROWS)
    return weighted_values(weights.astype(value.dtype), values)


def by_kernel(kernel, rate, query, key, value, mask):
    fused = FusedAttention(kernel, mask.causal, mask.window, dropout_rate=rate)
    return fused.apply(
        {},
        query,
        key,
        value,
        segments=mask.segments(),
        use_window=mask.use_window,
        keys=head_keys(ROWS, query.shape[2]) if rate > 0 else None,
    )


QUICK = "padding, causal", "packing, banded", "other keys"
"""Interpreted, each takes seconds."""
TWO_SIDED = "packing, two-sided"
"""A mask for splash attention and blocks."""
GROUPED = "packing, banded"
"""Computed with two key/value heads for four query heads too."""
CASES = [
    *(
        pytest.param(kernel, name, N, N, marks=() if name in QUICK else pytest.mark.slow)
        for kernel in ("splash", "flash", "triton")
        for name in MASKS
        if kernel == "splash" or name != TWO_SIDED
    ),
    *(
        (kernel, name, N, N)
        for kernel in ("cudnn", "cudnn_on_a_gpu")
        for name in MASKS
        if name != TWO_SIDED
    ),
    *(
        (kernel, GROUPED, 4, 2)
        for kernel in (
            *("splash", "flash", "triton", "cudnn", "cudnn_on_a_gpu", "blocks", "blocks_dropping"),
        )
    ),
    *((kernel, name, N, N) for kernel in ("blocks", "blocks_dropping") for name in MASKS),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "name", "num_heads", "num_kv_heads"), CASES)
def test_a_kernel_gives_what_xla_gives(kernel, name, num_heads, num_kv_heads, request):
    request.getfixturevalue(kernel)
    on_gpu, rate = kernel == "cudnn_on_a_gpu", RATES.get(kernel, 0.0)
    dtype = jnp.bfloat16 if on_gpu else jnp.float32
    mask = MASKS[name]
    rng = np.random.default_rng(0)
    keys = mask.num_keys, num_kv_heads
    shapes = (mask.num_queries, num_heads), keys, keys
    given = [jnp.asarray(rng.normal(size=(B, *shape, H)) / 3, dtype) for shape in shapes]
    # Queries that see something and are no padding; the others may give anything but NaN.
    seen = np.broadcast_to(mask.materialize().any(-1)[:, 0], (B, T))
    real = jnp.asarray(seen, dtype)[..., None, None]

    def values(attend, *given):
        context = attend(*given, mask)
        return jnp.sum(jnp.square(context * real).astype(jnp.float32)), context

    def both(attend):
        (_, context), gradients = jax.jit(
            jax.value_and_grad(functools.partial(values, attend), (0, 1, 2), has_aux=True)
        )(*given)
        assert all(jnp.isfinite(x).all() for x in (context, *gradients))
        return [np.asarray(x, np.float32) for x in (context * real, *gradients)]

    kernel = kernel.split("_")[0]
    rtol, atol = (0.05, 0.05) if on_gpu else (1e-4, 2e-5)
    ways = functools.partial(by_kernel, kernel, rate), functools.partial(by_xla, rate)
    for ours, xla in zip(*map(both, ways), strict=True):
        np.testing.assert_allclose(ours, xla, rtol=rtol, atol=atol)


@pytest.mark.parametrize("kernel", ["flash", "triton", "blocks"])
def test_a_kernel_drops_the_very_weights_that_xla_drops(kernel, request):
    """Queries of 0 weigh all keys alike, and values that are an identity show the weights."""
    request.getfixturevalue(kernel)
    rate = 0.1
    query, key = jnp.zeros((B, T, N, 8)), jnp.ones((B, 2 * T, N, 8))
    value = jnp.broadcast_to(jnp.eye(2 * T)[:, None], (B, 2 * T, N, 2 * T))
    mask = AttentionMask(T, 2 * T)
    attend = jax.jit(functools.partial(by_kernel, kernel, rate))
    weights = jnp.einsum("BTNS->BNTS", attend(query, key, value, mask))
    kept = kept_elements(head_keys(ROWS, N), T, 2 * T, rate)
    np.testing.assert_array_equal(weights != 0, kept)
    np.testing.assert_allclose(weights, kept / (2 * T * (1 - rate)), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["flash", "triton"])
def test_flash_attention_without_a_key_drops_nothing(kernel, request):
    request.getfixturevalue(kernel)
    rng = np.random.default_rng(0)
    query, key = (jnp.asarray(rng.normal(size=(B, T, N, 16)), jnp.float32) for _ in range(2))
    value = jnp.asarray(rng.normal(size=(B, T, N, 24)), jnp.float32)
    mask = AttentionMask(T, T)
    plain = FusedAttention(kernel, False, None, dropout_rate=0.5)
    ours = plain.apply({}, query, key, value, segments=None, use_window=None)
    np.testing.assert_allclose(ours, by_xla(0.0, query, key, value, mask), rtol=1e-4, atol=2e-5)


GPT = models.GPTConfig(
    vocab_size=32,
    max_length=128,
    num_layers=2,
    d_model=16,
    num_heads=2,
    dropout_rate=0.0,
    local_window=20,
)
LLAMA = LlamaConfig(
    vocab_size=32,
    max_length=128,
    num_layers=2,
    d_model=32,
    num_heads=4,
    num_kv_heads=2,
    d_ff=32,
)
TRANSFORMER = models.EncoderDecoderConfig(
    vocab_size=32, max_length=128, num_layers=1, d_model=16, num_heads=2, dropout_rate=0.0
)


def _inputs(config):
    ids = np.random.default_rng(0).integers(0, 32, (2, 128))
    segments = np.repeat(np.array([[1, 1, 2, 0], [1, 2, 3, 3]]), 32, axis=1)
    if config.head == "causal_lm":
        return {"input_ids": ids, "segment_ids": segments}, segments
    target = np.repeat(np.array([[1, 2, 2, 0], [1, 1, 2, 3]]), 32, axis=1)
    both = {"segment_ids": segments, "decoder_segment_ids": target}
    return {"input_ids": ids, "decoder_input_ids": ids, **both}, target


def kernel_calls(jaxpr, name="pallas_call"):
    """The number of calls whose results are read: the compiler leaves out the others."""
    read = {id(x) for x in jaxpr.outvars} | {id(x) for e in jaxpr.eqns for x in e.invars}
    calls = (e for e in jaxpr.eqns if e.primitive.name == name)
    own = sum(any(id(x) in read for x in call.outvars) for call in calls)
    inner = (x for e in jaxpr.eqns for x in core.jaxprs_in_params(e.params))
    return own + sum(kernel_calls(x, name) for x in inner)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(GPT, id="gpt"),
        pytest.param(LLAMA, id="llama"),
        pytest.param(TRANSFORMER, id="transformer"),
    ],
)
@pytest.mark.slow
def test_a_model_by_splash(config, splash):
    """Layers inside a scan, every second banded; grouped heads; an encoder with packed targets."""
    inputs, segments = _inputs(config)
    params = jax.jit(models.create(config).init)(jax.random.key(0), **inputs)

    def loss(params, execution):
        out = models.create(config, execution).apply(params, **inputs)
        return jnp.sum(jnp.square(out.last_hidden_state) * (segments != 0)[..., None])

    def gradients(**execution):
        run = functools.partial(loss, execution=models.Execution(**execution))
        return jax.jit(jax.value_and_grad(run))

    def calls(found):
        return kernel_calls(found.trace(params).jaxpr.jaxpr)

    xla, splashed = gradients(), gradients(attention="splash")
    assert calls(xla) == 0
    # One call forward and two backward; the GPT has layers of two kinds in its scan, and the
    # Transformer attention of three kinds.
    rematerialized = gradients(attention="splash", remat="dots")
    assert calls(splashed) == calls(rematerialized) == {GPT: 6, LLAMA: 3, TRANSFORMER: 9}[config]
    for a, b in zip(jax.tree.leaves(splashed(params)), jax.tree.leaves(xla(params)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


BERT = models.BertConfig(
    vocab_size=32, max_length=128, num_layers=2, d_model=32, num_heads=2, d_ff=32, dropout_rate=0.1
)


@functools.cache
def bert_params():
    return jax.jit(models.create(BERT).init)(jax.random.key(0), input_ids=jnp.zeros((2, 128), int))


def bert_gradients(attention, remat="none"):
    """A compiled function from parameters to the loss of a BERT that drops weights, and gradients.

    Args:
        attention: which kernel computes attention.
        remat: what the backward pass computes again.
    """
    ids = np.random.default_rng(0).integers(5, 32, (2, 128))
    mask = (np.arange(128) < np.array([[128], [70]])).astype(np.int32)
    model = models.create(BERT, models.Execution(attention=attention, remat=remat))

    def loss(params):
        rng = models.row_keys(jax.random.key(3), 2)
        out = model.apply(params, ids, attention_mask=mask, rng=rng)
        return jnp.sum(jnp.square(out.last_hidden_state) * mask[..., None])

    return jax.jit(jax.value_and_grad(loss))


@functools.cache
def bert_gradients_by_xla():
    return bert_gradients("xla")(bert_params())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "remat"),
    [
        ("flash", "none"),
        ("flash", "dots"),
        ("flash", "full"),
        ("triton", "dots"),
        ("blocks", "dots"),
    ],
)
def test_a_model_that_drops_weights_by_flash_attention(kernel, remat, request):
    """Its gradients are those of XLA, and with "dots" it keeps what the backward pass reads."""
    request.getfixturevalue(kernel)

    def calls(remat):
        name = "scan" if kernel == "blocks" else "pallas_call"
        return kernel_calls(bert_gradients(kernel, remat).trace(bert_params()).jaxpr.jaxpr, name)

    assert calls(remat) == calls("none") + (remat == "full")
    ours = bert_gradients(kernel, remat)(bert_params())
    xla = bert_gradients_by_xla()
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(xla), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("what", ["weights", "cache", "length"])
def test_what_no_kernel_serves_is_computed_by_xla(what):
    ids = _inputs(GPT)[0]["input_ids"]
    model = models.create(GPT, models.Execution(attention="splash"))
    given = {
        "weights": {"output_attentions": True},
        "cache": {"cache": models.init_cache(GPT, models.Execution(), 2, 128)},
        "length": {"input_ids": ids[:, :100]},
    }
    apply = functools.partial(model.apply, **{"input_ids": ids, **given[what]})
    params = jax.eval_shape(models.create(GPT).init, jax.random.key(0), input_ids=ids)
    assert kernel_calls(jax.make_jaxpr(apply)(params).jaxpr) == 0


CALL = AttentionCall(256, 256, 64, 64, "bfloat16", 0.0)


def test_blocks_that_cannot_draw_in_groups_are_refused():
    dropping = dataclasses.replace(CALL, dropout_rate=0.1, num_keys=1000)
    assert refusal("blocks", dataclasses.replace(dropping, num_keys=500)) is None
    assert "256 and 1000 tokens" in (refusal("blocks", dropping) or "")
    assert refusal("blocks", dataclasses.replace(dropping, dropout_rate=0.0)) is None


@pytest.mark.parametrize(
    ("kernels", "change", "reason"),
    [
        ("cudnn splash flash triton blocks", {"cached": True}, "cache"),
        ("cudnn splash flash triton blocks", {"weights": True}, "weights are requested"),
        ("cudnn splash flash triton blocks", {"is_per_query": True}, "an entry for each query"),
        ("cudnn splash", {"dropout_rate": 0.1}, "dropped with probability 0.1"),
        ("cudnn triton", {"dtype": "float32"}, "float32 and not bfloat16"),
        ("cudnn", {"key_dim": 32}, "keys have size 32 and values 64"),
        ("cudnn triton", {"key_dim": 256, "head_dim": 256}, "heads have size 256"),
        ("cudnn triton", {"key_dim": 20, "head_dim": 20}, "heads have size 20"),
        ("triton", {"key_dim": 96, "head_dim": 96}, "values 96, not one of 16, 32, 64, 128"),
        ("cudnn flash triton", {"capped": True}, "scores are capped"),
        ("cudnn flash triton", {"two_sided": True}, "windows have two sides"),
        ("cudnn splash flash triton", {"num_keys": 255}, "rows have 256 and 255 tokens"),
        ("splash flash", {"num_queries": 192}, "192 and 256 tokens, not a multiple of 128"),
        ("flash", {"num_queries": 16384}, "16384 and 256 tokens, more than 8192"),
        ("splash flash triton blocks", {"num_queries": 2042}, "rows have 2042 and 256 tokens, "),
    ],
)
def test_every_refusal_states_its_reason(kernels, change, reason):
    for kernel in attention_kernels.LIMITS:
        refused = refusal(kernel, dataclasses.replace(CALL, **change))
        assert (refused is not None) == (kernel in kernels)
        assert refused is None or reason in refused


@pytest.mark.parametrize(
    ("length", "size", "dtype", "fits"),
    [
        (8192, 64, "float32", True),
        (8192, 128, "bfloat16", True),
        (4096, 128, "float32", False),
        (2048, 128, "float32", True),
        (2048, 256, "bfloat16", True),
        (4096, 256, "bfloat16", False),
        (512, 256, "float32", False),
    ],
)
def test_flash_attention_is_for_what_the_compiler_can_place_on_the_chip(length, size, dtype, fits):
    """As libtpu 0.0.42 compiled, or refused to compile, both passes for v4."""
    call = AttentionCall(length, length, size, size, dtype, 0.1)
    refused = refusal("flash", call)
    assert (refused is None) == fits
    assert fits or f"size {size} in {dtype} " in (refused or "")


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
def test_flash_attention_is_lowered_for_a_gpu_that_is_not_here():
    """To Triton's IR; one call forward and two backward."""
    model = models.create(BERT, models.Execution(dtype="bfloat16", attention="triton"))
    ids = np.zeros((2, 128), np.int32)
    params = jax.eval_shape(models.create(BERT).init, jax.random.key(0), input_ids=ids)
    gpu = jax.sharding.AbstractDevice("NVIDIA H200", num_cores=132, platform="gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("data",), abstract_device=gpu)

    def loss(params):
        rng = models.row_keys(jax.random.key(3), 2)
        out = model.apply(params, input_ids=ids, attention_mask=ids, rng=rng)
        return out.last_hidden_state.astype(jnp.float32).sum()

    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(jax.grad(loss)).trace(params)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@__gpu$xla.gpu.triton(") == 3
    assert all(f'"flash_triton_{name}"' in text for name in ("fwd", "dq", "dkv"))


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "dots"])
@pytest.mark.parametrize(
    "config", [dataclasses.replace(GPT, local_window=None), LLAMA], ids=["gpt", "llama"]
)
def test_cudnn_is_called_on_a_gpu(config, remat, monkeypatch):
    """Lowered for a GPU that is not here: one call forward, one backward, in a scan."""
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91_000)
    model = models.create(
        config, models.Execution(dtype="bfloat16", attention="cudnn", remat=remat)
    )
    inputs, _ = _inputs(GPT)
    params = jax.eval_shape(models.create(config).init, jax.random.key(0), **inputs)

    def calls(inputs):
        def loss(params):
            return model.apply(params, **inputs).last_hidden_state.astype(jnp.float32).sum()

        traced = jax.jit(jax.grad(loss)).trace(params)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        names = "Softmax", "SoftmaxBackward", "ScaleBiasSoftmax", "ScaleBiasSoftmaxBackward"
        return [text.count(f"@__cudnn$fmha{name}(") for name in names], text

    packed, text = calls(inputs)
    assert packed == [0, 0, 1, 1]
    assert text.count("CAUSAL") == 2
    plain, _ = calls({"input_ids": inputs["input_ids"]})
    assert plain == [1, 1, 0, 0]
