"""Every published size has a recipe: that of its family."""

import dataclasses

import pytest
from flaxzoo import models, train
from flaxzoo.data.common.errors import UserError
from flaxzoo.models.registry import FAMILIES, families
from flaxzoo.train.plan.placeholders import without_data
from flaxzoo.train.recipes import RECIPES

SUMS = ("sums", "grpo", "rloo", "ppo")
# One recipe for each built-in text and vocabulary.
BUILT_IN = {
    (x.config.data.source_name, x.config.data.tokenizer): name
    for name, x in RECIPES.items()
    if x.config.data.source_name.startswith("builtin:")
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILT_IN.values())
def test_text_that_is_built_in_fills_the_vocabulary(name):
    data = train.recipe(name).data
    size = data.make_tokenizer().vocab_size
    # Vocabularies of words or characters have no size; the patterns have 22 characters, the sums
    # ten digits, + and =.
    assert size == (data.tokenizer.vocab_size or size) >= (14 if name in SUMS else 22)


@pytest.mark.parametrize("family", families())
def test_every_preset_of_a_family_can_be_trained(family):
    for name, preset in families()[family].presets.items():
        recipe = family if preset.config.causal else "embed"
        config = without_data(train.recipe(recipe, name), lambda _: None)
        assert config.model.d_model == preset.config.d_model
        assert config.model.num_layers == preset.config.num_layers
        if preset.config.causal:  # else it begins from published weights
            assert config.model.vocab_size == config.data.tokenizer.vocab_size


@pytest.mark.parametrize("family", FAMILIES)
def test_the_length_of_a_recipe_is_at_most_the_context_of_its_preset(family, monkeypatch):
    name, preset = next(iter(families()[family].presets.items()))
    assert train.recipe(family, name).data.longest_side > 48
    short = dataclasses.replace(preset.config, max_length=48)
    monkeypatch.setitem(families()[family].presets, name, dataclasses.replace(preset, config=short))
    assert train.recipe(family, name).data.longest_side == 48


@pytest.mark.parametrize(
    ("name", "preset", "message"),
    [
        ("gpt2-large", None, "gpt2-large .*train gpt --preset gpt2-l"),
        ("gpt", "bert-small", "gpt .*train bert --preset bert-small"),
        ("quickstart", "gpt2", "quickstart .*train gpt --preset gpt2"),
        ("gpt", "gpt2-lage", "'gpt2-lage': .*gpt2-large"),
    ],
)
def test_a_preset_that_a_recipe_does_not_have(name, preset, message):
    with pytest.raises(UserError, match=message):
        train.recipe(name, preset)


def test_a_preset_may_have_other_settings():
    assert not train.recipe("roberta", "roberta-base").data.next_sentence
    assert train.recipe("bert", "bert-small").data.next_sentence
    assert train.recipe("gpt").model.d_model == models.preset("gpt2").d_model


@pytest.mark.parametrize("preset", [None, "albert-xxlarge"])
def test_albert_learns_the_order_of_sentences_at_every_size(preset):
    for name in ("albert", "albert-quickstart") if preset is None else ("albert",):
        data = train.recipe(name, preset).data
        assert (data.next_sentence, data.pair_label) == (True, "order")
        assert (data.whole_word, data.ngrams, data.masking_rate) == (True, 3, 0.15)


@pytest.mark.parametrize("preset", [None, "modernbert-large"])
def test_modernbert_masks_30_percent_of_packed_rows_at_every_size(preset):
    for name in ("modernbert", "modernbert-quickstart") if preset is None else ("modernbert",):
        data = train.recipe(name, preset).data
        assert (data.next_sentence, data.segments, data.masking_rate) == (False, "packed", 0.3)


def test_bert_in_one_phase_has_the_printed_numbers():
    config = train.recipe("bert-large-one-phase")
    assert (config.steps, config.batch_size, config.data.length) == (1_000_000, 256, 512)
    assert config.data.segments == "halves"
    assert config.optimizer.warmup_fraction * config.steps == 10_000
    assert config.init_from is None
    # Lectures print "roughly 50 epochs of the 3.3 billion word corpus".
    assert config.steps * config.batch_size * config.data.length / 3.3e9 == pytest.approx(
        39.7, abs=0.05
    )


def test_one_size_has_one_default_of_rematerialization():
    """Models of the width of a quickstart or wider save memory, narrower ones save time."""
    for name, recipe in RECIPES.items():
        config = recipe.config
        expected = "dots" if config.model.d_model >= 128 else "none"
        assert config.execution.remat == expected, name
