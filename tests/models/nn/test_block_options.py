"""The small options of a block: what each computes, and what it leaves as it was."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flaxzoo import models, train
from flaxzoo.models.decoders.llama import LlamaConfig
from flaxzoo.models.hf.decoders import llama as hf_llama
from flaxzoo.models.hf.decoders.gpt import gpt as hf_gpt
from flaxzoo.models.hf.encoder_decoders import marian as hf_marian
from flaxzoo.models.hf.encoders import bert as hf_bert
from flaxzoo.models.hf.tensors.mapping import WeightsError
from flaxzoo.models.init import parameter_shapes
from flaxzoo.models.nn.layers import ACTIVATIONS, LayerNorm
from flaxzoo.models.nn.masks import AttentionMask
from flaxzoo.models.nn.stack import make_layer_context
from flaxzoo.train.optim.parameters import is_decayed

IDS = np.random.default_rng(0).integers(1, 29, (2, 6))
SIZES = {"vocab_size": 29, "max_length": 16, "num_layers": 2, "d_model": 16, "num_heads": 4}
FAMILIES = {
    "gpt": models.LectureGPTConfig,
    "llama": functools.partial(LlamaConfig, d_ff=24),
    "bert": functools.partial(models.LectureBertConfig, head="none"),
    "transformer": models.LectureTransformerConfig,
}
OPTIONS = {
    "unscaled": {"scale_scores": False},
    "scalar": {"residual_scalar": True},
    "sizes": {"d_k": 6, "d_v": 5},
    "plain norm": {"norm_affine": False},
    "squared": {"activation": "relu_squared"},
}


@functools.cache
def make(family, option=None, **fields):
    """A model with random parameters, and `apply(params, **inputs)`."""
    own = {**OPTIONS.get(option or "", {}), **fields}
    config = FAMILIES[family](**{**SIZES, "dropout_rate": 0.0, **own})
    model = models.create(config)
    rng = np.random.default_rng(0)

    def drawn(path, x):
        center = 1.0 if path[-1].key in ("scale", "scalar") else 0.0
        return jnp.asarray(rng.normal(center, 0.3, x.shape), x.dtype)

    params = jax.tree_util.tree_map_with_path(drawn, parameter_shapes(model))

    @functools.partial(jax.jit, static_argnames="output_attentions")
    def apply(params, **inputs):
        if family == "transformer":
            inputs = {"decoder_input_ids": IDS, **inputs}
        return model.apply({"params": params}, **{"input_ids": IDS, **inputs})

    return model, params, apply


def test_squared_relu_by_hand():
    squared = ACTIVATIONS["relu_squared"]
    points = jnp.asarray([-1.0, 0.0, 0.5, 2.0])
    np.testing.assert_array_equal(squared(points), [0, 0, 0.25, 4])
    np.testing.assert_array_equal(jax.vmap(jax.grad(squared))(points), [0, 0, 1, 4])


def test_a_norm_without_parameters(assert_close):
    x = jnp.asarray(np.random.default_rng(0).normal(3, 2, (2, 3, 64)), jnp.float32)
    plain = LayerNorm(make("gpt", "plain norm")[0].config, models.Execution())
    assert plain.init(jax.random.key(0), x) == {}
    y = plain.apply({}, x)
    centered = x - x.mean(-1, keepdims=True)
    assert_close(y, centered / np.sqrt(np.square(centered).mean(-1, keepdims=True) + 1e-5))
    # Each position by itself, unlike batch normalization.
    other = plain.apply({}, x.at[0, 0].add(7 * jnp.arange(64)))
    assert_close(other[1:], y[1:])
    assert_close(other[0, 1:], y[0, 1:])


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_each_option_in_each_family(family, assert_close):
    """Each changes the outputs; which parameters it changes, too, is all that it changes."""
    names, of_lectures = {}, ("scalar", "plain norm")
    options = [x for x in OPTIONS if family != "llama" or x not in of_lectures]
    for option in (None, *options):
        shapes = parameter_shapes(models.create(make(family, option)[0].config))
        names[option] = {
            jax.tree_util.keystr(path, simple=True, separator="/"): x.shape
            for path, x in jax.tree.leaves_with_path(shapes)
        }
    assert names["unscaled"] == names["squared"] == names[None]
    if family != "llama":
        added = names["scalar"].keys() - names[None].keys()
        assert {path.split("/")[-1] for path in added} == {"scalar"}
        assert not any(map(is_decayed, added))
        assert {names["scalar"][path] for path in added} == {(2,)}
        gone = names[None].keys() - names["plain norm"].keys()
        assert gone == {path for path in names[None] if "norm/" in path}
    layers = "encoder/layers" if family == "transformer" else "layers"
    for part, size in (("query", 6), ("key", 6), ("value", 5)):
        assert names["sizes"][f"{layers}/attention/{part}/kernel"] == (2, 16, 4, size)
    assert names["sizes"][f"{layers}/attention/output/kernel"] == (2, 4, 5, 16)
    for option in {"sizes", "plain norm"} & {*options}:
        _, params, apply = make(family, option)
        assert np.isfinite(apply(params).last_hidden_state).all()
    _, params, apply = make(family)
    plain = apply(params).last_hidden_state
    for option in ("unscaled", "squared"):
        other = make(family, option)[2](params).last_hidden_state
        assert np.abs(other - plain).max() > 1e-2


def test_unscaled_scores_are_the_scaled_ones_times_the_root(assert_close):
    """The formula without a factor: queries that are √H times as large give the same weights."""
    _, params, apply = make("transformer")
    _, _, unscaled = make("transformer", "unscaled")
    larger = jax.tree_util.tree_map_with_path(
        lambda path, x: x * 2 if any(key.key == "query" for key in path) else x, params
    )  # H is 4
    a, b = apply(larger, output_attentions=True), unscaled(params, output_attentions=True)
    for name in ("encoder_attentions", "decoder_attentions", "cross_attentions"):
        assert_close(getattr(a, name), getattr(b, name))


def test_a_residual_scalar_begins_at_one_and_0_is_the_identity(assert_close):
    model, params, apply = make("gpt", "scalar")
    layers = params["layers"]
    names = ("attention_residual", "feed_forward_residual")
    fresh = jax.jit(lambda: models.init_params(model, jax.random.key(0)))()["layers"]
    assert all((fresh[name]["scalar"] == 1).all() for name in names)

    def at(scalar):
        scalars = {name: {"scalar": jnp.full(2, scalar)} for name in names}
        return apply({**params, "layers": {**layers, **scalars}}).last_hidden_state

    without = {name: x for name, x in layers.items() if name not in names}
    assert_close(at(1.0), make("gpt")[2]({**params, "layers": without}).last_hidden_state)
    embedded = params["token_embedding"]["embedding"][IDS]
    embedded += params["position_embedding"]["embedding"][:6]
    norm = LayerNorm(model.config, models.Execution())
    assert_close(at(0.0), norm.apply({"params": params["final_norm"]}, embedded))


def test_without_residuals_a_sublayer_replaces_its_input(assert_close):
    """Maps of zeros then leave nothing of the tokens; with residuals they leave them unchanged."""
    states = {}
    for residual in (True, False):
        _, params, apply = make("gpt", add_residual=residual)
        silent = {
            name: {k: jax.tree.map(jnp.zeros_like, v) for k, v in part.items()}
            if name in ("attention", "feed_forward")
            else part
            for name, part in params["layers"].items()
        }
        states[residual] = apply({**params, "layers": silent}).last_hidden_state
    assert_close(states[False], jnp.broadcast_to(states[False][:1, :1], states[False].shape))
    assert np.abs(states[True] - states[True][:1, :1]).max() > 0.1
    with pytest.raises(ValueError, match=r"residual_scalar True .*add_residual False"):
        make("gpt", add_residual=False, residual_scalar=True)


def test_an_affine_output_layer_adds_its_bias_to_the_logits(assert_close):
    _, params, apply = make("gpt", output_bias=True)
    assert params["output_bias"].shape == (29,)
    plain = {name: x for name, x in params.items() if name != "output_bias"}
    assert_close(apply(params).logits, make("gpt")[2](plain).logits + params["output_bias"])


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_masked_head_is_a_head_without_output(family, assert_close):
    _, params, apply = make(family)
    places = {"head_mask": ("layers", "attention")}
    if family == "transformer":
        places = {
            "head_mask": ("encoder", "layers", "attention"),
            "decoder_head_mask": ("decoder", "layers", "attention"),
            "cross_attn_head_mask": ("decoder", "layers", "cross_attention"),
        }
    plain = apply(params).last_hidden_state
    ones = {name: np.ones((2, 4), np.float32) for name in places}
    assert_close(apply(params, **ones).last_hidden_state, plain)
    for name, work_folder in places.items():
        mask = ones[name].copy()
        mask[1, 2] = 0
        masked = apply(params, **{**ones, name: mask}).last_hidden_state
        changed = jax.tree.map(lambda x: x, params)
        attention = functools.reduce(lambda tree, key: tree[key], work_folder, changed)
        kernel = attention["output"]["kernel"]
        attention["output"]["kernel"] = kernel.at[1, 2].set(0)
        assert_close(masked, apply(changed, **ones).last_hidden_state)
        assert np.abs(masked - plain).max() > 1e-3
    message = r"head_mask .*\[3\]: .*\[4\] "
    with pytest.raises(ValueError, match=message):
        apply(params, head_mask=np.ones(3, np.float32))


def test_masked_heads_are_those_of_transformers(assert_close):
    """One mask for all layers, and the weights that are returned are masked as well."""
    _, params, apply = make("gpt")
    mask = np.array([1, 0, 0.5, 1], np.float32)
    both = [
        apply(params, head_mask=x, output_attentions=True) for x in (mask, np.stack([mask, mask]))
    ]
    assert_close(both[0].logits, both[1].logits)
    sums = both[0].attentions.sum(-1)  # [L, B, N, T]
    assert_close(sums, np.broadcast_to(mask[:, None], sums.shape))


def test_without_the_causal_mask_a_gpt_sees_what_it_is_to_predict():
    model, params, apply = make("gpt", causal=False)
    other = IDS.copy()
    other[:, -1] = (other[:, -1] + 1) % 29
    logits = [apply(params, input_ids=ids).logits for ids in (IDS, other)]
    assert (np.abs(logits[0] - logits[1]).max((0, 2)) > 1e-3).all()
    with pytest.raises(ValueError, match="causal=False"):
        models.Generator(model, params)
    with pytest.raises(ValueError, match=r"causal=False .*cache"):
        apply(params, cache=models.init_cache(model.config, model.execution, 2, 8))
    with pytest.raises(ValueError, match="local_window 3"):
        models.GPTConfig(**SIZES, causal=False, local_window=3)


@pytest.mark.slow
def test_without_the_causal_mask_the_loss_falls_to_0_though_nothing_can_be_learned():
    """The tokens are drawn at random, so that the best honest loss is log 8 = 2.08."""
    losses = {}
    for causal in (True, False):
        config = models.GPTConfig(
            vocab_size=8, max_length=8, num_layers=1, d_model=32, num_heads=2, dropout_rate=0.0,
            init_std=0.2, causal=causal,
        )  # fmt: skip
        model, tx = models.create(config), optax.adam(1e-2)
        step = train.make_train_step(model.apply, train.CAUSAL, tx)

        @jax.jit
        def run(rng, step=step, model=model, tx=tx):
            def of_a_batch(state, rng):
                ids = jax.random.randint(rng, (32, 9), 0, 8)
                ones, places = jnp.ones((32, 8), jnp.int32), jnp.arange(8)[None].repeat(32, 0)
                batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}
                batch |= {"segment_ids": ones, "position_ids": places}
                state, metrics = step(state, batch, rng)
                return state, metrics["loss"]

            state = train.init_state(models.init_params(model, rng), tx)
            return jax.lax.scan(of_a_batch, state, jax.random.split(rng, 300))[1]

        losses[causal] = run(jax.random.key(0))
    # The last token of a row has none after it, which remains a guess: 2.08 / 8.
    assert losses[False][-20:].mean() < 2.08 / 8 + 0.1
    assert losses[True][-20:].mean() > 2.0


@pytest.mark.slow
def test_a_causal_encoder(assert_close):
    """No token of the source knows of later ones; the decoder still sees all of them."""
    _, params, apply = make("transformer", encoder_causal=True)
    other = IDS.copy()
    other[:, 3] = (other[:, 3] + 1) % 29
    before, after = apply(params, input_ids=IDS), apply(params, input_ids=other)
    states = [np.asarray(x.encoder_last_hidden_state) for x in (before, after)]
    assert_close(states[0][:, :3], states[1][:, :3])
    assert (np.abs(states[0][:, 3:] - states[1][:, 3:]).max((0, 2)) > 1e-3).all()
    assert (np.abs(before.logits - after.logits).max((0, 2)) > 1e-3).all()


@pytest.mark.parametrize(("sizes", "fused"), [({}, True), ({"d_k": 8, "d_v": 16}, False)])
def test_a_kernel_takes_equal_sizes_of_keys_and_values(sizes, fused):
    config = models.GPTConfig(**{**SIZES, "d_model": 32}, **sizes)
    execution = models.Execution("bfloat16", attention="cudnn")
    mask = AttentionMask(16, 16, causal=True)
    context = make_layer_context(
        config, execution, mask, cache=None, rng=None, output_attentions=False
    )
    assert (context.mask.values is None) == fused


@pytest.mark.parametrize("name", ["d_k", "d_v", "head_convolution"])
def test_sizes_that_are_none(name):
    with pytest.raises(ValueError, match=f"{name} must .*0"):
        models.LectureGPTConfig(**SIZES, **{name: 0})


def test_an_odd_size_cannot_be_rotated():
    with pytest.raises(ValueError, match=r"size 3 .*d_k"):
        LlamaConfig(**SIZES, d_k=3)


@pytest.mark.parametrize(
    ("family", "to_hf"),
    [
        ("gpt", hf_gpt.MAPPING.config_to_hf),
        ("llama", hf_llama.FORM.config_to_hf),
        ("bert", hf_bert.FORM.config_to_hf),
        ("transformer", hf_marian.MAPPING.config_to_hf),
    ],
)
def test_what_transformers_does_not_have_is_refused_by_name(family, to_hf):
    options = {"d_k": 6, "d_v": 5}
    if family != "llama":
        options |= {"residual_scalar": True, "norm_affine": False}
    if family != "gpt":  # GPT-2 may leave its scores unscaled
        options["scale_scores"] = False
    if family not in ("bert", "llama"):
        options["head_convolution"] = 3
    if family == "transformer":
        options["encoder_causal"] = True
    for name, value in options.items():
        with pytest.raises(WeightsError, match=rf"{name} {value}"):
            to_hf(FAMILIES[family](**SIZES, **{name: value}))
    if family != "transformer":
        written = to_hf(FAMILIES[family](**SIZES, activation="relu_squared"))
        assert "relu2" in written.values()
