"""Every kind of position at every place, in every family: laws, and inputs beyond training.

The combinations are drawn with a seed (`FLAXZOO_POSITIONS=all` runs each of them), and run without
compilation where that is faster.
"""

import functools
import itertools
import os
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flaxzoo import models, train
from flaxzoo.models.decoders.llama import LlamaConfig
from flaxzoo.models.encoders.roberta import RobertaConfig
from flaxzoo.models.init import parameter_shapes
from flaxzoo.models.lectures.attention import LectureAttention
from flaxzoo.models.lectures.positions import LecturePositions, position_vectors
from flaxzoo.models.nn.attention import AttentionContext
from flaxzoo.models.nn.masks import AttentionMask
from flaxzoo.train.distributed import activations, sharding

NOT_ADDED = ("relative", "buckets", "alibi", "rotary", "none")
KINDS = ("learned", "sinusoidal", "counter", "appended_counter", "binary", "table", *NOT_ADDED)
PLACES = ("input", "every_layer", "queries_keys", "projections")
FAMILIES = ("gpt", "bert", "transformer")
COMBINATIONS = [
    combination
    for combination in itertools.product(FAMILIES, KINDS, PLACES)
    if combination[2] == "input" or combination[1] not in (*NOT_ADDED, "appended_counter")
]
LONG = np.random.default_rng(0).integers(0, 29, (2, 16))
IDS = LONG[:, :8]
SLOTS = 16
SOURCE = np.random.default_rng(1).integers(0, 29, (2, 4))
TABLE = tuple(np.random.default_rng(3).normal(0, 0.5, 8 * 16).round(3).tolist())


def drawn(*kinds, families=FAMILIES, seed=0):
    """Draws a place for each kind; the families take turns."""
    among = [c for c in COMBINATIONS if c[0] in families and c[1] in kinds]
    if os.environ.get("FLAXZOO_POSITIONS") == "all":
        return among
    draw, chosen = random.Random(seed), []
    for i, kind in enumerate(kinds):
        family = families[(i + seed) % len(families)]
        chosen.append(draw.choice([c for c in among if c[:2] == (family, kind)]))
    return chosen


class Run:
    """A tiny model with positions of one kind, called without compilation."""

    def __init__(self, tiny, family, kind, place, **fields):
        given = {"position_table": TABLE} if kind == "table" else {}
        distance = {"relative": {"position_distance": 3}, "buckets": {"position_buckets": 8}}
        fields = {"max_length": 8, **given, **distance.get(kind, {}), **fields}
        if family == "bert":
            fields = {"head": "causal_lm", **fields}
        made = tiny(
            family=f"lecture_{family}",
            positions=kind,
            positions_at=place,
            layers="separate",
            **fields,
        )
        self.family, self.made, self.config = family, made, made.config

    def __call__(self, ids, **inputs):
        """Calls the model, with `ids` and what concerns them as the decoder's."""
        if self.family == "transformer":
            inputs = {
                f"decoder_{k}" if k in ("attention_mask", "position_ids") else k: v
                for k, v in inputs.items()
            }
            source = {} if "encoder_outputs" in inputs else {"input_ids": SOURCE}
            inputs = {**source, "decoder_input_ids": ids, **inputs}
        else:
            inputs["input_ids"] = ids
        return self.made.model.apply({"params": self.made.params}, **inputs)

    def logits(self, ids, **inputs):
        return np.asarray(self(ids, **inputs).logits)

    def in_pieces(self, ids, **inputs):
        """Returns the logits of calls with four tokens each, and a cache."""
        cache = models.init_cache(self.config, self.made.execution, len(ids), SLOTS)
        found = []
        for start in range(0, ids.shape[1], 4):
            output = self(ids[:, start : start + 4], cache=cache, **inputs)
            found.append(output.logits)
            cache = output.cache
        return np.concatenate(found, axis=1)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "kind", "place"), drawn(*KINDS))
