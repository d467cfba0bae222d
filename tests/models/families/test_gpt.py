"""What must hold of every causal language model, whatever its weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flaxzoo import models
from flaxzoo.train.losses.cross_entropy import cross_entropy

RNG = np.random.default_rng(0)
IDS = RNG.integers(0, 29, (3, 12))
KINDS = {
    "learned": {},
    "sinusoidal": {"positions": "sinusoidal"},
    "banded": {"local_window": 3},
    "post-norm": {"norm_position": "post"},
    "scaled by layer": {"scale_scores": False, "scale_scores_by_layer": True, "tie_output": False},
    "primer": {"family": "lecture_gpt", "head_convolution": 3, "activation": "relu_squared"},
}
LAYERS = ("scan", "unroll", "separate")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("changed", [0, 5, 11])
def test_nothing_before_a_token_knows_of_it(tiny, assert_close, kind, changed):
    model = tiny(**KINDS[kind])
    other = IDS.copy()
    other[:, changed] = (other[:, changed] + 1) % 29
    before, after = model.logits(input_ids=IDS), model.logits(input_ids=other)
    assert_close(after[:, :changed], before[:, :changed], 1e-6)
    assert np.abs(after[:, changed] - before[:, changed]).max() > 0.1


@pytest.mark.parametrize("layers", LAYERS)
def test_attention_weights(tiny, assert_close, layers):
    weights = tiny(local_window=3, layers=layers)(input_ids=IDS, output_attentions=True).attentions
    weights = np.stack(weights)  # [L, B, N, T, S]
    assert weights.shape == (2, 3, 4, 12, 12)
    assert weights.dtype == np.float32
    assert_close(weights.sum(-1), 1)
    distance = np.arange(12)[:, None] - np.arange(12)
    dense, band = distance >= 0, (distance >= 0) & (distance < 3)
    for layer, visible in zip(weights, (dense, band), strict=True):
        assert (layer[..., ~visible] == 0).all()
        assert (layer[..., visible] > 0).all()


def test_attention_weights_only_on_request(tiny):
    assert tiny()(input_ids=IDS).attentions is None


@pytest.mark.slow
def test_a_stack_of_bands_reaches_no_further_than_its_windows():
    config = models.GPTConfig(
        vocab_size=29, max_length=16, num_layers=2, d_model=8, num_heads=2, local_window=2
    )
    model = models.create(config)
    params = jax.jit(model.init)(jax.random.key(0), input_ids=IDS)["params"]
    # The dense layer blinded (it averages nothing into the stream), only the band is left.
    output = params["layers"]["attention"]["output"]
    params["layers"]["attention"]["output"] = jax.tree.map(lambda x: x.at[0].set(0), output)
    forward = jax.jit(lambda ids: model.apply({"params": params}, input_ids=ids).logits)
    other = IDS.copy()
    other[:, 4] = (other[:, 4] + 1) % 29
    same = np.abs(forward(jnp.asarray(other)) - forward(jnp.asarray(IDS))).max((0, 2)) < 1e-6
    np.testing.assert_array_equal(np.flatnonzero(~same), [4, 5])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(tiny, assert_close, kind, side):
    model, lengths = tiny(**KINDS[kind]), (12, 7, 1)
    ids, mask = np.full((3, 12), 28), np.zeros((3, 12), int)
    places = [slice(12 - n, 12) if side == "left" else slice(n) for n in lengths]
    for row, (where, n) in enumerate(zip(places, lengths, strict=True)):
        ids[row, where], mask[row, where] = IDS[row, :n], 1
    padded = model.logits(input_ids=ids, attention_mask=mask)
    assert np.isfinite(padded).all()
    for row, (where, n) in enumerate(zip(places, lengths, strict=True)):
        alone = model.logits(input_ids=IDS[row : row + 1, :n])
        assert_close(padded[row, where], alone[0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("explicit", [False, True], ids=["counted", "given"])
def test_packed_sequences_are_their_documents_one_by_one(tiny, assert_close, kind, explicit):
    model, cuts = tiny(**KINDS[kind]), ((7, 4, 1), (12,), (1, 7))
    segments, positions = np.zeros((3, 12), int), np.zeros((3, 12), int)
    for row, lengths in enumerate(cuts):
        ends = np.cumsum(lengths)
        for number, (n, end) in enumerate(zip(lengths, ends, strict=True), 1):
            segments[row, end - n : end], positions[row, end - n : end] = number, np.arange(n)
    given = {"position_ids": positions} if explicit else {}
    packed = model.logits(input_ids=IDS, segment_ids=segments, **given)
    assert np.isfinite(packed).all()
    for row, lengths in enumerate(cuts):
        for number, n in enumerate(lengths, 1):
            where = segments[row] == number
            alone = model.logits(input_ids=IDS[row : row + 1, where])
            assert alone.shape[1] == n
            assert_close(packed[row, where], alone[0])


def test_cache_has_the_computations_precision():
    config = models.GPTConfig(vocab_size=5, max_length=8, num_layers=3, d_model=8, num_heads=2)
    for layers, number in (("scan", 2), ("unroll", 2), ("separate", 6)):
        cache = models.init_cache(config, models.Execution("bfloat16", layers=layers), 2, 6)
        leaves = jax.tree.leaves(cache.layers)
        assert (len(leaves), cache.length, int(cache.index)) == (number, 6, 0)
        assert sum(x.size for x in leaves) == 2 * 3 * 2 * 6 * 8
        assert {str(x.dtype) for x in leaves} == {"bfloat16"}


def loss_and_gradient(model):
    labels, weights = jnp.asarray(np.roll(IDS, -1, 1)), jnp.ones(IDS.shape)
    rng = models.row_keys(jax.random.key(3), 3)

    @jax.jit
    @jax.value_and_grad
    def loss(params):
        out = model.model.apply({"params": params}, input_ids=IDS, rng=rng)
        return cross_entropy(out.projection, labels, weights).loss / IDS.size

    value, gradient = loss(model.params)
    return float(value), gradient


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "remat"),
    [("scan", "dots"), ("unroll", "none"), ("separate", "none")],
)
def test_all_ways_to_run_have_the_same_loss_and_gradient(tiny, assert_close, layers, remat):
    value, gradient = loss_and_gradient(tiny(dropout_rate=0.2))
    other = tiny(dropout_rate=0.2, layers=layers, remat=remat)
    other_value, other_gradient = loss_and_gradient(other)
    assert abs(value - other_value) < 1e-5
    if layers == "separate":
        _, gradient = models.unstack_layers(tiny(dropout_rate=0.2).model, gradient)
    jax.tree.map(lambda a, b: assert_close(a, b), other_gradient, gradient)


def test_separate_layers_hold_the_same_numbers(tiny):
    stacked = tiny()
    model, params = models.unstack_layers(stacked.model, stacked.params)
    assert set(params) == set(stacked.params) - {"layers"} | {"layers_0", "layers_1"}
    assert model.execution.layers == "separate"
    for i in range(2):
        ours = stacked.params["layers"]
        query, output = (ours["attention"][name]["kernel"][i] for name in ("query", "output"))
        laid_out = params[f"layers_{i}"]["attention"]
        # Matrices [outputs, inputs] of heads and their sizes, side by side.
        np.testing.assert_array_equal(laid_out["query"]["kernel"], query.reshape(16, 16).T)
        np.testing.assert_array_equal(laid_out["output"]["kernel"], output.reshape(16, 16).T)
        bias = ours["feed_forward"]["up"]["bias"][i]
        np.testing.assert_array_equal(params[f"layers_{i}"]["feed_forward"]["up"]["bias"], bias)
    assert "layers" in stacked.params  # not consumed
    again = models.unstack_layers(model, params)
    assert (again[0], again[1]) == (model, params)


@pytest.mark.slow
def test_compute_and_parameter_precision_are_apart(tiny):
    exact, fast = tiny(), tiny(dtype="bfloat16")
    out = fast(input_ids=IDS)
    assert {str(x.dtype) for x in jax.tree.leaves(fast.params)} == {"float32"}
    assert (out.last_hidden_state.dtype, out.logits.dtype) == (jnp.bfloat16, jnp.float32)
    gradient = loss_and_gradient(fast)[1]
    assert {str(x.dtype) for x in jax.tree.leaves(gradient)} == {"float32"}
    # bfloat16 has 8 bits: a relative error of a few of its steps.
    logits = exact.logits(input_ids=IDS)
    assert np.abs(out.logits - logits).max() < 0.05 * np.abs(logits).max()

    half = tiny(dtype="bfloat16", param_dtype="bfloat16")
    assert {str(x.dtype) for x in jax.tree.leaves(half.params)} == {"bfloat16"}
    assert half(input_ids=IDS).logits.dtype == jnp.float32


@pytest.mark.parametrize("position", ["pre", "post"])
def test_biases_are_optional(position):
    def names(**fields):
        config = models.GPTConfig(
            vocab_size=29,
            max_length=16,
            num_layers=2,
            d_model=16,
            num_heads=4,
            norm_position=position,
            **fields,
        )
        init = models.create(config).init
        params = jax.eval_shape(init, jax.random.key(0), input_ids=jnp.asarray(IDS))["params"]
        leaves = jax.tree.leaves_with_path(params)
        return {jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves}

    with_bias, without = names(), names(use_bias=False)
    assert with_bias - without == {
        f"layers/{where}/bias"
        for where in (
            *("attention/query", "attention/key", "attention/value", "attention/output"),
            *("feed_forward/up", "feed_forward/down"),
        )
    }
    assert ("final_norm/scale" in without) == (position == "pre")


@pytest.mark.slow
@pytest.mark.parametrize("scaled", [True, False])
def test_initial_values(scaled):
    config = models.GPTConfig(
        vocab_size=500,
        max_length=100,
        num_layers=8,
        d_model=64,
        num_heads=4,
        scale_residual_init=scaled,
    )
    params = jax.jit(models.create(config).init)(jax.random.key(1), jnp.zeros((1, 1), int))
    for path, x in jax.tree.leaves_with_path(params["params"]):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if name.endswith("bias") or name.endswith("scale"):
            assert (x == float(name.endswith("scale"))).all(), name
            continue
        into_stream = name.endswith(("output/kernel", "down/kernel"))
        std = 0.02 / np.sqrt(16) if scaled and into_stream else 0.02
        for layer in x if name.startswith("layers/") else [x]:
            # The deviation of n normal numbers is known to one part in √(2 n).
            assert abs(layer.std() / std - 1) < 5 / np.sqrt(2 * layer.size), name
        if name.startswith("layers/"):
            assert abs(np.corrcoef(x[0].ravel(), x[1].ravel())[0, 1]) < 0.1, "layers are equal"


@pytest.mark.parametrize("bad", [29, 1000, -1])
def test_an_id_outside_the_vocabulary_gives_nan_and_no_neighbour(tiny, assert_close, bad):
    ids = IDS.copy()
    ids[1, 6] = bad
    logits = tiny().logits(input_ids=ids)
    assert np.isnan(logits[1, 6:]).all()
    assert_close(logits[[0, 2]], tiny().logits(input_ids=IDS)[[0, 2]])


@pytest.mark.parametrize("kind", ["learned", "sinusoidal"])
def test_a_position_beyond_the_table_gives_nan(tiny, kind):
    positions = np.arange(12)[None] + np.array([[0], [5], [0]])
    logits = tiny(**KINDS[kind]).logits(input_ids=IDS, position_ids=positions)
    assert np.isnan(logits[1, 11:]).all()
    assert np.isfinite(logits[[0, 2]]).all()


def test_too_long_an_input(tiny):
    with pytest.raises(ValueError, match=r"17 tokens .*max_length 16"):
        tiny()(input_ids=np.zeros((1, 17), int))


def test_a_cache_does_not_continue_packed_sequences(tiny):
    cache = models.init_cache(tiny().config, tiny().execution, 3, 12)
    with pytest.raises(ValueError, match=r"cache .*packed"):
        tiny()(input_ids=IDS, segment_ids=np.ones((3, 12), int), cache=cache)


def test_shapes_are_checked_under_pytest(tiny):
    with pytest.raises(Exception, match="input_ids"):
        tiny()(input_ids=np.zeros((1, 2, 3), int))


@pytest.mark.parametrize(
    ("rates", "number"),
    [
        # Embeddings; in the one traced layer attention weights and two outputs.
        ({}, 4),
        ({"embedding_dropout": 0.0}, 3),
        ({"attention_dropout": 0.0}, 3),
        ({"dropout_rate": 0.0, "embedding_dropout": 0.2, "attention_dropout": 0.2}, 2),
    ],
)
def test_each_dropout_has_its_own_rate(tiny, rates, number):
    model, rng = tiny(**{"dropout_rate": 0.1, **rates}), models.row_keys(jax.random.key(1), 3)

    def forward(params, rng):
        return model.model.apply({"params": params}, input_ids=IDS, rng=rng).last_hidden_state

    assert str(jax.make_jaxpr(forward)(model.params, rng)).count("name=dropout_mask") == number


def test_each_layer_scales_its_scores(tiny, assert_close):
    """The first one's by 1: as ever."""
    plain, scaled = (
        np.stack(tiny(**fields)(input_ids=IDS, output_attentions=True).attentions)
        for fields in ({}, {"scale_scores_by_layer": True})
    )
    assert_close(scaled[0], plain[0], 1e-6)
    assert np.abs(scaled[1] - plain[1]).max() > 0.01


def test_an_output_table_of_its_own(tiny):
    params = tiny(tie_output=False).params
    assert params["output_embedding"]["embedding"].shape == (29, 16)
    assert "output_embedding" not in tiny().params


@pytest.mark.parametrize("name", ["embedding_dropout", "attention_dropout"])
def test_a_rate_that_is_none(name):
    with pytest.raises(ValueError, match=f"{name} must .*1.5"):
        models.GPTConfig(
            vocab_size=5, max_length=8, num_layers=1, d_model=8, num_heads=2, **{name: 1.5}
        )
