"""Tests of the options of `flaxzoo train`, `plan` and `bench`."""

import dataclasses
import re

import pytest
from flaxzoo.data.common.errors import UserError
from flaxzoo.models import LoRAConfig
from flaxzoo.train.cli import main as cli
from flaxzoo.train.cli.inference.embed import EmbedArguments
from flaxzoo.train.cli.inference.generate import GenerateArguments
from flaxzoo.train.cli.inference.prompt import PromptArguments
from flaxzoo.train.cli.options import field_docs, forget_flags, with_flags
from flaxzoo.train.cli.recipe_options import MOST_USED, RecipeParser
from flaxzoo.train.config import MeshConfig, to_dict
from flaxzoo.train.objectives.table import objectives_of
from flaxzoo.train.recipes import RECIPES
from flaxzoo.train.runs.config_json import from_dict
from flaxzoo.train.settings.familiar_names import FAMILIAR_NAMES

ONE_OF_EACH_KIND = ["bert-classify", "bert-quickstart", "gpt2", "wmt14-en-de-base"]
FAMILIAR = """lr learning-rate epochs num-train-epochs per-device-train-batch-size output-dir
    model-name-or-path max-seq-length seq-len warmup-ratio weight-decay fp16 bf16
    gradient-accumulation-steps""".split()
TITLES = [
    *("options", "run", "data", "tokenizer", "model", "adapters", "optimizer", "devices"),
    *("checkpoints and evaluation", "logging"),
]


@pytest.mark.parametrize("name", ONE_OF_EACH_KIND)
def test_options_replace_the_fields_of_the_recipe(name):
    arguments = (
        "--model.num-layers 2 --data.validation None --optimizer.peak-learning-rate 1e-3 "
        "--optimizer.frozen a b --execution.remat full --mesh.fsdp 2 --optimizer.max-gradient-norm "
        "None --steps=1000000 --data.tokenizer.vocab_size 99 --mesh.data -1"
    ).split()
    config = RECIPES[name].config
    data: dict[str, object] = {"validation": None}
    if hasattr(config.data, "next_sentence"):
        arguments.append("--data.no-next-sentence")
        data["next_sentence"] = False
    replace = dataclasses.replace
    expected = replace(
        config,
        steps=1_000_000,
        model=replace(config.model, num_layers=2),
        data=replace(config.data, tokenizer=replace(config.data.tokenizer, vocab_size=99), **data),
        optimizer=replace(
            config.optimizer, peak_learning_rate=1e-3, frozen=("a", "b"), max_gradient_norm=None
        ),
        execution=replace(config.execution, remat="full"),
        mesh=MeshConfig(data=-1, fsdp=2),
    )
    assert RecipeParser("train", [name, *arguments]).read_recipe()[1] == expected


def test_without_options_a_recipe_is_unchanged():
    for name, recipe in RECIPES.items():
        assert RecipeParser("train", [name]).read_recipe()[1] == recipe.config, name


def test_any_option_of_the_adapters_makes_them():
    arguments = "gpt2 --init-from gpt2 --lora.targets attention up --lora.use-rslora".split()
    config = RecipeParser("train", arguments).read_recipe()[1]
    assert config.lora == LoRAConfig(targets=("attention", "up"), use_rslora=True)
    assert from_dict(to_dict(config)) == config
    assert "lora" not in to_dict(RECIPES["gpt2"].config)


def test_a_recipe_whose_data_were_read_takes_options():
    config = RECIPES["reviews-bag"].config
    assert config.data.labels() == ("negative", "positive")  # the data keep what they have read
    _, changed = RecipeParser("train", ["reviews-bag", "--data.length", "24"]).read_recipe()
    assert changed.data.length == 24


def help_of(arguments, capsys, option="--help-all"):
    """The lines that a command prints for `--help-all`."""
    assert cli.main([*arguments, option]) == 0
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
    assert [title for title in groups if title != "objective"] == TITLES
    config = RECIPES[name].config
    has_choices = dataclasses.fields(config.objective) or len(objectives_of(config.data)) > 1
    assert ("objective" in groups) == bool(has_choices)
    assert groups["options"] == ["--help-all", "--workdir"]
    assert groups["run"][:3] == ["--steps", "--epochs", "--batch-size"]
    assert groups["devices"][0] == "--mesh.data"
    assert all(option.startswith("--model.") for option in groups["model"])
    assert not any(option.startswith("--data.tokenizer.") for option in groups["data"])
    assert {"--mesh.fsdp", "--execution.dtype", "--parallel"} <= set(groups["devices"])
    assert {"--evaluate-every", "--resume"} <= set(groups["checkpoints and evaluation"])
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
    with pytest.raises(UserError, match=r"--model\.num-layer: .*--model\.num-layers"):
        RecipeParser("train", ["quickstart", "--model.num-layer", "3"]).read_recipe()


