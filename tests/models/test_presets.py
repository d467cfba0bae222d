"""Every published size, through shapes alone: nothing is allocated."""

import dataclasses
import functools
import re

import jax
import pytest
from flaxzoo import models
from flaxzoo.models import registry
from flaxzoo.models.init import parameter_shapes
from flaxzoo.models.registry import FAMILIES, families

# (V, P, L, D, N) from section 4.1 (GPT), table 2 (GPT-2) and table 2.1 (GPT-3) of the papers.
SIZES = {
    "gpt": (40478, 512, 12, 768, 12),
    "gpt2": (50257, 1024, 12, 768, 12),
    "gpt2-medium": (50257, 1024, 24, 1024, 16),
    "gpt2-large": (50257, 1024, 36, 1280, 20),
    "gpt2-xl": (50257, 1024, 48, 1600, 25),
    "gpt3-small": (50257, 2048, 12, 768, 12),
    "gpt3-medium": (50257, 2048, 24, 1024, 16),
    "gpt3-large": (50257, 2048, 24, 1536, 16),
    "gpt3-xl": (50257, 2048, 24, 2048, 16),  # table: 24 heads of 128
    "gpt3-2.7b": (50257, 2048, 32, 2560, 32),
    "gpt3-6.7b": (50257, 2048, 32, 4096, 32),
    "gpt3-13b": (50257, 2048, 40, 5120, 40),  # table: width 5,140
    "gpt3-175b": (50257, 2048, 96, 12288, 96),
}


# (V, P, L, D, N, token types) from section 3 of Devlin et al. 2019, table 1 of Turc et al. 2019,
# section 3.1 and the released dictionary of Liu et al. 2019, section 3 of Sanh et al. 2019.
ENCODERS = {
    "bert-tiny": (30522, 512, 2, 128, 2, 2),
    "bert-mini": (30522, 512, 4, 256, 4, 2),
    "bert-small": (30522, 512, 4, 512, 8, 2),
    "bert-medium": (30522, 512, 8, 512, 8, 2),
    "bert-base": (30522, 512, 12, 768, 12, 2),
    "bert-large": (30522, 512, 24, 1024, 16, 2),
    "roberta-base": (50265, 514, 12, 768, 12, 1),
    "roberta-large": (50265, 514, 24, 1024, 16, 1),
    "distilbert-base": (30522, 512, 6, 768, 12, 0),
}


# (L, D, N, width of the embeddings) of table 6 of Clark et al. 2020, and the numbers of parameters
# of transformers' ElectraModel and ElectraForPreTraining.
ELECTRA = {
    "electra-small": (12, 256, 4, 128, 13_483_008, 13_549_057),
    "electra-base": (12, 768, 12, 768, 108_891_648, 109_483_009),
    "electra-large": (24, 1024, 16, 1024, 334_092_288, 335_142_913),
}


# (L, D, N) of encoders, and the numbers of parameters of transformers' models, without a head and
# with the head of the preset; 0 for models that are published without a head.
COPIES = {
    "multilingual-e5-small": (12, 384, 12, 117_653_760, 0),
    "xlm-roberta-base": (12, 768, 12, 278_043_648, 278_295_186),
    "xlm-roberta-large": (24, 1024, 16, 559_890_432, 560_142_482),
    "multilingual-e5-base": (12, 768, 12, 278_043_648, 0),
    "multilingual-e5-large": (24, 1024, 16, 559_890_432, 0),
    "bge-m3": (24, 1024, 16, 567_754_752, 0),
    "roberta-prelayernorm-large": (24, 1024, 16, 355_361_792, 355_414_105),
    "mpnet-base": (12, 768, 12, 109_486_464, 109_518_527),
    "all-mpnet-base-v2": (12, 768, 12, 109_486_464, 0),
    "camembert-base": (12, 768, 12, 110_621_952, 110_655_493),
    "camembert-large": (24, 1024, 16, 336_661_504, 336_695_557),
    "modernbert-base": (22, 768, 12, 149_014_272, 149_655_232),
    "modernbert-large": (28, 1024, 16, 394_781_696, 395_881_664),
    "albert-base": (12, 768, 12, 11_683_584, 11_813_810),
    "albert-large": (24, 1024, 16, 17_683_968, 17_847_474),
    "albert-xlarge": (24, 2048, 16, 58_724_864, 59_021_490),
    "albert-xxlarge": (12, 4096, 64, 222_595_584, 223_158_450),
    "nomic-bert-2048": (12, 768, 12, 136_731_648, 137_354_304),
    "nomic-embed-text-v1.5": (12, 768, 12, 136_731_648, 0),
    "gte-multilingual-base": (12, 768, 12, 305_368_320, 0),
}


