"""The convolution of heads: by hand, and as what the rest of a model knows of it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flaxzoo import models, train
from flaxzoo.models.config import Execution
from flaxzoo.models.init import parameter_shapes
from flaxzoo.models.lectures.head_convolution import EarlierTokens, HeadConvolution, earlier_tokens
from flaxzoo.models.nn.masks import AttentionMask
from flaxzoo.train.distributed import activations, sharding
from flaxzoo.train.optim.parameters import is_decayed

from ...support.requests import beams

IDS = np.random.default_rng(0).integers(0, 29, (3, 12))
PRIMER = {"head_convolution": 3, "activation": "relu_squared"}
FAMILIES = {
    "gpt": models.LectureGPTConfig,
    "bert": functools.partial(models.LectureBertConfig, head="causal_lm"),
}
SIZES = {"vocab_size": 32, "max_length": 16, "num_layers": 2, "d_model": 16, "num_heads": 4}


def make(family, **fields):
    config = FAMILIES[family](**{**SIZES, "dropout_rate": 0.0, "init_std": 0.3, **fields})
    model = models.create(config)
    return model, jax.jit(lambda: models.init_params(model, jax.random.key(0)))()


def with_taps(params):
    """Draws the taps at random: at their initial values they change nothing."""
    rng = np.random.default_rng(1)

    def drawn(path, x):
        return jnp.asarray(rng.normal(size=x.shape), x.dtype) if path[-1].key == "taps" else x

    return jax.tree_util.tree_map_with_path(drawn, params)


def convolve(x, taps, mask=None, **fields):
    length = x.shape[1]
    mask = AttentionMask(length, length, mask, causal=True, **fields)
    module = HeadConvolution(len(taps), Execution())
    earlier = earlier_tokens(mask, len(taps), cached=False)
    return np.asarray(module.apply({"params": {"taps": taps}}, x, earlier)[0])


@pytest.mark.parametrize("width", [1, 3, 5])
def test_the_formula(width, assert_close):
    rng = np.random.default_rng(width)
    x, taps = rng.normal(size=(2, 4, 3, 5)), rng.normal(size=(width, 3, 5))
    expected = np.zeros_like(x)
    for t in range(4):
        for lag in range(min(width, t + 1)):
            expected[:, t] += taps[lag] * x[:, t - lag]
    assert_close(convolve(jnp.asarray(x), jnp.asarray(taps)), expected)


def test_padding_and_other_documents_count_as_zeros(assert_close):
    x, taps = jnp.arange(1.0, 6).reshape(1, 5, 1, 1), jnp.asarray([1.0, 10, 100])[:, None, None]
    left = convolve(x, taps, np.array([[0, 0, 1, 1, 1]]))
    assert_close(left[0, 2:, 0, 0], [3, 4 + 30, 5 + 40 + 300])
    packed = convolve(x, taps, segment_ids=jnp.asarray([[1, 1, 2, 2, 2]]))
    assert_close(packed[0, :, 0, 0], [1, 2 + 10, 3, 4 + 30, 5 + 40 + 300])
    # The same as a mask with an entry for each query and key.
    pairs = np.kron(np.array([[1, 0], [0, 1]]), np.ones((3, 3)))[None, 1:, 1:] > 0
    assert_close(convolve(x, taps, pairs), packed)


def test_beams_follow_each_their_own_history(assert_close):
    """Two beams of one row, each with the inputs (1, 2) or (3, 4) before its token."""
    history = jnp.asarray([[1.0, 2], [3, 4]]).reshape(1, 2, 2, 1, 1)
    x, taps = jnp.asarray([5.0, 6]).reshape(1, 2, 1, 1), jnp.asarray([1.0, 10, 100])[:, None, None]
    module, earlier = HeadConvolution(3, Execution()), EarlierTokens(None, None, are_beams=True)
    y, after = module.apply({"params": {"taps": taps}}, x, earlier, history)
    assert_close(y[0, :, 0, 0], [5 + 20 + 100, 6 + 40 + 300])
    assert_close(after[0, :, :, 0, 0], [[2, 5], [4, 6]])
    with pytest.raises(ValueError, match=r"T = 2 .*1 beams"):
        module.apply({"params": {"taps": taps}}, x, earlier, history[:, :1])


@pytest.mark.parametrize("family", FAMILIES)
def test_it_begins_as_the_plain_model(family, assert_close):
    (plain, params), (primer, longer) = make(family), make(family, head_convolution=3)
    added = longer["layers"]["attention"]
    names = [f"{name}_convolution" for name in ("query", "key", "value")]
    assert set(added) - set(params["layers"]["attention"]) == set(names)
    logits = [
        jax.jit(model.apply)({"params": p}, input_ids=IDS).logits
        for model, p in ((plain, params), (primer, longer), (primer, with_taps(longer)))
    ]
    assert_close(logits[0], logits[1])
    assert np.abs(logits[2] - logits[1]).max() > 0.1
    assert not any(is_decayed(f"layers/attention/{name}/taps") for name in names)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_beams_score_what_a_forward_pass_gives(family):
    """Prompts of one, two and many tokens, in one batch: padding is at the left of two of them."""
    model, params = make(family, **PRIMER)
    params = with_taps(params)
    prompts = [[5], [7, 3], [11, 12, 13, 14, 15, 16]]
    request = beams(num_beams=3, num_return_sequences=3, max_new_tokens=6, length_penalty=0.0)
    found = models.Generator(model, params).search(prompts, request)
    forward = jax.jit(lambda ids: model.apply({"params": params}, input_ids=ids).logits)
    for prompt, row in zip(prompts, found, strict=True):
        assert len({tuple(h.tokens) for h in row}) == 3
        for h in row:
            ids = np.zeros((1, 12), np.int32)
            ids[0, : len(prompt) + 6] = [*prompt, *h.tokens]
            scores = np.asarray(jax.nn.log_softmax(forward(ids)[0], axis=-1))
            expected = sum(scores[len(prompt) - 1 + i, token] for i, token in enumerate(h.tokens))
            assert h.log_probability == pytest.approx(expected, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"fsdp": 8}, {"data": 2, "fsdp": 2, "tensor": 2}])
def test_eight_devices_compute_the_same(assert_close, sizes):
    model, params = make("gpt", **PRIMER, residual_scalar=True)
    params, ids = with_taps(params), np.tile(IDS, (3, 1))[:8]

    def loss(apply, params, ids):
        return jnp.mean(jnp.square(apply({"params": params}, input_ids=ids).logits))

    mesh = sharding.make_mesh(train.MeshConfig(**{"data": 1, **sizes}))
    placed = jax.device_put(params, sharding.parameter_shardings(params, mesh, model.config))
    taps = placed["layers"]["attention"]["value_convolution"]["taps"]
    assert taps.sharding.shard_shape(taps.shape) == (2, 3, 4 // sizes.get("tensor", 1), 4)
    apply = activations.constrain_activations(model.apply, mesh)
    on_many = jax.jit(jax.grad(functools.partial(loss, apply)))(
        placed, jax.device_put(ids, sharding.batch_sharding(mesh, ids.shape))
    )
    on_one = jax.jit(jax.grad(functools.partial(loss, model.apply)))(params, ids)
    jax.tree.map(assert_close, on_many, on_one)


def test_an_encoder_has_no_earlier_tokens():
    with pytest.raises(ValueError, match="head_convolution 3"):
        models.LectureBertConfig(**SIZES, head_convolution=3)
    config = models.LectureTransformerConfig(**SIZES, head_convolution=3)
    params = parameter_shapes(models.create(config))
    assert "query_convolution" in params["decoder"]["layers"]["attention"]
    assert "query_convolution" not in params["decoder"]["layers"]["cross_attention"]
    assert "query_convolution" not in params["encoder"]["layers"]["attention"]