@pytest.mark.parametrize("name", FAMILIAR)
def test_a_familiar_name_is_read_or_answered_with_ours(name, capsys, tmp_path):
    arguments = ["quickstart", f"--{name}", "1", "--steps", "-1"]
    assert cli.main(["train", *arguments, "--workdir", str(tmp_path / "run")]) == 2
    message = capsys.readouterr().err
    if name == "epochs":  # has the same name here
        assert re.search("--steps .*got -1", message)
        return
    ours = f"--{FAMILIAR_NAMES[name]}" if name in FAMILIAR_NAMES else f"--optimizer.{name}"
    assert re.match(f"flaxzoo: .*--{name}: ", message)
    assert ours in message
    assert message.count("\n") == 1


def test_every_familiar_name_leads_to_an_option():
    known = {"workdir", "resume", "preset"}
    for recipe in ("bert-tag", "dpo", "reward", "grpo", "ppo"):
        flags = RecipeParser("train", [recipe])._option_string_actions
        known |= {flag.strip("-") for flag in flags}
    for arguments in (GenerateArguments, PromptArguments, EmbedArguments):
        known |= {field.name.replace("_", "-") for field in dataclasses.fields(arguments)}
    assert {ours.split()[0] for ours in FAMILIAR_NAMES.values()} <= known
    assert not FAMILIAR_NAMES.keys() & RecipeParser("train", ["gpt2"])._option_string_actions.keys()


@pytest.mark.parametrize("name", ONE_OF_EACH_KIND)
def test_the_short_help_has_an_example_and_the_options_one_needs(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = help_of(["train", name], capsys, "--help")
    assert lines[0] == f"usage: flaxzoo train {name} [options]"
    assert lines[2].startswith(f"example: flaxzoo train {name}")
    absent = {"preset", *(field for field in MOST_USED if field.startswith("objective."))}
    shown = [f"--{field.replace('_', '-')}" for field in MOST_USED if field not in absent]
    options = [option for option in groups_of(lines)["options"] if option != "--objective.kind"]
    assert options == ["--help-all", "--workdir", *shown]
    assert lines[-1].endswith(f" options: flaxzoo train {name} --help-all")
    assert max(map(len, lines)) < 80
    batch_size = RECIPES[name].config.batch_size
    assert f"default: {batch_size})" in " ".join(" ".join(lines).split())


def test_messages_of_the_library_name_fields_and_those_of_the_command_options():
    message = "set data.next_sentence False, or data.tokenizer.vocab_size 9 (execution.remat full)"
    forget_flags()
    assert with_flags(message) == message
    RecipeParser("train", ["bert-quickstart"]).read_recipe()
    try:
        assert with_flags(message) == (
            "set --data.no-next-sentence, or --data.tokenizer.vocab-size 9 (--execution.remat full)"
        )
    finally:
        forget_flags()


def test_messages_name_fields_again_after_a_command(tmp_path):
    message = "lower batch_size (execution.remat full)"
    assert cli.main(["train", "quickstart", "--save-config", f"{tmp_path}/run.toml"]) == 0
    assert with_flags(message) == message


KINDS = "byte-bpe wordpiece sentencepiece-unigram sentencepiece-bpe characters words".split()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["quickstart", "t5-quickstart", "reviews", "sums"])
def test_another_kind_of_vocabulary_keeps_a_size_only_if_it_needs_one(name, kind):
    parser = RecipeParser("train", [name, "--data.tokenizer.kind", kind])
    tokenizer = parser.read_recipe()[1].data.tokenizer
    own = RECIPES[name].config.data.tokenizer.vocab_size
    assert tokenizer.vocab_size == (None if kind in ("characters", "words") else own)
    sized = RecipeParser(
        "train", [name, "--data.tokenizer.kind", kind, "--data.tokenizer.vocab-size", "400"]
    )
    assert sized.read_recipe()[1].data.tokenizer.vocab_size == 400


@pytest.mark.parametrize("option", ["kind=words", "vocab-size=9", "no-lowercase"])
def test_a_vocabulary_that_is_named_is_not_trained(option):
    words = ["quickstart", "--data.tokenizer.path", "x", f"--data.tokenizer.{option}"]
    with pytest.raises(UserError, match=r"data.tokenizer.path"):
        RecipeParser("train", words).read_recipe()