def test_laws_of_every_combination(tiny, assert_close, family, kind, place):
    """Cached = full, left padding = none, packed = alone; longer inputs where there is no table."""
    run = Run(tiny, family, kind, place)
    full = run.logits(IDS)
    # The first row has three tokens of padding, and the first five of its own.
    padded = np.stack([np.concatenate([[28, 28, 28], IDS[0, :5]]), IDS[1]])
    real = np.array([[0, 0, 0, 1, 1, 1, 1, 1], [1] * 8])
    cached = run.in_pieces(padded, attention_mask=np.pad(real, ((0, 0), (0, SLOTS - 8))))
    for found in (run.logits(padded, attention_mask=real), cached):
        assert_close(found[0, 3:], full[0, :5])
        assert_close(found[1], full[1])

    two = np.stack([np.concatenate([IDS[0, :5], IDS[1, :3]])] * 2)
    given = {"segment_ids": np.array([[1] * 5 + [2] * 3] * 2)}
    if family == "transformer":
        given = {
            "input_ids": np.stack([SOURCE.ravel()] * 2),
            "segment_ids": np.array([[1] * 4 + [2] * 4] * 2),
            "decoder_segment_ids": given["segment_ids"],
        }
    packed = run.logits(two, **given)
    assert_close(packed[0, :5], full[0, :5])
    assert_close(packed[1, 5:], full[1, :3])

    if run.config.longest_input is not None:
        with pytest.raises(ValueError, match=r"16 .*max_length 8"):
            run.logits(LONG)
        with pytest.raises(ValueError, match=f"max_length 16 .* 8 rows .* .{kind}"):
            run.config.with_max_length(16)
        return
    long = run.logits(LONG)
    assert np.isfinite(long).all()
    assert_close(long[:, :8], full)
    assert_close(run.in_pieces(LONG), long)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "kind", "place"),
    drawn("learned", "rotary", "relative", "buckets"),
)
def test_eight_devices_compute_what_one_does(tiny, assert_close, family, kind, place):
    """Loss and gradients, with all parameters sharded; layers scanned as in training."""
    fields = {"head": "masked_lm"} if family == "bert" else {}
    sizes = {"d_model": 32, "num_heads": 4, "vocab_size": 32}
    made = tiny(family=f"lecture_{family}", positions=kind, positions_at=place, **sizes, **fields)
    ids = np.random.default_rng(0).integers(0, 32, (8, 8))
    batch = {"input_ids": ids, "attention_mask": (np.arange(8) < 6 + ids[:, :1] % 3).astype(int)}
    if family == "transformer":
        batch["decoder_input_ids"] = ids[:, ::-1].copy()

    def loss_of(apply):
        def loss(params, batch):
            return jnp.mean(jnp.square(apply({"params": params}, **batch).logits))

        return jax.jit(jax.value_and_grad(loss))

    mesh = sharding.make_mesh(train.MeshConfig(data=2, fsdp=2, tensor=2))
    shardings = sharding.parameter_shardings(made.params, mesh, made.config)
    placed = jax.device_put(made.params, shardings)
    spread = {
        k: jax.device_put(x, sharding.batch_sharding(mesh, x.shape)) for k, x in batch.items()
    }
    apply = activations.constrain_activations(made.model.apply, mesh)
    jax.tree.map(
        assert_close, loss_of(apply)(placed, spread), loss_of(made.model.apply)(made.params, batch)
    )


@functools.cache
def hidden_of(tiny, family, kind, place, **fields):
    """Returns a function from token ids to the outputs of a stack that sees later tokens too."""
    if family == "bert":
        run = Run(tiny, "bert", kind, place, head="none", **fields)
        return lambda ids, **inputs: np.asarray(run(ids, **inputs).last_hidden_state)
    run = Run(tiny, "transformer", kind, place, **fields)

    def encoded(ids, **inputs):
        variables = {"params": run.made.params}
        decoder = np.zeros((len(ids), 1), np.int32)
        output = run.made.model.apply(variables, ids, decoder_input_ids=decoder, **inputs)
        return np.asarray(output.encoder_last_hidden_state)

    return encoded


MAN = np.array([[3, 7, 5, 3, 9]])  # the man ate the fish
FISH = MAN[:, [0, 4, 2, 3, 1]]  # the fish ate the man


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "kind", "place"),
    [*drawn(*KINDS, families=("bert",)), ("transformer", "none", "input")],
)
def test_order_is_seen_unless_there_are_no_positions(tiny, assert_close, family, kind, place):
    """f(Px) = P f(x) on the two sentences of lecture 002, and any kind of position breaks it."""
    encode = hidden_of(tiny, family, kind, place)
    moved, expected = encode(FISH), encode(MAN)[:, [0, 4, 2, 3, 1]]
    if kind == "none":
        assert_close(moved, expected)
    else:
        assert np.abs(moved - expected).max() > 1e-3
    shifted = encode(MAN, position_ids=np.arange(5)[None] + 3)
    if kind in NOT_ADDED:  # only distances count, or nothing
        assert_close(shifted, encode(MAN))
    else:
        assert np.abs(shifted - encode(MAN)).max() > 1e-3


