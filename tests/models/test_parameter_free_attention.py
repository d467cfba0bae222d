"""Simple self-attention and kernel regression: worked examples, laws, and whole models."""

import functools
import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flaxzoo import data, models
from flaxzoo.models.lectures.attention import LectureAttention
from flaxzoo.models.lectures.parameter_free_attention import simple_attention_weights
from flaxzoo.models.lectures.positions import LecturePositions
from flaxzoo.models.nn.attention import AttentionContext
from flaxzoo.models.nn.masks import AttentionMask
from flaxzoo.models.registry import config_from_dict, config_to_dict

X = jnp.array([[1.0, 0], [0, 1], [1, 1]])
RNG = np.random.default_rng(0)
IDS = RNG.integers(0, 29, (3, 12))


def test_the_worked_example():
    weights = [[0.4223, 0.1554, 0.4223], [0.1554, 0.4223, 0.4223], [0.2119, 0.2119, 0.5761]]
    outputs = [[0.8446, 0.5777], [0.5777, 0.8446], [0.7881, 0.7881]]
    np.testing.assert_allclose(X @ X.T, [[1, 0, 1], [0, 1, 1], [1, 1, 2]])
    np.testing.assert_allclose(models.simple_attention_weights(X), weights, atol=6e-5)
    np.testing.assert_allclose(models.simple_attention(X), outputs, atol=6e-5)


def test_the_scaled_example():
    outputs = [[0.8022, 0.5989], [0.5989, 0.8022], [0.7517, 0.7517]]
    scaled = models.simple_attention(X, scale=2**-0.5)
    np.testing.assert_allclose(scaled, outputs, atol=6e-5)


def test_the_causal_example():
    weights = [[1, 0, 0], [0.2689, 0.7311, 0], [0.2119, 0.2119, 0.5761]]
    found = models.simple_attention_weights(X, causal=True)
    np.testing.assert_allclose(found, weights, atol=6e-5)
    outputs = [[1, 0], [0.2689, 0.7311], [0.7881, 0.7881]]
    np.testing.assert_allclose(models.simple_attention(X, causal=True), outputs, atol=6e-5)
    by_mask = models.simple_attention(X, mask=jnp.tri(3, dtype=bool))
    np.testing.assert_array_equal(by_mask, models.simple_attention(X, causal=True))


def test_a_mask_after_the_softmax_leaves_weights_that_sum_to_less_than_one():
    late = jnp.tril(models.simple_attention_weights(X)).sum(axis=1)
    np.testing.assert_allclose(late, [0.4223, 0.5777, 1], atol=6e-5)
    np.testing.assert_allclose(models.simple_attention_weights(X, causal=True).sum(1), 1, atol=1e-6)


def test_masks_of_a_batch_and_a_row_without_keys():
    x = jnp.asarray(RNG.normal(size=(2, 5, 4)), jnp.float32)
    keys = jnp.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], bool)
    masked = models.simple_attention(x, mask=keys[:, None, :])
    alone = models.simple_attention(x[0, :3])
    np.testing.assert_allclose(masked[0, :3], alone, atol=1e-6)
    nothing = models.simple_attention(x, mask=jnp.zeros((1, 5, 5), bool))
    np.testing.assert_allclose(
        nothing, jnp.broadcast_to(x.mean(1, keepdims=True), x.shape), atol=1e-6
    )


def test_each_vector_attends_most_to_itself():
    x = jnp.asarray(RNG.normal(size=(50, 64)), jnp.float32)
    weights = models.simple_attention_weights(x)
    np.testing.assert_array_equal(weights.argmax(axis=1), np.arange(50))


def test_gradients_take_two_paths():
    """With W held the map is linear: its Jacobian is the Kronecker product of W and I."""
    x = jnp.asarray(RNG.normal(size=(4, 3)), jnp.float32)

    def values_alone(x):
        return jax.lax.stop_gradient(models.simple_attention_weights(x)) @ x

    held, whole = (
        jax.jacobian(f)(x).reshape(12, 12) for f in (values_alone, models.simple_attention)
    )
    weights = models.simple_attention_weights(x)
    np.testing.assert_allclose(held, jnp.kron(weights, jnp.eye(3)), atol=1e-6)
    assert np.abs(whole - held).max() > 0.1  # the other path, through the softmax


