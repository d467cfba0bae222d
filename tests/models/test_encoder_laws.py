"""Laws of the models with an encoder: what answers may depend on, and that all ways to them agree.

`test_decoder_laws.py` has those of the decoders.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flaxzoo import models, train
from flaxzoo.models.decoders.gemma.gemma3 import Gemma3Config
from flaxzoo.models.encoder_decoders.bart import BartConfig
from flaxzoo.models.encoder_decoders.t5 import T5Config
from flaxzoo.models.encoders.albert import AlbertConfig
from flaxzoo.models.encoders.bert import BertConfig
from flaxzoo.models.encoders.deberta.deberta import DebertaConfig
from flaxzoo.models.encoders.electra import ElectraConfig
from flaxzoo.models.encoders.gte import GteConfig
from flaxzoo.models.encoders.modernbert import ModernBertConfig
from flaxzoo.models.encoders.mpnet import MPNetConfig
from flaxzoo.models.encoders.nomic_bert import NomicBertConfig
from flaxzoo.models.encoders.roberta_prelayernorm import RobertaPreLayerNormConfig
from flaxzoo.models.encoders.xlm_roberta import XLMRobertaConfig
from flaxzoo.train.distributed import activations, sharding

from ..support.archetypes import cases, padded
from .families.test_transformer import OTHERS

SIZES = {"vocab_size": 32, "max_length": 16, "num_layers": 2, "d_model": 16, "num_heads": 4}
BUCKETS = {"position_buckets": 8, "position_distance": 12}
CONFIGS = {
    "T5": T5Config(**SIZES, **BUCKETS, num_decoder_layers=3, d_head=6, d_ff=24),
    "T5 1.1": T5Config(
        **SIZES, **BUCKETS, d_ff=24, gated=True, tie_output=False, scale_output=False
    ),
    "BART": BartConfig(**SIZES, d_ff=24, decoder_d_ff=20, output_bias=True),
    "mBART": BartConfig(
        **SIZES,
        num_decoder_layers=3,
        decoder_num_heads=2,
        norm_position="pre",
        scale_embedding=True,
    ),
    **{
        f"Transformer, {name}": models.LectureTransformerConfig(**SIZES, **fields)
        for name, fields in OTHERS.items()
    },
    "BERT": BertConfig(**SIZES, head="masked_lm", d_ff=24),
    "ELECTRA": ElectraConfig(**SIZES, d_embedding=8),
    "XLM-R": XLMRobertaConfig(**SIZES),
    "RoBERTa-PreLayerNorm": RobertaPreLayerNormConfig(**SIZES),
    "MPNet": MPNetConfig(**SIZES),
    "EmbeddingGemma": Gemma3Config(
        **SIZES, num_kv_heads=2, window=3, full_layers=(1,), causal=False
    ),
    "ALBERT": AlbertConfig(
        **{**SIZES, "num_layers": 3},
        d_embedding=8,
        num_groups=2,
        inner_layers=2,
        dropout_rate=0.1,
        head="masked_lm",
    ),
    "ModernBERT": ModernBertConfig(
        **{**SIZES, "norm_bias": True, "output_bias": False},
        **{"d_ff": 24, "window": 3, "dropout_rate": 0.1, "activation_dropout_rate": 0.1},
    ),
    "Nomic BERT": NomicBertConfig(**SIZES, d_ff=24),
    "GTE": GteConfig(**SIZES, d_ff=24, dropout_rate=0.1),
    "DeBERTa": DebertaConfig(**SIZES, d_ff=24, key_bias=False, position_distance=5),
    "DeBERTa v2": DebertaConfig(
        **SIZES,
        position_buckets=6,
        share_projections=True,
        norm_distances=True,
        convolution_size=3,
        convolution_groups=2,
    ),
}
# A new family is in every law. A family leaves a law here if it differs from one that remains only
# in what the law does not read.
CACHED = [name for name, config in CONFIGS.items() if config.head == "seq2seq_lm"]
CACHED_AS_ANOTHER = ("T5 1.1", "mBART", *(f"Transformer, {x}" for x in ("pre-norm", "learned")))
"""Kinds whose positions and heads another kind has, too."""
SHARDED_AS_ANOTHER = (
    *("T5 1.1", "mBART"),
    *(f"Transformer, {name}" for name in ("published", "pre-norm", "learned")),
)
"""Kinds whose parameters have the shapes, and whose layers the forms, of another kind."""
DRAW = np.random.default_rng(0)
SOURCE, TARGET = DRAW.integers(1, 32, (8, 12)), DRAW.integers(1, 32, (8, 10))
ENDS = {"input_ids": ((0, 5), (5, 12)), "decoder_input_ids": ((0, 6), (6, 10))}
"""The places of two pairs that share a row."""


@pytest.fixture(scope="module", params=cases(CONFIGS))
def case(request):
    """The model, parameters that all count, its logits, and its inputs."""
    model = models.create(CONFIGS[request.param])
    params = models.init_params(model, jax.random.key(0))
    leaves, tree = jax.tree.flatten(params)
    rng = np.random.default_rng(1)
    params = tree.unflatten([x + rng.normal(0, 0.1, x.shape).astype(np.float32) for x in leaves])
    apply = jax.jit(lambda params, inputs: model.apply({"params": params}, **inputs).logits)
    inputs = {"input_ids": SOURCE}
    if model.config.head == "seq2seq_lm":
        inputs["decoder_input_ids"] = TARGET
    return model, params, lambda **inputs: np.asarray(apply(params, inputs)), inputs


@pytest.mark.slow
def test_padding_and_other_pairs_of_a_row_change_nothing(case, assert_close):
    """On the left, where positions are counted over padding too (BART), it moves the tokens."""
    model, _, logits, inputs = case
    writes = "decoder_input_ids" in inputs
    moved = not getattr(model, "skip_padding", True) and not isinstance(model.config, T5Config)
    (expected, *_) = logits(**inputs)
    first = {name: ids[0] for name, ids in inputs.items()}
    lefts = (0,) if moved or not writes else (0, 3)
    given, segments = {}, {}
    for name, row in first.items():
        ends = ENDS[name]
        rows = [*((row, left) for left in lefts), *((row[start:end], 0) for start, end in ends)]
        mask = name.replace("input_ids", "attention_mask")
        given[name], given[mask] = padded(rows, len(row) + 3)
        halves = np.repeat([[1, 2]], [end - start for start, end in ends], axis=1)
        segments[name.replace("input_ids", "segment_ids")] = halves
    *whole, one, other = logits(**given)
    for left, found in zip(lefts, whole, strict=True):
        assert_close(found[left : left + len(expected)], expected)
    (packed,) = logits(**{name: row[None] for name, row in first.items()}, **segments)
    *_, ends = (ENDS[name] for name in first)
    for (start, end), alone in zip(ends, (one, other), strict=True):
        assert_close(packed[start:end], alone[: end - start])


@pytest.mark.slow
def test_a_target_knows_its_whole_source_and_no_later_token(case, assert_close):
    _, _, logits, inputs = case
    expected = logits(**inputs)
    last = {**inputs, "input_ids": np.where(np.arange(12) == 11, 31 - SOURCE, SOURCE)}
    assert (np.abs(logits(**last) - expected).max(axis=-1) > 1e-4).all()
    if "decoder_input_ids" in inputs:
        later = {**inputs, "decoder_input_ids": np.where(np.arange(10) > 6, 31 - TARGET, TARGET)}
        assert_close(logits(**later)[:, :7], expected[:, :7])


@pytest.mark.slow
@pytest.mark.parametrize("case", cases(CACHED, CACHED_AS_ANOTHER), indirect=True)
def test_cached_calls_equal_a_full_call(case, assert_close):
    """The target is read in three calls; the first projects the source for all of them."""
    model, params, logits, inputs = case
    mask = np.ones((8, 12), np.int32)
    mask[0, 9:] = 0
    decoding, unstacked = models.unstack_layers(model, params)
    cache = models.init_cache(model.config, decoding.execution, 8, 10)
    apply = jax.jit(
        lambda target, cache: decoding.apply(
            {"params": unstacked}, SOURCE, mask, decoder_input_ids=target, cache=cache
        )
    )
    found = []
    for start, end in ((0, 5), (5, 6), (6, 10)):
        output = apply(TARGET[:, start:end], cache)
        cache, found = output.cache, [*found, output.logits]
    assert_close(np.concatenate(found, axis=1), logits(**inputs, attention_mask=mask))


@pytest.mark.slow
@pytest.mark.parametrize("case", cases(CONFIGS, SHARDED_AS_ANOTHER), indirect=True)
def test_devices_and_executions_compute_the_same_gradients(case, assert_close):
    """Eight devices over three axes, layers that are unrolled and computed again; with dropout."""
    model, params, _, inputs = case
    mesh = sharding.make_mesh(train.MeshConfig(data=2, fsdp=2, tensor=2))
    again = models.create(model.config, models.Execution(layers="unroll", remat="dots"))

    def loss_of(apply):
        def loss(params, inputs):
            rng = models.row_keys(jax.random.key(1), 8)
            return jnp.mean(jnp.square(apply({"params": params}, **inputs, rng=rng).logits))

        return jax.jit(jax.grad(loss))

    placed = jax.device_put(params, sharding.parameter_shardings(params, mesh))
    given = {
        name: jax.device_put(ids, sharding.batch_sharding(mesh, ids.shape))
        for name, ids in inputs.items()
    }
    found = loss_of(activations.constrain_activations(again.apply, mesh))(placed, given)
    jax.tree.map(assert_close, found, loss_of(model.apply)(params, inputs))
