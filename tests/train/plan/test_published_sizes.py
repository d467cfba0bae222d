"""`flaxzoo plan` and `bench` of a preset are of the published model, and `train` says its own."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers
from flaxzoo import models
from flaxzoo.models import loading
from flaxzoo.models.init import parameter_shapes
from flaxzoo.models.registry import families
from flaxzoo.train.cli import main as cli
from flaxzoo.train.cli.recipe_options import RecipeParser
from flaxzoo.train.config import differences, to_dict
from flaxzoo.train.plan.placeholders import without_data
from flaxzoo.train.recipes import RECIPES
from flaxzoo.train.state import count_parameters

ANY_FAMILY = [name for name, recipe in RECIPES.items() if recipe.of_model is not None]
HEADS_OF = {"text-to-text": "seq2seq_lm", "splade": "masked_lm"}
"""The heads that these recipes need, where others take a causal language model."""


def planned(*words, command="plan"):
    return without_data(RecipeParser(command, list(words)).read_recipe()[1], lambda _: None)


@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name in families() if families()[name].presets])
def test_every_preset_is_planned_as_published(family):
    for number, name in enumerate(families()[family].presets):
        command = ("plan", "bench")[number % 2]
        published = models.preset(name)
        # A decoder with windows on both sides predicts no next token: it embeds texts.
        recipe = family if getattr(published, "causal", True) else "embed"
        found = planned(recipe, "--preset", name, command=command).model
        published = published.with_head(found.head, found.labels)
        same = {"dropout_rate": published.dropout_rate}
        assert dataclasses.replace(found, **same) == published
    if (default := RECIPES[family].preset) is not None:
        assert planned(family).model.vocab_size == models.preset(default).vocab_size


@pytest.mark.slow
@pytest.mark.parametrize("name", ANY_FAMILY)
def test_recipes_of_all_families_plan_the_published_vocabulary(name):
    head = HEADS_OF.get(name, "causal_lm")
    published = [family.presets for family in families().values() if family.presets]
    for presets in published:
        preset, entry = list(presets.items())[-1]
        if entry.config.head == head:
            found = planned(name, "--preset", preset).model
            assert found.vocab_size == entry.config.vocab_size, preset
            assert found.num_layers == entry.config.num_layers


@pytest.mark.parametrize(
    ("words", "number"),
    [
        ("llama --preset llama3-8b", 8_030_261_248),
        ("gpt --preset gpt3-xl", 1_315_723_264),
        ("gpt --preset gpt2", 124_439_808),
        ("gpt", 124_439_808),
        ("qwen3 --preset qwen3-0.6b", 596_049_920),
        ("mistral --preset mistral-7b", 7_241_732_096),
        ("sft --preset llama3.2-1b", 1_235_814_400),
    ],
)
def test_parameters_are_those_of_the_published_weights(words, number):
    model = planned(*words.split()).model
    assert count_parameters(parameter_shapes(models.create(model))) == number


def test_an_option_names_another_vocabulary(tmp_path):
    for words, size in (
        ("gpt --preset gpt2 --data.tokenizer.vocab-size 4096", 4096),
        ("gpt --preset gpt2 --model.vocab-size 60000", 60_000),
        ("quickstart", 2048),
    ):
        assert planned(*words.split()).model.vocab_size == size


def test_a_published_vocabulary_may_be_smaller_than_the_vocabulary_of_the_recipe(monkeypatch):
    presets = families()["gpt"].presets
    config = dataclasses.replace(presets["gpt2"].config, vocab_size=1000)
    monkeypatch.setitem(presets, "gpt2", dataclasses.replace(presets["gpt2"], config=config))
    assert planned("gpt", "--preset", "gpt2").model.vocab_size == 1000


def test_training_says_that_its_vocabulary_is_another(capsys):
    config = RecipeParser("train", ["llama", "--preset", "llama3-8b"]).read_recipe()[1]
    assert config.model.vocab_size == 1  # it grows to the tokenizer's
    message = capsys.readouterr().err
    assert "4,096" in message
    assert "128,256" in message
    RecipeParser("train", ["llama", "--preset", "llama3-8b", "--data.tokenizer.path", "x"])
    assert not capsys.readouterr().err


@pytest.mark.slow
def test_the_plan_prints_vocabulary_and_parameters(capsys):
    small = "--topology cpu:1 --batch-size 1 --data.length 8 --model.num-layers 1".split()
    assert cli.main(["plan", "gpt", "--preset", "gpt2", *small]) == 0
    assert "46,473,216 parameters, a vocabulary of 50,257" in capsys.readouterr().out


@pytest.fixture(scope="module")
def gpt2_config(tmp_path_factory):
    """A folder with GPT-2's config.json alone, which a plan needs."""
    folder = tmp_path_factory.mktemp("gpt2")
    transformers.GPT2Config(architectures=["GPT2LMHeadModel"]).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", [name for name in ANY_FAMILY if name not in HEADS_OF])
@pytest.mark.parametrize("command", ["plan", "bench", "train"])
def test_a_published_folder_is_planned_as_the_preset_of_its_size(gpt2_config, name, command):
    of_folder = RecipeParser(command, [name, "--init-from", str(gpt2_config)]).read_recipe()[1]
    of_preset = RecipeParser(command, [name, "--preset", "gpt2"]).read_recipe()[1]
    assert of_folder.init_from == str(gpt2_config)
    same = {"init_from": None, "model": of_preset.model}
    assert dataclasses.replace(of_folder, **same) == of_preset
    if command == "plan":
        both = [without_data(config, lambda _: None) for config in (of_folder, of_preset)]
        assert both[0].model.vocab_size == both[1].model.vocab_size == 50_257
        assert both[0].execution == both[1].execution


@pytest.mark.parametrize("name", ANY_FAMILY)
def test_a_run_has_its_settings_when_its_beginning_is_gone(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    tiny: dict[str, Any] = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1}
    if name == "text-to-text":
        made = transformers.BartForConditionalGeneration(transformers.BartConfig(**tiny))
    else:
        made = transformers.GPT2Config(architectures=["GPT2LMHeadModel"])
    made.save_pretrained("published")
    words = [name, "--init-from", "published"]
    config = RecipeParser("train", words).read_recipe()[1]
    stated = dataclasses.replace(config, model=loading.model_config(Path("published")))
    fields = to_dict(stated)
    run = Path("runs", name)
    run.mkdir(parents=True)
    content = {"model": fields.pop("model"), "train": fields}
    (run / "config.json").write_text(json.dumps(content))
    shutil.rmtree("published")
    again = RecipeParser("train", words).read_recipe()[1]
    assert differences(config, dataclasses.replace(again, model=config.model)) == {}
    assert again.execution == config.execution
    shorter = RecipeParser("train", [*words, "--data.length", "64"]).read_recipe()[1]
    assert differences(config, shorter)["data.length"] == (config.data.length, 64)
