import dataclasses
import json

import jax
import pytest
from flaxzoo import models, train
from flaxzoo.data.common.errors import UserError
from flaxzoo.data.tokenizers.characters import CharacterTokenizer
from flaxzoo.models.config import divisors
from flaxzoo.models.decoders.gpt.falcon import FalconConfig
from flaxzoo.models.decoders.llama import LlamaConfig
from flaxzoo.models.encoders.electra import ElectraConfig
from flaxzoo.models.encoders.modernbert import ModernBertConfig
from flaxzoo.models.encoders.roberta import RobertaConfig
from flaxzoo.models.registry import family_name
from flaxzoo.models.rotary_scaling import RotaryScaling

SIZES = {"vocab_size": 11, "max_length": 8, "num_layers": 2, "d_model": 100, "num_heads": 4}


def test_derived_sizes():
    config = models.GPTConfig(**SIZES)
    assert (config.head_dim, config.feed_forward_dim) == (25, 400)
    assert models.GPTConfig(**SIZES, d_ff=7).feed_forward_dim == 7


def test_divisors():
    assert divisors(100) == [1, 2, 4, 5, 10, 20, 25, 50, 100]


def test_heads_must_divide_the_width():
    message = "d_model 100 .*num_heads 12: .* 1, 2, 4, 5, 10, 20, 25, 50, 100"
    with pytest.raises(ValueError, match=message):
        models.GPTConfig(**{**SIZES, "num_heads": 12})


@pytest.mark.parametrize("name", [*SIZES, "d_ff"])
def test_sizes_must_be_positive(name):
    with pytest.raises(ValueError, match=f"{name} .*got 0"):
        models.GPTConfig(**{**SIZES, name: 0})


@pytest.mark.parametrize("name", [*SIZES, "d_ff"])
@pytest.mark.parametrize("value", [10**9, 10**30])
def test_sizes_beyond_any_model_are_refused_before_work_of_that_size(name, value):
    with pytest.raises(UserError, match=f"{name} must be .*{value}"):
        models.GPTConfig(**{**SIZES, name: value})


def test_embeddings_as_wide_as_the_layers_need_no_map():
    # transformers has none then, and would leave it out of the model that it loads.
    with pytest.raises(UserError, match=r"d_embedding 100 "):
        ElectraConfig(**SIZES, d_embedding=100)


@pytest.mark.parametrize("family", [LlamaConfig, ModernBertConfig, FalconConfig])
def test_each_rotary_frequency_has_a_factor(family):
    factors = {"short_factors": (1.0,) * 12, "long_factors": (2.0,) * 11}
    scaling = RotaryScaling(kind="longrope", original_length=4, **factors)
    with pytest.raises(UserError, match=r"long_factors .*11 .* 24 .*give 12"):
        family(**SIZES | {"d_model": 96}, rope_scaling=scaling)


def test_a_table_of_positions_is_bounded():
    with pytest.raises(UserError, match=r"max_length 134217728 .*d_model 100 "):
        models.GPTConfig(**{**SIZES, "max_length": 2**27})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_layers", "2"),
        ("num_layers", 2.0),
        ("num_layers", True),
        ("num_layers", None),
        ("d_model", [100]),
        ("d_ff", "x"),
        ("norm_eps", "x"),
        ("dropout_rate", "0.1"),
        ("use_bias", "no"),
        ("use_bias", 1),
        ("activation", ["gelu"]),
        ("positions", 3),
        ("labels", 3),
        ("labels", [3]),
        ("head", 4),
        ("architecture", ["gpt"]),
        ("architecture", None),
        ("more", 1),
    ],
)
def test_a_value_of_another_type_is_refused_by_name(name, value):
    fields = models.config_to_dict(models.GPTConfig(**SIZES)) | {name: value}
    with pytest.raises(UserError, match=name):
        models.config_from_dict(json.loads(json.dumps(fields)))


def test_a_configuration_of_other_sizes_is_refused_before_arrays_are_read(tmp_path):
    tokenizer = CharacterTokenizer.train(["abc def"])
    config = models.GPTConfig(**{**SIZES, "vocab_size": tokenizer.vocab_size})
    model = models.create(config)
    params = models.init_params(model, jax.random.key(0))
    models.save(tmp_path / "hf", model, params)
    train.save_run(tmp_path / "run", model, params, tokenizer)
    for folder, names in (
        ("hf", ("n_layer", "n_embd", "vocab_size", "n_positions")),
        ("run", ("num_layers", "d_model", "vocab_size", "max_length")),
    ):
        file = tmp_path / folder / "config.json"
        content = json.loads(file.read_text())
        for name, value in zip(names, (8000, 10**6, 10**8, 10**6), strict=True):
            fields = content if folder == "hf" else content["model"]
            changed = {**fields, name: value}
            changed = changed if folder == "hf" else {**content, "model": changed}
            file.write_text(json.dumps(changed))
            with pytest.raises(UserError, match="fit") as error:
                models.load(tmp_path / folder)
            assert "\n" not in str(error.value)


@pytest.mark.parametrize("rate", [-0.1, 1.0])
def test_dropout_rate_is_a_probability_below_one(rate):
    with pytest.raises(ValueError, match=rf"dropout_rate .*got {rate}"):
        models.GPTConfig(**SIZES, dropout_rate=rate)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("gpt2-medum", "did you mean gpt2-medium"), ("zzz", "choose from gpt, gpt2")],
)
def test_unknown_preset_names_the_nearest(name, hint):
    with pytest.raises(ValueError, match=f"preset .*'{name}': {hint}"):
        models.preset(name)


def test_presets_survive_json():
    for name in models.presets():
        config = models.preset(name)
        fields = json.loads(json.dumps(models.config_to_dict(config)))
        assert fields["architecture"] == family_name(config), name
        assert models.config_from_dict(fields) == config, name


def test_labels_survive_json():
    config = models.BertConfig(**SIZES, head="token_classification", labels=("O", "B-PER"))
    fields = json.loads(json.dumps(models.config_to_dict(config)))
    assert (fields["architecture"], fields["labels"]) == ("bert", ["O", "B-PER"])
    assert models.config_from_dict(fields) == config


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"head": "sequence_classification"}, "head 'sequence_classification' .*labels"),
        ({"head": "token_classification"}, "head 'token_classification' .*labels"),
        ({"labels": ("a", "b", "a")}, "labels a, b, a "),
        ({"num_token_types": -1}, "num_token_types must .*-1"),
        ({"position_offset": -1}, "position_offset must .*-1"),
        ({"head": "pretraining"}, "head 'pretraining'"),
    ],
)
def test_heads_and_their_labels(fields, message):
    with pytest.raises(ValueError, match=message):
        RobertaConfig(**SIZES, **fields)


def test_unknown_architecture_and_fields():
    fields = models.config_to_dict(models.GPTConfig(**SIZES))
    with pytest.raises(ValueError, match=r"architecture 'rnn'.* gpt"):
        models.config_from_dict({**fields, "architecture": "rnn"})
    with pytest.raises(ValueError, match="unknown field heads"):
        models.config_from_dict({**fields, "heads": 3})


def test_configurations_cannot_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        models.GPTConfig(**SIZES).d_model = 3
