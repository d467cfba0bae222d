"""Tests of the options of `flaxzoo train`, `plan` and `bench`."""

import dataclasses

import pytest
import tyro
from flaxzoo.data.errors import UserError
from flaxzoo.train.cli import main as cli
from flaxzoo.train.cli.recipe_options import RecipeParser, field_docs
from flaxzoo.train.config import TrainConfig
from flaxzoo.train.recipes import RECIPES

ONE_OF_EACH_KIND = ["bert-classify", "bert-quickstart", "gpt2", "wmt14-en-de-base"]
TITLES = [
    *("options", "run", "data", "tokenizer", "model", "optimizer", "devices"),
    *("checkpoints and evaluation", "logging"),
]


@pytest.mark.parametrize("name", ONE_OF_EACH_KIND)
def test_options_are_read_as_tyro_reads_them(name):
    arguments = (
        "--model.num-layers 2 --data.validation None --optimizer.peak-learning-rate 1e-3 "
        "--optimizer.frozen a b --execution.remat full --mesh.fsdp 2 --optimizer.max-gradient-norm "
        "None --steps=1000000 --data.tokenizer.vocab_size 99 --mesh.data -1"
    ).split()
    if hasattr(RECIPES[name].config.data, "next_sentence"):
        arguments.append("--data.no-next-sentence")
    _, config = RecipeParser("train", [name, *arguments]).read()
    assert config == tyro.cli(TrainConfig, default=RECIPES[name].config, args=arguments)
    assert config.mesh.fsdp == 2


@pytest.mark.parametrize("name", RECIPES)
def test_without_options_a_recipe_is_unchanged(name):
    assert RecipeParser("train", [name]).read()[1] == RECIPES[name].config


def help_of(arguments, capsys):
    """The lines that a command prints for `--help`."""
    with pytest.raises(SystemExit) as ended:
        cli.main([*arguments, "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out.splitlines()


def groups_of(lines):
    """Each heading of a help text with the option strings below it, in order."""
    groups, title = {}, ""
    for line in lines:
        if line.endswith(":") and not line.startswith(" "):
            title = line.removesuffix(":")
            groups[title] = []
        elif line.startswith("  --"):
            groups[title].append(line.split()[0].rstrip(","))
    return groups


@pytest.mark.parametrize("name", ONE_OF_EACH_KIND)
def test_help_has_groups_and_what_matters_first(name, capsys):
    groups = groups_of(help_of(["train", name], capsys))
    assert list(groups) == TITLES
    assert groups["options"][:3] == ["--workdir", "--resume", "--no-resume"]
    assert groups["run"][:3] == ["--steps", "--epochs", "--batch-size"]
    assert groups["devices"][0] == "--mesh.data"
    assert all(option.startswith("--model.") for option in groups["model"])
    assert not any(option.startswith("--data.tokenizer.") for option in groups["data"])
    assert {"--mesh.fsdp", "--execution.dtype", "--parallel"} <= set(groups["devices"])
    assert "--evaluate-every" in groups["checkpoints and evaluation"]
    assert "--log-every" in groups["logging"]


@pytest.mark.parametrize(("command", "own"), [("plan", "--topology"), ("bench", "--profile")])
def test_other_commands_show_their_own_options_first(command, own, capsys):
    groups = groups_of(help_of([command, "quickstart"], capsys))
    assert own in groups["options"]
    assert "--steps" in groups["run"]


@pytest.mark.parametrize("name", ONE_OF_EACH_KIND)
def test_every_option_is_explained(name):
    config = RECIPES[name].config
    parts = [config, config.model, config.data, config.data.tokenizer, config.optimizer]
    for part in (*parts, config.execution, config.mesh):
        options = {
            field.name
            for field in dataclasses.fields(part)
            if not dataclasses.is_dataclass(getattr(part, field.name))
        }
        assert not options - field_docs(type(part)).keys()


def test_a_misspelled_option_is_answered_with_the_nearest():
    with pytest.raises(UserError, match=r"--model\.num-layer: did you mean --model\.num-layers"):
        RecipeParser("train", ["quickstart", "--model.num-layer", "3"]).read()