def test_distance_is_no_matter():
    """Of 1000 elements, the weight of the first for the last depends on their contents only."""
    x = jnp.asarray(RNG.normal(size=(1000, 8)), jnp.float32) / 3
    order = np.r_[0, 999, 1:999]  # the last one moves beside the first
    far = models.simple_attention_weights(x)[999, 0]
    np.testing.assert_allclose(models.simple_attention_weights(x[order])[1, 0], far, rtol=1e-5)
    reach = jax.grad(lambda x: models.simple_attention(x)[np.array([0, 999])].sum())(x)
    assert (np.abs(reach).max(axis=1) > 0).all()


def test_a_permuted_input_gives_the_permuted_output():
    x, order = jnp.asarray(RNG.normal(size=(9, 5)), jnp.float32), RNG.permutation(9)
    permuted = models.simple_attention(x[order])
    np.testing.assert_allclose(permuted, models.simple_attention(x)[order], atol=1e-6)


def test_dot_products_measure_angles():
    angle = jnp.linspace(0, math.pi, 7)
    x = jnp.stack([jnp.cos(angle), jnp.sin(angle)], axis=1)
    np.testing.assert_allclose(3 * x @ (2 * x[0]), 6 * jnp.cos(angle), atol=1e-5)
    weights = models.simple_attention_weights(x)[0]
    assert (jnp.diff(weights) < 0).all()  # of one length, the nearer in angle weighs more


def test_not_moderates_terrible_through_their_dot_product():
    """The output of "terrible" turns from its own sentiment (-1) to that of "not" (1)."""
    outputs = [
        float(models.simple_attention(jnp.array([[1.0, shared], [-1.0, 1.0]]))[1, 0])
        for shared in (0, 2, 3, 6)  # the product of the two words is one less
    ]
    np.testing.assert_allclose(outputs, np.tanh([-1.5, -0.5, 0, 1.5]), atol=1e-6)


def test_a_soft_dictionary():
    """With orthogonal keys and a long query, the answer is the value of the query's key."""
    keys, values = jnp.eye(4), jnp.asarray(RNG.normal(size=(4, 3)), jnp.float32)
    errors = []
    for beta in (1.0, 4, 16, 64):
        answer = models.kernel_regression(beta * keys[1:2], keys, values, 1.0)
        errors.append(float(np.abs(answer[0] - values[1]).max()))
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 0.1
    assert errors[-1] < 1e-6


def test_kernel_regression_by_hand():
    queries, x = jnp.array([[0.0], [1], [1.5]]), jnp.array([[0.0], [1], [2]])
    weights = models.kernel_weights(queries, x, 1.0)
    np.testing.assert_allclose(weights[0], [0.5741, 0.3482, 0.0777], atol=6e-5)
    np.testing.assert_allclose(weights[1], [0.2741, 0.4519, 0.2741], atol=6e-5)
    answers = models.kernel_regression(queries, x, jnp.array([[0.0], [1], [4]]), 1.0)
    np.testing.assert_allclose(answers[:, 0], [0.6590, 1.5481, 2.1116], atol=6e-5)


def test_any_similarity_is_an_argument_of_one_function():
    queries, keys, values = (jnp.asarray(RNG.normal(size=(2, 5, 4)), jnp.float32) for _ in range(3))
    attend = functools.partial(models.similarity_attention, queries, keys, values)
    products, distances = queries @ keys.swapaxes(1, 2), queries[:, :, None] - keys[:, None]
    by_hand = {
        "dot": products,
        "scaled": products / 2,
        "gaussian": -jnp.square(distances).sum(-1) / 2,
    }
    for name, scores in by_hand.items():
        np.testing.assert_allclose(
            attend(score=name), jax.nn.softmax(scores) @ values, atol=1e-5, err_msg=name
        )
    np.testing.assert_allclose(attend(), attend(score="scaled"))
    np.testing.assert_allclose(
        attend(score="gaussian"), models.kernel_regression(queries, keys, values, 1.0), atol=1e-6
    )
    alike = models.similarity_attention(values, values, values, score="dot")
    np.testing.assert_allclose(alike, models.simple_attention(values), atol=1e-6)
    # A function: the values of the nearest key in the sum of absolute differences.
    nearest = attend(score=lambda q, k: -1e4 * jnp.abs(q[:, :, None] - k[:, None]).sum(-1))
    chosen = np.abs(distances).sum(-1).argmin(-1)
    wanted = jnp.take_along_axis(values, chosen[..., None], 1)
    np.testing.assert_allclose(nearest, wanted, atol=1e-5)
    first = attend(mask=jnp.arange(5)[None, None] == 0)
    np.testing.assert_allclose(first, jnp.broadcast_to(values[:, :1], values.shape), atol=1e-6)
    with pytest.raises(data.UserError, match=r"score .*'cosine'"):
        attend(score="cosine")