# Numbers of parameters of the published files.
DECODERS = {
    "embeddinggemma-300m": 302_863_104,
    "qwen3-embedding-0.6b": 595_776_512,
    "qwen3-embedding-4b": 4_021_774_336,
    "qwen3-embedding-8b": 7_567_295_488,
    "qwen3-reranker-0.6b": 595_776_512,
    "qwen3-reranker-4b": 4_021_784_576,
    "qwen3-reranker-8b": 8_188_548_096,
    "falcon-7b": 6_921_720_704,
    "falcon-40b": 41_303_293_952,
    "falcon-rw-1b": 1_311_625_216,
    "olmo2-1b": 1_484_916_736,
    "olmo2-7b": 7_298_617_344,
    "olmo2-13b": 13_716_198_400,
    "olmo2-32b": 32_234_279_936,
    "olmo3-7b": 7_298_011_136,
    "olmo3-32b": 32_233_522_176,
    "phi4-mini": 3_836_021_760,
    "smollm3-3b": 3_075_098_624,
    "granite3.0-2b": 2_533_531_648,
    "granite3.0-8b": 8_170_848_256,
    "granite3.3-2b": 2_533_539_840,
    "granite3.3-8b": 8_170_864_640,
    "stablelm2-1.6b": 1_644_515_328,
    "stablelm2-12b": 12_143_185_920,
    "stablelm-3b": 2_795_443_200,
}


# (V, L, D, N), and the number of parameters of transformers' DebertaModel and DebertaV2Model.
DEBERTA = {
    "deberta-base": (50265, 12, 768, 12, 138_601_728),
    "deberta-large": (50265, 24, 1024, 16, 405_163_008),
    "deberta-v2-xlarge": (128100, 24, 1536, 24, 884_593_152),
    "deberta-v2-xxlarge": (128100, 48, 1536, 24, 1_564_549_632),
    "deberta-v3-xsmall": (128100, 12, 384, 6, 70_682_112),
    "deberta-v3-small": (128100, 6, 768, 12, 141_304_320),
    "deberta-v3-base": (128100, 12, 768, 12, 183_831_552),
    "deberta-v3-large": (128100, 24, 1024, 16, 434_012_160),
    "mdeberta-v3-base": (251000, 12, 768, 12, 278_218_752),
}


# (V, L, D, N, F) of section 5.1 and table 3 of Vaswani et al. 2017.
TRANSLATORS = {
    "transformer-base": (37000, 6, 512, 8, 2048),
    "transformer-big": (37000, 6, 1024, 16, 4096),
}

# Table 3: what differs from base, and the printed millions (rows A print none, nor does E).
TABLE_3 = {
    "base": ({}, 65),
    "1-head": ({"num_heads": 1}, 65),
    "4-heads": ({"num_heads": 4}, 65),
    "16-heads": ({"num_heads": 16}, 65),
    "32-heads": ({"num_heads": 32}, 65),
    "keys-16": ({"d_k": 16}, 58),
    "keys-32": ({"d_k": 32}, 60),
    "2-layers": ({"num_layers": 2}, 36),
    "4-layers": ({"num_layers": 4}, 50),
    "8-layers": ({"num_layers": 8}, 80),
    "d-256": ({"d_model": 256}, 28),  # 8 heads of 32
    "d-1024": ({"d_model": 1024}, 168),  # 8 heads of 128
    "ff-1024": ({"d_ff": 1024}, 53),
    "ff-4096": ({"d_ff": 4096}, 90),
}


ENCODER_FAMILIES = [name for name, room in FAMILIES.items() if room.startswith("encoders")]


@functools.cache
def count(config):
    return sum(x.size for x in jax.tree.leaves(parameter_shapes(models.create(config))))


def listed(name):
    """Return the number in the family's table, which one test below counts for every preset."""
    return families()[registry.family_of_preset(name)].num_parameters[name]


@pytest.mark.slow
def test_the_listed_numbers_of_parameters_are_counted():
    for family in families().values():
        counted = {name: count(preset.config) for name, preset in family.presets.items()}
        assert counted == family.num_parameters


def test_every_preset_is_checked_here():
    """Presets of later families are checked beside their models."""
    configs = {families()[name].config for name in ("gpt", "transformer", *ENCODER_FAMILIES)}
    presets = {name for name, p in models.presets().items() if type(p.config) in configs}
    variations = {f"transformer-{name}" for name in (*TABLE_3, "learned")}
    encoders = ENCODERS.keys() | ELECTRA.keys() | COPIES.keys() | DEBERTA.keys()
    assert presets == SIZES.keys() | encoders | TRANSLATORS.keys() | variations


