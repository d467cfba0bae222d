"""What must hold of every encoder, whatever its weights and its head."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flaxzoo import models
from flaxzoo.models import Generator, registry
from flaxzoo.models.encoders.bert import BERT
from flaxzoo.models.encoders.encoder import POOLERS, PostNormLayer
from flaxzoo.models.nn.attention import MultiHeadAttention
from flaxzoo.models.nn.dropout import dropout
from flaxzoo.models.nn.pooling import mean_pool, pool

RNG = np.random.default_rng(0)
IDS = RNG.integers(0, 29, (3, 12))
TYPES = np.sort(RNG.integers(0, 2, (3, 12)))
LABELS = ("red", "green", "blue")
# Heads with an output per row, and per token.
ROWS = ("none", "pretraining", "next_sentence", "sequence_classification")
TOKENS = ("masked_lm", "token_classification", "question_answering")
FAMILIES = [name for name, room in registry.FAMILIES.items() if room.startswith("encoders")]


@pytest.fixture(scope="session")
def bert(tiny):
    """`bert(head, **fields)`: a tiny encoder."""
    return lambda head, family="bert", **fields: tiny(family, head=head, labels=LABELS, **fields)


def answers(output):
    """What a head says, as arrays with rows in front."""
    names = ("logits", "prediction_logits", "seq_relationship_logits", "start_logits",
             "end_logits", "pooler_output", "last_hidden_state")  # fmt: skip
    found = {name: getattr(output, name, None) for name in names}
    return {name: np.asarray(x) for name, x in found.items() if x is not None}


def padded(lengths, side, width=12):
    """Rows of these lengths, their padding full of tokens that would matter if seen."""
    ids, types, mask = np.full((3, width), 28), np.ones((3, width), int), np.zeros((3, width), int)
    positions = np.full((3, width), 15)
    for row, n in enumerate(lengths):
        selected = slice(width - n, width) if side == "left" else slice(n)
        ids[row, selected], types[row, selected], mask[row, selected] = (
            IDS[row, :n],
            TYPES[row, :n],
            1,
        )
        positions[row, selected] = np.arange(n)
    given = {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}
    return {**given, "position_ids": positions} if side == "left" else given


@pytest.mark.slow
@pytest.mark.parametrize("head", [*ROWS, *TOKENS])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_and_companions_change_nothing(bert, assert_close, head, side):
    model, lengths = bert(head), (12, 7, 2)
    given = padded(lengths, side)
    together = answers(model(**given))
    for row, n in enumerate(lengths):
        selected = given["attention_mask"][row] == 1
        alone = answers(
            model(input_ids=IDS[row : row + 1, :n], token_type_ids=TYPES[row : row + 1, :n])
        )
        assert alone.keys() == together.keys()
        for name, expected in alone.items():
            found = together[name][row]
            if expected.ndim > 1 and expected.shape[1] == n and found.shape[0] == 12:
                found = found[selected]
            elif side == "left" and head in ROWS:
                continue  # the first token stands elsewhere: what it pools is padding
            assert_close(found, expected[0])
        assert all(np.isfinite(x).all() for x in together.values())


@pytest.mark.parametrize("head", [*ROWS, *TOKENS])
def test_a_row_of_nothing_but_padding_is_finite(bert, head):
    nothing = np.zeros((2, 5), int)
    output = bert(head)(input_ids=nothing, attention_mask=nothing, token_type_ids=nothing)
    assert all(np.isfinite(x).all() for x in answers(output).values())


def test_every_token_sees_both_sides(bert):
    model = bert("masked_lm")
    for changed in (0, 6, 11):
        other = IDS.copy()
        other[:, changed] = (other[:, changed] + 1) % 29
        difference = np.abs(model.logits(input_ids=other) - model.logits(input_ids=IDS))
        assert (difference.max((0, 2)) > 1e-3).all()


class Backwards(MultiHeadAttention):
    """Attention whose terms hide later tokens."""

    def score_terms(self, query, keys, context):
        index = jnp.arange(query.shape[1])
        return jnp.where(index > index[:, None], -1e30, 0.0)[None, None]


class BackwardsLayer(PostNormLayer):
    attention = Backwards


class BackwardsBERT(BERT):
    layer = BackwardsLayer


def test_a_family_may_add_terms_to_the_scores(bert, assert_close):
    model = bert("masked_lm")
    found = BackwardsBERT(model.config).apply({"params": model.params}, input_ids=IDS)
    earlier = np.broadcast_to(np.tri(12, dtype=bool), (3, 12, 12))
    assert_close(found.logits, model.logits(input_ids=IDS, attention_mask=earlier))
    assert np.abs(found.logits - model.logits(input_ids=IDS)).max() > 0.1


def test_token_types_matter_and_default_to_0(bert, assert_close):
    model = bert("masked_lm")
    plain = model.logits(input_ids=IDS)
    assert_close(model.logits(input_ids=IDS, token_type_ids=0 * TYPES), plain)
    assert np.abs(model.logits(input_ids=IDS, token_type_ids=TYPES) - plain).max() > 0.1


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_count_from_0_in_every_row(bert, assert_close, family):
    model = bert("masked_lm", family)
    plain = model.logits(input_ids=IDS)
    assert_close(model.logits(input_ids=IDS, position_ids=np.arange(12)[None].repeat(3, 0)), plain)
    # The last one that there is, the first beyond it, and the one before the first.
    shifted = np.arange(12)[None] + np.array([[4], [5], [-1]])
    logits = model.logits(input_ids=IDS, position_ids=shifted)
    assert np.isfinite(logits[0]).all()
    # Only a table of positions ends.
    ends = model.config.positions == "learned"
    assert np.isnan(logits[1:]).any((1, 2)).all() == ends


@pytest.mark.slow
@pytest.mark.parametrize("head", ["none", *TOKENS])
def test_packed_sequences_are_their_texts_one_by_one(bert, assert_close, head):
    model, cuts = bert(head), ((7, 4, 1), (12,), (1, 7))
    segments = np.zeros((3, 12), int)
    for row, lengths in enumerate(cuts):
        segments[row, : sum(lengths)] = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    packed = answers(model(input_ids=IDS, token_type_ids=TYPES, segment_ids=segments))
    packed.pop("pooler_output", None)
    for row, lengths in enumerate(cuts):
        for number in range(1, len(lengths) + 1):
            selected = segments[row] == number
            alone = answers(
                model(input_ids=IDS[row, selected][None], token_type_ids=TYPES[row, selected][None])
            )
            for name, found in packed.items():
                assert_close(found[row, selected], alone[name][0])


@pytest.mark.parametrize("head", ["pretraining", "masked_lm"])
def test_masked_positions_are_the_same_as_all(bert, assert_close, head):
    model = bert(head)
    positions = np.array([[3, 0, 11], [5, 5, 0], [10, 0, 0]])
    given = {"input_ids": IDS, "token_type_ids": TYPES}
    every, gathered = answers(model(**given)), answers(model(**given, masked_positions=positions))
    name = "logits" if head == "masked_lm" else "prediction_logits"
    assert gathered[name].shape == (3, 3, 29)
    assert_close(gathered[name], np.take_along_axis(every[name], positions[..., None], axis=1))
    assert_close(gathered["last_hidden_state"], every["last_hidden_state"])


@pytest.mark.slow
def test_choices_are_scored_one_by_one(bert, assert_close):
    choice, one = bert("multiple_choice"), bert("sequence_classification")
    ids, mask = RNG.integers(0, 29, (2, 3, 8)), np.ones((2, 3, 8), int)
    mask[0, 1, 5:] = mask[1, 2, 3:] = 0
    types = RNG.integers(0, 2, (2, 3, 8))
    output = choice(input_ids=ids, attention_mask=mask, token_type_ids=types)
    assert output.logits.shape == (2, 3)
    # The same body under another head.
    classifier = choice.params["head"]["classifier"]
    body = {name: tree for name, tree in choice.params.items() if name != "head"}
    wide = jax.tree.map(lambda x: jnp.repeat(x, 3, axis=-1), classifier)
    for b in range(2):
        rows = {"input_ids": ids[b], "attention_mask": mask[b], "token_type_ids": types[b]}
        alone = one.apply({**body, "head": {"classifier": wide}}, **rows)
        assert_close(output.logits[b], alone.logits[:, 0])
        assert_close(output.pooler_output[3 * b : 3 * b + 3], alone.pooler_output)


@pytest.mark.slow
def test_choices_drop_each_their_own(bert, assert_close):
    model = bert("multiple_choice", dropout_rate=0.5)
    ids = np.repeat(IDS[:, None], 2, axis=1)
    logits = model.logits(input_ids=ids, rng=models.row_keys(jax.random.key(0), 3))
    assert np.abs(logits[:, 0] - logits[:, 1]).max() > 0.01
    part = model.logits(input_ids=ids[1:], rng=models.row_keys(jax.random.key(0), 2, 1))
    assert_close(part, logits[1:])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head", "layers", "remat"),  # a head sees what the layers give, however they are run
    [
        ("pretraining", "scan", "dots"),
        ("pretraining", "unroll", "none"),
        ("pretraining", "separate", "none"),
        ("question_answering", "separate", "none"),
    ],
)
def test_all_ways_to_run_the_layers_answer_the_same(bert, assert_close, head, layers, remat):
    given = {**padded((12, 7, 2), "right"), "rng": models.row_keys(jax.random.key(0), 3)}
    usual = answers(bert(head, dropout_rate=0.2)(**given))
    other = answers(bert(head, dropout_rate=0.2, layers=layers, remat=remat)(**given))
    for name, expected in usual.items():
        assert_close(other[name], expected)


@pytest.mark.slow
def test_dropout_only_with_a_key(bert, assert_close):
    model = bert("sequence_classification", dropout_rate=0.3)
    plain = model.logits(input_ids=IDS)
    assert_close(plain, bert("sequence_classification").logits(input_ids=IDS))
    dropped = model.logits(input_ids=IDS, rng=models.row_keys(jax.random.key(0), 3))
    assert np.abs(dropped - plain).max() > 0.1


@pytest.mark.parametrize("family", ["roberta", "electra"])
def test_a_classifier_drops_before_and_after_its_pooler(bert, assert_close, family):
    model = bert("sequence_classification", family, classifier_dropout=0.5)
    config, params, rng = model.config, model.params, models.row_keys(jax.random.key(0), 3)
    body = dataclasses.replace(config, head="none", labels=(), classifier_dropout=None)
    hidden = models.create(body).apply({"params": params}, input_ids=IDS).last_hidden_state

    def affine(x, parameters):
        return x @ parameters["kernel"] + parameters["bias"]

    x = affine(dropout(hidden[:, 0], 0.5, rng, "pooler"), params["pooler"])
    x = dropout(POOLERS[config.pooler_activation](x), 0.5, rng, "classifier")
    found = model.logits(input_ids=IDS, rng=rng)
    assert_close(found, affine(x, params["head"]["classifier"]))


def test_attention_weights(bert, assert_close):
    given = padded((12, 7, 2), "right")
    weights = np.stack(bert("token_classification")(**given, output_attentions=True).attentions)
    assert weights.shape == (2, 3, 4, 12, 12)
    assert_close(weights.sum(-1), 1)
    for row, n in enumerate((12, 7, 2)):
        assert (weights[:, row, :, :, n:] == 0).all()
        assert (weights[:, row, :, :, :n] > 0).all()
    assert bert("token_classification")(**given).attentions is None


def test_scores_are_float32_in_any_precision(bert):
    for head, name in (
        ("sequence_classification", "logits"),
        ("question_answering", "end_logits"),
        ("masked_lm", "logits"),
    ):
        output = bert(head, dtype="bfloat16")(input_ids=IDS)
        assert output.last_hidden_state.dtype == jnp.bfloat16
        assert getattr(output, name).dtype == jnp.float32


def test_logits_are_tied_to_the_embeddings_and_have_a_bias(bert, assert_close):
    model = bert("masked_lm")
    output = model(input_ids=IDS)
    table, bias = model.params["token_embedding"]["embedding"], model.params["head"]["bias"]
    assert_close(output.logits, np.einsum("BTD,VD->BTV", output.projection.hidden, table) + bias)


def test_the_gradient_of_a_maximum_goes_to_the_first_token_that_has_it(assert_close):
    hidden = jnp.array([[[1.0, 2.0], [3.0, 2.0], [9.0, 9.0]]])
    mask, scale = np.array([[1, 1, 0]]), jnp.array([5.0, 7.0])
    gradient = jax.grad(lambda x: jnp.sum(pool(x, mask, ("max",)) * scale))(hidden)
    assert_close(pool(hidden, mask, ("max",)), [[3, 2]])
    assert_close(gradient, [[[0, 7], [5, 0], [0, 0]]])


def test_mean_pool(assert_close):
    hidden = jnp.array([[[1.0, 2.0], [3.0, 6.0], [100.0, 100.0]], [[7.0, 7.0]] * 3])
    pooled = mean_pool(hidden, np.array([[1, 1, 0], [0, 0, 0]]))
    assert_close(pooled, [[2, 4], [0, 0]])


# The causal head: the same body, seeing backwards only.


def test_the_causal_head_sees_nothing_ahead(bert, assert_close):
    model = bert("causal_lm")
    other = IDS.copy()
    other[:, 5] = (other[:, 5] + 1) % 29
    before, after = model.logits(input_ids=IDS), model.logits(input_ids=other)
    assert_close(after[:, :5], before[:, :5], 1e-6)
    assert np.abs(after[:, 5] - before[:, 5]).max() > 0.1


@pytest.mark.slow
def test_a_generator_takes_the_causal_head(bert):
    model = bert("causal_lm")
    prompts = [[3, 1, 4], [1, 5, 9, 2, 6]]
    request = models.GenerationRequest(max_new_tokens=6)
    stream = Generator(model.model, model.params).stream(prompts, request)
    new = np.concatenate(list(stream), axis=1).tolist()
    for prompt, row in zip(prompts, new, strict=True):
        context = list(prompt)
        for token in row:
            ids = np.zeros((1, 16), int)
            ids[0, : len(context)] = context
            assert token == model.logits(input_ids=ids)[0, len(context) - 1].argmax()
            context.append(token)
    assert len({token for row in new for token in row}) > 1
    generated = models.generate(model.model, model.params, prompts, max_new_tokens=6)
    assert generated[:, 5:].tolist() == new


# Bad input.


@pytest.mark.parametrize(
    ("head", "given", "message"),
    [
        ("token_classification", {"input_ids": np.zeros((1, 17), int)}, "17 tokens"),
        ("token_classification", {"attention_mask": IDS[:, :5]}, "attention_mask .*5 columns"),
        ("token_classification", {"token_type_ids": TYPES + 1}, "token_type_ids .* 2: "),
        ("token_classification", {"token_type_ids": TYPES - 1}, "token_type_ids .*-1"),
        ("token_classification", {"masked_positions": IDS[:, :2]}, "'token_classification'"),
        (
            "sequence_classification",
            {"segment_ids": TYPES},
            "'sequence_classification' .*one text.* segment_ids",
        ),
        ("multiple_choice", {}, r"head 'multiple_choice' .*\[B, C, T\]"),
        ("question_answering", {"input_ids": IDS[:, None]}, "'question_answering' takes"),
        ("masked_lm", {"cache": True}, "head 'masked_lm' .*cache: "),
        ("causal_lm", {"cache": True, "segment_ids": TYPES}, "cache .*packed"),
    ],
)
def test_bad_input(bert, head, given, message):
    model = bert(head)
    if given.get("cache"):
        given = {**given, "cache": models.init_cache(model.config, model.execution, 3, 12)}
    with pytest.raises(ValueError, match=message):
        model.model.apply({"params": model.params}, **{"input_ids": IDS, **given})


def test_token_types_of_a_model_without(bert):
    model = bert("token_classification", "distilbert")
    assert "token_type_embedding" not in model.params
    with pytest.raises(ValueError, match="token_type_ids"):
        model(input_ids=IDS, token_type_ids=TYPES)


@pytest.mark.parametrize("bad", [2, -1])
def test_a_compiled_token_type_outside_the_table_gives_nan(bert, bad):
    types = TYPES.copy()
    types[1, 6] = bad
    logits = bert("token_classification").logits(input_ids=IDS, token_type_ids=jnp.asarray(types))
    assert np.isnan(logits[1]).all()
    assert np.isfinite(logits[[0, 2]]).all()


def test_parameters_by_head(bert):
    """A head's own parameters stand below `head`; the pooler only where the head looks at it."""
    shared = {"token_embedding", "position_embedding", "token_type_embedding", "embedding_norm"}
    pooled = {"none", "pretraining", "next_sentence", "sequence_classification", "multiple_choice"}
    own = {
        "none": set(),
        "pretraining": {"transform", "transform_norm", "bias", "next_sentence"},
        "masked_lm": {"transform", "transform_norm", "bias"},
        "causal_lm": {"transform", "transform_norm", "bias"},
        "next_sentence": {"next_sentence"},
        "sequence_classification": {"classifier"},
        "token_classification": {"classifier"},
        "multiple_choice": {"classifier"},
        "question_answering": {"span"},
    }
    config = bert("none").config
    for head, names in own.items():
        model = models.create(dataclasses.replace(config, head=head))
        params = jax.eval_shape(lambda m=model: models.init_params(m, jax.random.key(0)))
        assert set(params.get("head", ())) == names
        body = shared | {"layers"} | ({"pooler"} if head in pooled else set())
        assert params.keys() - {"head"} == body