def test_dot_product_attention_is_kernel_regression_on_the_unit_sphere():
    points = RNG.normal(size=(2, 6, 5))
    points /= np.linalg.norm(points, axis=-1, keepdims=True)
    queries, keys = jnp.asarray(points, jnp.float32)
    dot = jax.nn.softmax(queries @ keys.T / 0.7**2, axis=-1)
    np.testing.assert_allclose(models.kernel_weights(queries, keys, 0.7), dot, atol=1e-6)
    simple = models.simple_attention(queries, scale=0.7**-2)
    np.testing.assert_allclose(
        models.kernel_regression(queries, queries, queries, 0.7), simple, atol=1e-6
    )


def test_a_wide_kernel_averages_and_a_narrow_one_looks_up():
    x, y = (jnp.asarray(RNG.normal(size=(8, 2)), jnp.float32) for _ in range(2))
    wide = models.kernel_regression(x, x, y, 1e4)
    np.testing.assert_allclose(wide, jnp.broadcast_to(y.mean(0), y.shape), atol=1e-5)
    np.testing.assert_allclose(models.kernel_regression(x, x, y, 1e-2), y, atol=1e-5)


def test_a_learned_bandwidth_is_better_than_a_given_one():
    """The curve of d2l.ai, section 11.2: y = 2 sin x + x ** 0.8, with noise."""
    x = jnp.asarray(np.sort(RNG.uniform(0, 5, (60, 1)), axis=0), jnp.float32)
    truth = 2 * jnp.sin(x) + x**0.8
    y = truth + 0.3 * jnp.asarray(RNG.normal(size=x.shape), jnp.float32)
    others = ~jnp.eye(60, dtype=bool)

    def loss(log_bandwidth):
        """Each point estimated from the others, or the best bandwidth would be 0."""
        weights = models.kernel_weights(x, x, jnp.exp(log_bandwidth)) * others
        return jnp.mean((weights @ y / weights.sum(1, keepdims=True) - y) ** 2)

    step = jax.jit(jax.value_and_grad(loss))
    h, optimizer = jnp.array(0.0), optax.adam(0.1)
    state, losses = optimizer.init(h), []
    for _ in range(60):
        value, gradient = step(h)
        updates, state = optimizer.update(gradient, state)
        h, losses = jnp.asarray(optax.apply_updates(h, updates)), [*losses, float(value)]
    assert losses[-1] < 0.25 * losses[0]
    error = [
        float(jnp.mean((models.kernel_regression(x, x, y, b) - truth) ** 2))
        for b in (1.0, float(jnp.exp(h)))
    ]
    assert error[1] < 0.25 * error[0]


def test_vectors_must_be_in_rows():
    with pytest.raises(ValueError, match=r"x .*shape \(\d,\): .*\[T, D\]"):
        inspect.unwrap(simple_attention_weights)(X[0])  # without the shape check of the tests


def test_a_bandwidth_must_be_positive():
    with pytest.raises(ValueError, match=r"bandwidth 0\.0 .*above 0"):
        models.kernel_regression(X, X, X, 0.0)


# As the attention of a model.


