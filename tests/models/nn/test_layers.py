"""The parts of a layer: affine maps, norms, feed-forward blocks."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flaxzoo import models
from flaxzoo.models.decoders.llama import LlamaConfig
from flaxzoo.models.nn.layers import (
    ACTIVATIONS,
    FEW_ROWS,
    Embedding,
    FeedForward,
    GatedFeedForward,
    LayerNorm,
    RMSNorm,
    affine,
)
from transformers.models.llama import modeling_llama

LLAMA = LlamaConfig(
    vocab_size=8, max_length=8, num_layers=1, d_model=16, num_heads=4, num_kv_heads=2, d_ff=24
)
KEY = jax.random.key(7)


def test_an_embedding_is_a_product_with_one_hot_rows():
    table = jax.random.normal(KEY, (11, 5))
    ids = jnp.array([[3, 0, 10], [3, 3, 7]])
    looked_up = Embedding(11, 5).apply({"params": {"embedding": table}}, ids)
    product = jnp.dot(jax.nn.one_hot(ids, 11), table, precision="highest")
    np.testing.assert_array_equal(looked_up, product)
    assert looked_up.shape == (2, 3, 5)


def operands(*batch):
    draw = np.random.default_rng(0).standard_normal
    return draw((*batch, 16), np.float32), draw((24, 16), np.float32)


@pytest.mark.parametrize("batch", [(1,), (2, 1), (2, 4), (9,)], ids=str)
def test_rows_are_multiplied_with_the_transposed_matrix(assert_close, batch):
    x, matrix = operands(*batch)
    bias = np.arange(24, dtype=np.float32)
    assert_close(jax.jit(affine)(x, matrix), x @ matrix.T)
    assert_close(jax.jit(affine)(x, matrix, bias), x @ matrix.T + bias)


def test_gradients_of_a_few_rows(assert_close):
    (x, matrix), bias = operands(2, 3), np.arange(24, dtype=np.float32)
    assert 6 in FEW_ROWS
    gradients = jax.jit(jax.grad(lambda *a: jnp.sum(jnp.sin(affine(*a))), (0, 1, 2)))
    slope = np.cos(x @ matrix.T + bias)
    of_x, of_matrix, of_bias = gradients(x, matrix, bias)
    assert_close(of_x, slope @ matrix)
    assert_close(of_bias, slope.sum((0, 1)))
    assert_close(of_matrix, np.einsum("bto,bti->oi", slope, x))


def test_few_rows_keep_the_matrix_on_the_left():
    """XLA would turn the operands around again, and with them the packing of the matrix."""
    (x, matrix), bias = operands(4), np.zeros(24, np.float32)
    for inputs in ((x, matrix), (x, matrix, bias)):
        program = jax.jit(affine).lower(*inputs).compile().as_text()
        assert program is not None
        assert "f32[24,4]" in program


def test_sums_have_the_requested_dtype():
    x, matrix = (jnp.asarray(a, jnp.bfloat16) for a in operands(4))
    assert affine(x, matrix).dtype == jnp.bfloat16
    assert affine(x, matrix, dtype=jnp.float32).dtype == jnp.float32


def norm_config(eps):
    sizes = {"vocab_size": 1, "max_length": 1, "num_layers": 1, "d_model": 16, "num_heads": 1}
    return models.TransformerConfig(**sizes, norm_eps=eps)


def test_layer_norm_by_hand():
    x = jnp.array([[1.0, 2.0, 3.0, 6.0]])  # mean 3, variance 3.5
    norm = LayerNorm(norm_config(0.5), models.Execution())
    params = {"scale": jnp.full(4, 2.0), "bias": jnp.full(4, 0.25)}
    expected = [[-1.75, -0.75, 0.25, 3.25]]  # (x - 3) / √4 · 2 + 0.25
    np.testing.assert_allclose(norm.apply({"params": params}, x), expected, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rms_norm_is_that_of_transformers(dtype):
    rng = np.random.default_rng(0)
    x, scale = rng.normal(size=(2, 3, 16)).astype(np.float32), rng.normal(size=16)
    theirs = modeling_llama.LlamaRMSNorm(16, eps=0.1)
    theirs.weight.data = torch.tensor(scale, dtype=torch.float32)
    found = RMSNorm(norm_config(0.1), models.Execution(dtype=dtype)).apply(
        {"params": {"scale": scale}}, jnp.asarray(x)
    )
    assert found.dtype == dtype
    tolerance = 1e-6 if dtype == "float32" else 2**-8
    expected = theirs(torch.tensor(x)).detach().numpy()
    np.testing.assert_allclose(np.asarray(found, np.float32), expected, tolerance, 1e-6)


@pytest.mark.parametrize(("ours", "theirs"), [("silu", "silu"), ("gelu_tanh", "gelu_new")])
def test_gated_feed_forward_is_that_of_transformers(ours, theirs):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 3, 16)).astype(np.float32)
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_attention_heads=4, hidden_act=theirs
    )
    block = modeling_llama.LlamaMLP(config)
    kernels = {
        name: {"kernel": getattr(block, f"{name}_proj").weight.detach().numpy().T}
        for name in ("gate", "up", "down")
    }
    gated = GatedFeedForward(dataclasses.replace(LLAMA, activation=ours), models.Execution(), None)
    np.testing.assert_allclose(
        gated.apply({"params": kernels}, jnp.asarray(x)),
        block(torch.tensor(x)).detach(),
        rtol=1e-5,
        atol=1e-6,
    )


def test_a_feed_forward_block_goes_up_to_four_times_the_width_and_down_again(assert_close):
    config = models.GPTConfig(
        vocab_size=8, max_length=8, num_layers=1, d_model=6, num_heads=2, activation="relu"
    )
    block, x = FeedForward(config, models.Execution(), None), jax.random.normal(KEY, (2, 3, 6))
    shapes = block.init(KEY, x)["params"]
    assert (shapes["up"]["kernel"].shape, shapes["down"]["kernel"].shape) == ((6, 24), (24, 6))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda p: rng.normal(size=p.shape).astype(np.float32), shapes)
    up, down = params["up"], params["down"]
    middle = np.maximum(x @ up["kernel"] + up["bias"], 0)
    assert_close(block.apply({"params": params}, x), middle @ down["kernel"] + down["bias"])


@pytest.mark.parametrize(
    ("name", "at_one"),
    [
        ("gelu", 0.5 * (1 + math.erf(1 / math.sqrt(2)))),
        ("gelu_tanh", 0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * 1.044715))),
        ("relu", 1.0),
    ],
)
def test_activations(name, at_one):
    assert float(ACTIVATIONS[name](jnp.float32(1))) == pytest.approx(at_one, abs=1e-6)
    assert float(ACTIVATIONS[name](jnp.float32(0))) == 0


@pytest.mark.parametrize(("dtype", "rtol"), [("float32", 1e-6), ("bfloat16", 2**-8)])
def test_exact_gelu_everywhere(dtype, rtol):
    x = jnp.linspace(-12, 12, 2001).astype(dtype)
    y = ACTIVATIONS["gelu"](x)
    expected = [0.5 * v * math.erfc(-v / math.sqrt(2)) for v in np.asarray(x, float)]
    assert y.dtype == x.dtype
    np.testing.assert_allclose(np.asarray(y, float), expected, rtol=rtol, atol=1e-6)
    slope = jax.vmap(jax.grad(ACTIVATIONS["gelu"]))(x.astype(jnp.float32))
    assert np.isfinite(slope).all()