@pytest.mark.parametrize("kind", ["learned", "sinusoidal", "table"])
def test_positions_at_the_input_are_added_to_the_embeddings(tiny, assert_close, kind):
    """The first "the" gets the vector of its position, the second "the" another one."""
    run, plain = (Run(tiny, "gpt", name, "input") for name in (kind, "none"))
    params = dict(run.made.params)
    learned = params.pop("position_embedding", {"embedding": None})["embedding"]
    positions = learned if kind == "learned" else position_vectors(run.config, 8)
    vectors = params["token_embedding"]["embedding"][MAN] + jnp.asarray(positions)[:5]
    assert np.abs(vectors[0, 0] - vectors[0, 3]).max() > 1e-3
    expected = models.apply_to_vectors(plain.made.model, params, vectors)
    assert_close(run.logits(MAN), expected.logits)


@pytest.mark.parametrize(("family", "kind"), [("gpt", "learned"), ("bert", "counter")])
def test_one_layer_with_positions_at_every_layer_is_input_only(tiny, assert_close, family, kind):
    one, every = (
        Run(tiny, family, kind, place, num_layers=1).logits(IDS)
        for place in ("input", "every_layer")
    )
    assert_close(one, every)
    once, twice = (Run(tiny, family, kind, place).logits(IDS) for place in ("input", "every_layer"))
    assert np.abs(once - twice).max() > 1e-3


@pytest.mark.parametrize("place", PLACES)
def test_values_and_residual_stream_contain_no_positions_of_queries_and_keys(tiny, place):
    """Without the maps of queries and keys only positions elsewhere can be seen."""
    run = Run(tiny, "bert", "sinusoidal", place, head="none")
    for layer in ("layers_0", "layers_1"):
        for part in ("query", "key"):
            maps = run.made.params[layer]["attention"][part]
            run.made.params[layer]["attention"][part] = jax.tree.map(jnp.zeros_like, maps)
    order = [0, 4, 2, 3, 1]
    output = np.asarray(run(MAN).last_hidden_state)[:, order]
    difference = np.abs(np.asarray(run(MAN[:, order]).last_hidden_state) - output).max()
    assert (difference < 1e-5) == (place == "queries_keys")


def attend(x, positions, kernels, **fields):
    """One head of attention with the given maps; the output map changes nothing."""
    config = models.LectureGPTConfig(
        vocab_size=2,
        max_length=8,
        num_layers=1,
        d_model=4,
        num_heads=1,
        use_bias=False,
        scale_scores=False,
        **fields,
    )
    attention = LectureAttention(config, models.Execution(), None)
    params = {name: {"kernel": kernels[name][:, None]} for name in ("query", "key", "value")}
    params["output"] = {"kernel": jnp.eye(4)[None]}
    params |= {k: {"embedding": v} for k, v in kernels.items() if k.startswith("relative")}
    mask = AttentionMask(x.shape[1], x.shape[1]).materialized()
    x = jnp.asarray(x)
    return attention.apply({"params": params}, x, AttentionContext(mask, positions))[0]


def softmax(x):
    return np.exp(x) / np.exp(x).sum(-1, keepdims=True)


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_positions_at_projections_are_the_printed_formula():
    """Lecture 002: Sa[X] = (V + Π) · Softmax[(K + Π)ᵀ(Q + Π)], tokens in columns."""
    X, P = normal(0, 4, 5), normal(1, 4, 5)
    kernels = {name: normal(i, 4, 4) for i, name in enumerate(("query", "key", "value"))}
    Q, K, V = (kernels[name].T @ X for name in ("query", "key", "value"))
    expected = (V + P) @ softmax(((K + P).T @ (Q + P)).T).T
    positions = LecturePositions(vectors=jnp.asarray(P.T[None]), place="projections")
    np.testing.assert_allclose(attend(X.T[None], positions, kernels)[0].T, expected, rtol=1e-4)


def test_given_and_counting_tables():
    config = models.LectureGPTConfig(
        vocab_size=2,
        max_length=3,
        num_layers=1,
        d_model=4,
        num_heads=1,
        positions="table",
        position_table=tuple(normal(0, 12).tolist()),
    )
    np.testing.assert_array_equal(position_vectors(config, 3), normal(0, 12).reshape(3, 4))
    again = models.config_from_dict(models.config_to_dict(config))
    assert (again, hash(again)) == (config, hash(config))
    counter = models.LectureGPTConfig(**TINY_SIZES, positions="counter")
    assert position_vectors(counter, 1000)[:, -1].tolist() == list(range(1, 1001))
    appended = models.LectureGPTConfig(**TINY_SIZES, positions="appended_counter")
    table = position_vectors(appended, 5)
    embedded = LecturePositions(vectors=jnp.asarray(table[None]), appended=True).at_input(
        jnp.full((1, 5, 4), 7.0)
    )
    assert embedded[0, :, :3].tolist() == [[7.0] * 3] * 5
    assert embedded[0, :, 3].tolist() == [1, 2, 3, 4, 5]
    binary = models.LectureGPTConfig(**TINY_SIZES, positions="binary")
    assert position_vectors(binary, 6)[5].tolist() == [0, 1, 0, 1]