def test_heads_are_parts_of_the_input():
    config = models.LectureGPTConfig(
        vocab_size=8, max_length=8, num_layers=1, d_model=12, num_heads=3, attention="simple"
    )
    attention = LectureAttention(config, models.Execution(), None)
    x = jnp.asarray(RNG.normal(size=(2, 5, 12)), jnp.float32)
    mask = AttentionMask(5, 5, causal=True).materialized()
    context = AttentionContext(mask, LecturePositions(), output_attentions=True)
    assert attention.init(jax.random.key(0), x, context) == {}
    found, _, weights = attention.apply({}, x, context)
    for head in range(3):
        part = x[..., 4 * head : 4 * head + 4]
        expected = models.simple_attention_weights(part, scale=0.5, causal=True)
        np.testing.assert_allclose(weights[:, head], expected, atol=1e-6)
        np.testing.assert_allclose(
            found[..., 4 * head : 4 * head + 4],
            models.simple_attention(part, scale=0.5, causal=True),
            atol=1e-6,
        )


def test_there_are_no_parameters_of_attention(tiny):
    """Neither in the tree of any family, nor with biases asked for."""
    families = ("gpt", {}), ("bert", {}), ("transformer", {"attention_bias": True})
    for family, given in families:
        params = tiny(f"lecture_{family}", attention="simple", **given).params
        paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(params)]
        assert not [path for path in paths if "attention']" in path]
        assert [path for path in paths if "attention_norm']" in path]


@pytest.mark.parametrize("layers", ["scan", "separate"])
def test_pieces_from_the_cache_are_the_full_pass(tiny, assert_close, layers):
    model = tiny("lecture_gpt", attention="simple", layers=layers)
    cache = models.init_cache(model.config, model.execution, 3, 12)
    logits = []
    for start in range(0, 12, 4):
        out = model(input_ids=IDS[:, start : start + 4], cache=cache)
        cache = out.cache
        logits.append(np.asarray(out.logits))
    assert_close(np.concatenate(logits, axis=1), model.logits(input_ids=IDS))


def test_packed_documents_are_those_alone(tiny, assert_close):
    model = tiny("lecture_gpt", attention="simple")
    segments = np.repeat([[1, 2, 3]], 3, axis=0).repeat([5, 3, 4], axis=1)
    packed = model.logits(input_ids=IDS, segment_ids=segments)
    for number in (1, 2, 3):
        where = segments[0] == number
        assert_close(packed[:, where], model.logits(input_ids=IDS[:, where]))


def test_translations_look_up_the_source_without_parameters(tiny, assert_close):
    """From the cache, which holds the encoder's output in parts, as in the full pass."""
    model = tiny("lecture_transformer", attention="simple")
    source = IDS[:, :5]
    full = model.logits(input_ids=source, decoder_input_ids=IDS)
    assert np.abs(model.logits(input_ids=source[::-1], decoder_input_ids=IDS) - full).max() > 1e-3
    cache = models.init_cache(model.config, model.execution, 3, 12)
    first = model(input_ids=source, decoder_input_ids=IDS[:, :6], cache=cache)
    rest = model(decoder_input_ids=IDS[:, 6:], cache=first.cache)
    assert_close(np.concatenate([first.logits, rest.logits], axis=1), full)


def test_sizes_of_their_own_are_refused():
    sizes = {"vocab_size": 8, "max_length": 8, "num_layers": 1, "d_model": 16, "num_heads": 4}
    for cls, given in (
        (models.LectureBertConfig, {"d_v": 8}),
        (models.LectureTransformerConfig, {"d_k": 8}),
    ):
        with pytest.raises(ValueError, match=r'attention "simple" .*d_k and d_v at 4'):
            cls(**sizes, **given, attention="simple")
    with pytest.raises(ValueError, match=r"head_convolution 3 .*projections"):
        models.LectureGPTConfig(**sizes, head_convolution=3, attention="simple")


def test_the_field_is_optional_in_older_configurations():
    config = models.LectureGPTConfig(
        vocab_size=8, max_length=8, num_layers=1, d_model=16, num_heads=4
    )
    fields = config_to_dict(config)
    assert config_from_dict(fields | {"attention": "simple"}).attention == "simple"
    assert config_from_dict({k: v for k, v in fields.items() if k != "attention"}) == config


@pytest.mark.parametrize("family", ["gpt", "bert", "transformer"])
def test_export_is_refused_by_name(tiny, tmp_path, family):
    model = tiny(f"lecture_{family}", attention="simple")
    with pytest.raises(ValueError, match="attention 'simple'"):
        models.save(tmp_path, model.model, model.params)