def layer_size(D):
    """Four projections and two feed-forward matrices with biases, two norms."""
    return 4 * (D * D + D) + (D * 4 * D + 4 * D) + (4 * D * D + D) + 2 * 2 * D


def check_printed(preset, total, inconsistent):
    """The paper's number is that of its sizes, or the note says so and gives ours."""
    number, unit = re.fullmatch(r"([\d.]+)([MB])", preset.published).groups()  # type: ignore[union-attr]
    digits = len(number.partition(".")[2])
    as_printed = f"{total / {'M': 1e6, 'B': 1e9}[unit]:.{digits}f}"
    assert (as_printed != number) == inconsistent
    if inconsistent:
        assert f"{as_printed}{unit}" in preset.note


@pytest.mark.parametrize("name", SIZES)
def test_parameter_count(name):
    preset, (V, P, L, D, N) = models.presets()[name], SIZES[name]
    config = preset.config
    assert (config.vocab_size, config.max_length, config.num_layers) == (V, P, L)
    assert (config.d_model, config.num_heads) == (D, N)
    final_norm = 0 if name == "gpt" else 2 * D
    total = V * D + P * D + L * layer_size(D) + final_norm
    assert listed(name) == total
    wrong = {"gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "gpt3-medium"}
    check_printed(preset, total, name in wrong)


@pytest.mark.slow
@pytest.mark.parametrize("name", ENCODERS)
def test_parameter_count_of_encoders(name):
    preset, (V, P, L, D, N, types) = models.presets()[name], ENCODERS[name]
    config = preset.config
    assert (config.vocab_size, config.max_length, config.num_layers) == (V, 512, L)
    assert (config.d_model, config.num_heads, config.head_dim) == (D, N, 64)
    body = (V + P + types) * D + 2 * D + L * layer_size(D)
    pooler, next_sentence = D * D + D, D * 2 + 2
    masked_words = D * D + D + 2 * D + V
    assert count(dataclasses.replace(config, head="masked_lm")) == body + masked_words
    has_pooler = name != "distilbert-base"
    assert count(dataclasses.replace(config, head="none")) == body + has_pooler * pooler
    total = body + masked_words
    if name.startswith("bert"):
        total += pooler + next_sentence
    assert listed(name) == total
    check_printed(preset, total, name in {"bert-large", "distilbert-base"})
    if name == "bert-large":
        assert f"{(body + pooler) / 1e6:.0f}M without" in preset.note
    if name == "distilbert-base":
        assert f"{body / 1e6:.0f}M without" in preset.note


@pytest.mark.parametrize("name", ELECTRA)
def test_parameter_count_of_electra(name):
    preset, (L, D, N, E, body, total) = models.presets()[name], ELECTRA[name]
    config = preset.config
    assert (config.num_layers, config.d_model, config.num_heads) == (L, D, N)
    assert config.position_dim == E
    assert count(dataclasses.replace(config, head="none")) == body
    assert listed(name) == total
    check_printed(preset, total, name == "electra-base")


@pytest.mark.slow
@pytest.mark.parametrize("name", COPIES)
def test_parameter_count_of_copies(name):
    preset, (L, D, N, body, masked_words) = models.presets()[name], COPIES[name]
    config = preset.config
    assert (config.num_layers, config.d_model, config.num_heads) == (L, D, N)
    assert count(dataclasses.replace(config, head="none")) == body
    total = masked_words or body
    assert listed(name) == total
    check_printed(preset, total, bool(preset.note))


def test_a_reranker_has_one_label_and_no_pooler():
    config = models.preset("bge-m3").with_head("sequence_classification", ("score",))
    assert count(config) == 567_755_777


@pytest.mark.parametrize("name", DECODERS)
def test_parameter_count_of_decoders(name):
    preset = models.presets()[name]
    assert listed(name) == DECODERS[name]
    check_printed(preset, DECODERS[name], bool(preset.note))


@pytest.mark.slow
@pytest.mark.parametrize("name", DEBERTA)
def test_parameter_count_of_deberta(name):
    preset, (V, L, D, N, body) = models.presets()[name], DEBERTA[name]
    config = preset.config
    assert (config.vocab_size, config.num_layers, config.d_model, config.num_heads) == (V, L, D, N)
    assert count(dataclasses.replace(config, head="none")) == body
    check_printed(preset, body, name != "deberta-v3-base")


def translator_size(V, layers, D, F, keys, values):
    """Shared table; attention without biases; 2 norms in a layer of the encoder, 3 of the decoder.

    `keys` and `values` are their sizes in all heads together.
    """
    attention = 2 * D * keys + 2 * D * values
    feed_forward = 2 * D * F + F + D
    return V * D + layers * (3 * attention + 2 * feed_forward + 5 * 2 * D)


@pytest.mark.parametrize("name", TRANSLATORS)
def test_parameter_count_of_translators(name):
    preset, (V, L, D, N, F) = models.presets()[name], TRANSLATORS[name]
    c = preset.config
    assert (c.vocab_size, c.num_layers, c.d_model, c.num_heads, c.d_ff) == (V, L, D, N, F)
    assert (c.decoder.num_layers, c.decoder.num_heads, c.decoder.d_ff) == (L, N, F)
    total = translator_size(V, L, D, F, D, D)
    assert listed(name) == total
    check_printed(preset, total, True)


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLE_3)
def test_all_of_table_3_counts_the_same_vocabulary(name):
    """With section 5.1's 37,000 tokens no row is what is printed; with 41,100 each of them is."""
    fields, printed = TABLE_3[name]
    preset = models.presets()[f"transformer-{name}"]
    assert preset.config == dataclasses.replace(models.preset("transformer-base"), **fields)
    assert preset.published == f"{printed}M"
    c = dataclasses.replace(preset.config, vocab_size=41_100)
    values = c.num_heads * c.head_dim
    sizes = (c.num_layers, c.d_model, c.d_ff, c.num_heads * c.key_dim, values)
    assert count(c) == translator_size(41_100, *sizes)
    assert round(count(c) / 1e6) == printed
    published = dataclasses.replace(c, vocab_size=37_000)
    assert count(published) == translator_size(37_000, *sizes)
    assert 0 < printed - count(published) / 1e6 < 5


