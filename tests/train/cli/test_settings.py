"""Settings in Python, in a file and on the command line are read by one mechanism."""

import dataclasses
import re

import pytest
from flaxzoo import train
from flaxzoo.data.common.errors import UserError
from flaxzoo.train.cli import main as cli
from flaxzoo.train.cli.recipe_options import RecipeParser
from flaxzoo.train.settings.settings_file import write_settings


def test_python_replaces_fields_as_the_command_line_does():
    settings = {"optimizer.peak_learning_rate": 1e-3, "data.tokenizer.kind": "characters"}
    config = train.recipe("quickstart", steps=10, **settings)
    words = "--steps 10 --optimizer.peak-learning-rate 1e-3 --data.tokenizer.kind characters"
    assert config == RecipeParser("train", ["quickstart", *words.split()]).read_recipe()[1]
    assert config.data.tokenizer.vocab_size is None  # follows from the kind
    large = train.recipe("gpt", "gpt2-large", **{"lora.rank": 4})
    assert large.lora is not None
    assert (large.lora.rank, large.model.num_layers) == (4, 36)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer.peak_learning_rat": 1}, "optimizer.peak_learning_rate"),
        ({"lr": 1}, "lr: .*optimizer.peak_learning_rate"),
        ({"steps": -1}, "steps .*got -1"),
        ({"optimizer.beta1": 2.0}, "optimizer.beta1 .*got 2.0"),
        ({"model.head": "span"}, "model.head .*data"),
        ({"objective.kind": "dpo"}, "objective.kind "),
    ],
)
def test_a_wrong_setting_is_named(settings, message):
    with pytest.raises(UserError, match=message):
        train.recipe("quickstart", **settings)


@pytest.mark.parametrize(
    "words",
    [
        "quickstart --steps 20 --optimizer.frozen embed.* layers/0 --optimizer.peak-learning-rate "
        "1e-5 --data.validation None --optimizer.max-gradient-norm None",
        "gpt --preset gpt2-large --lora.rank 4",
        "qwen3 --preset qwen3-4b --data.tokenizer.path folder",
        'bert-quickstart --data.no-next-sentence --data.source text:a\\b"ü.txt#block',
        "rerank --objective.loss rank_net",
        "embed --objective.kind cosent",
        "quickstart --evaluate.tasks prompts:a.jsonl --evaluate.stop=---",
        "quickstart --evaluate.tasks prompts:a.jsonl --evaluate.stop === --- -5",
        'quickstart --evaluate.tasks prompts:a.jsonl --evaluate.stop ### "Q:\\n" None',
    ],
)
def test_a_file_of_settings_gives_the_same_configuration(words, tmp_path):
    config = RecipeParser("train", words.split()).read_recipe()[1]
    write_settings(tmp_path / "run.toml", config)
    again = RecipeParser("train", [str(tmp_path / "run.toml")]).read_recipe()[1]
    assert again == config
    # Options of the command line take precedence.
    longer = RecipeParser("train", [str(tmp_path / "run.toml"), "--steps=7"]).read_recipe()[1]
    assert longer == dataclasses.replace(config, steps=7)


def test_a_file_of_settings_has_no_setting_for_a_nested_configuration(tmp_path):
    config = train.recipe("llama", "llama3.2-1b")
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, rope_scaling=None))
    # Of the presets, only those without scaling are like this model.
    write_settings(tmp_path / "run.toml", config)
    again = RecipeParser("train", [str(tmp_path / "run.toml")]).read_recipe()[1]
    assert again.model == config.model


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("recipe = 'quickstart'\nsteps = many", "run.toml .*TOML"),
        ("steps = 3", "recipe .*got None"),
        ("recipe = 'quickstart'\nsteps = -3", "--steps .*got -3"),
        ("recipe = 'quickstart'\n[optimiser]\nbeta1 = 1.0", "--optimiser.beta1"),
        ("recipe = 'quickstar'", "quickstart or"),
    ],
)
def test_a_fault_in_a_file_is_named(text, message, tmp_path, capsys):
    (tmp_path / "run.toml").write_text(text)
    assert cli.main(["train", str(tmp_path / "run.toml")]) == 2
    assert re.search(message, capsys.readouterr().err)