TINY_SIZES = {"vocab_size": 2, "max_length": 16, "num_layers": 1, "d_model": 4, "num_heads": 2}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"positions": "relative", "positions_at": "every_layer"},
            "'every_layer' .*additive positions, got 'relative'",
        ),
        ({"positions": "rotary", "num_heads": 4}, "size 1 .*rotated"),
        ({"position_buckets": 3}, "position_buckets must .*3"),
        ({"position_buckets": 8}, "position_buckets 8 .*positions buckets"),
        ({"position_distance": 4}, "position_distance 4 .*relative .*buckets"),
        ({"positions": "relative", "position_layout": "halves"}, "positions sinusoidal"),
        ({"positions": "relative", "position_distance": 0}, "position_distance must .*0"),
        ({"positions": "buckets", "position_distance": 16}, "position_distance must .*16"),
        ({"positions": "binary", "max_length": 17}, "max_length 17 .* 4 binary digits"),
        ({"positions": "table"}, "position_table has"),
        (
            {"positions": "appended_counter", "positions_at": "every_layer"},
            "'every_layer' .*'appended_counter'",
        ),
        ({"position_table": (1.0,)}, "position_table has"),
        (
            {"positions": "table", "position_table": (1.0, 2.0)},
            "position_table .*2 numbers.* 64",
        ),
        ({"position_base": -1.0}, "position_base must .*-1.0"),
    ],
)
def test_refused_options(fields, message):
    with pytest.raises(ValueError, match=message):
        models.LectureGPTConfig(**{**TINY_SIZES, **fields})


@pytest.mark.parametrize(
    ("name", "value", "similar"),
    [
        ("positions", "sinusoid", "sinusoidal"),
        ("attention", "simpel", "simple"),
        ("activation", "gelo", "gelu"),
        ("position_layout", "halfs", "halves"),
    ],
)
def test_kinds_that_do_not_exist(name, value, similar):
    config = models.LectureGPTConfig(
        **TINY_SIZES
    )  # as from a file: the tests check types of arguments
    object.__setattr__(config, name, value)
    with pytest.raises(ValueError, match=f"{name} must .*{similar}.*'{value}'"):
        config.__post_init__()


def test_options_that_a_family_does_not_have():
    with pytest.raises(ValueError, match=r"position_offset 2 .*'sinusoidal'"):
        RobertaConfig(**TINY_SIZES, positions="sinusoidal")
    with pytest.raises(ValueError, match=r"'projections' .*4 dimensions .*size 1"):
        models.LectureTransformerConfig(**TINY_SIZES, positions_at="projections", d_k=1)
    with pytest.raises(ValueError, match=r"positions 'learned'"):
        LlamaConfig(**TINY_SIZES, positions="learned")
    with pytest.raises(ValueError, match=r"position_base 7.0 .*rope_base"):
        LlamaConfig(**TINY_SIZES, position_base=7.0)


@pytest.mark.parametrize("kind", ["none", "relative", "buckets", "rotary", "sinusoidal"])
def test_no_parameter_grows_with_the_longest_input(kind):
    """The number of parameters does not depend on the length of inputs (lecture 002)."""
    short, long = (
        parameter_shapes(models.create(models.LectureGPTConfig(**{**TINY_SIZES, **fields})))
        for fields in (
            {"positions": kind, "max_length": 8},
            {"positions": kind, "max_length": 8000},
        )
    )
    assert short == long


@pytest.mark.slow
def test_generation_goes_on_beyond_the_trained_length(tiny):
    """A longer model with the same parameters chooses what its full pass prefers."""
    made = tiny("lecture_gpt", positions="relative", position_distance=3)
    model = models.create(made.config.with_max_length(40))
    ids = np.concatenate([LONG[:1], LONG[:1, :2]], axis=1)
    tokens = models.generate(model, made.params, ids, max_new_tokens=6, do_sample=False)
    assert tokens.shape == (1, 24)
    best = np.asarray(model.apply({"params": made.params}, tokens).logits).argmax(-1)
    np.testing.assert_array_equal(np.asarray(tokens)[:, 18:], best[:, 17:-1])