@pytest.mark.parametrize("heads", [1, 4, 16, 32])
def test_heads_cost_nothing(heads):
    """Table 3, rows A: more of them, and each is smaller."""
    base = models.preset("transformer-base")
    other = dataclasses.replace(base, num_heads=heads)
    assert (other.head_dim, other.key_dim) == (512 // heads, 512 // heads)
    assert count(other) == count(base)


def test_learned_positions_are_two_tables():
    """Table 3, row E."""
    base = models.preset("transformer-base")
    learned = models.preset("transformer-learned")
    assert count(learned) - count(base) == 2 * 1024 * 512


def test_published_sizes_of_translation_models():
    base, big = (models.preset(f"transformer-{size}") for size in ("base", "big"))
    assert (base.dropout_rate, big.dropout_rate) == (0.1, 0.3)
    for c in (base, big):
        assert (c.activation, c.norm_position, c.positions) == ("relu", "post", "sinusoidal")
        assert (c.position_base, c.position_layout) == (10_000, "interleaved")
        assert (c.share_embeddings, c.tie_output, c.scale_embedding) == (True, True, True)
        assert (c.attention_dropout_rate, c.activation_dropout_rate) == (0, 0)
        assert (c.attention_bias, c.output_bias) == (False, False)


def test_where_the_encoders_differ():
    bert, roberta, distil = (
        models.preset(f"{name}-base") for name in ("bert", "roberta", "distilbert")
    )
    for c in (bert, roberta, distil):
        assert (c.activation, c.dropout_rate) == ("gelu", 0.1)
    assert [c.norm_eps for c in (bert, roberta, distil)] == [1e-12, 1e-5, 1e-12]
    assert [c.position_offset for c in (bert, roberta, distil)] == [0, 2, 0]
    assert [c.pooler_activation for c in (bert, roberta, distil)] == ["tanh", "tanh", "relu"]
    assert [c.head for c in (bert, roberta, distil)] == ["pretraining", "masked_lm", "masked_lm"]


def test_where_the_architectures_differ():
    gpt, gpt2, gpt3 = (models.preset(name) for name in ("gpt", "gpt2", "gpt3-175b"))
    assert (gpt.norm_position, gpt2.norm_position, gpt3.norm_position) == ("post", "pre", "pre")
    assert (gpt.local_window, gpt2.local_window, gpt3.local_window) == (None, None, 256)
    assert (gpt.scale_residual_init, gpt2.scale_residual_init) == (False, True)
    for c in (gpt, gpt2, gpt3):
        assert (c.activation, c.use_bias, c.positions) == ("gelu_tanh", True, "learned")
        assert c.norm_eps == 1e-5


@pytest.mark.parametrize("name", ["gpt3-xl", "gpt3-13b"])
def test_impossible_rows_of_table_2_1_are_noted(name):
    assert "table 2.1" in models.presets()[name].note
    assert models.preset(name).head_dim == 128
