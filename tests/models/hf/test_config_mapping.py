"""Fields of a `config.json`: nested ones, defaults that are left out, norms without a bias."""

import dataclasses
import re
from pathlib import Path

import pytest
from flaxzoo.models.config import TransformerConfig
from flaxzoo.models.hf.config_mapping import (
    ConfigMapping,
    Field,
    settings_from_hf,
    settings_to_hf,
)
from flaxzoo.models.hf.decoders import llama
from flaxzoo.models.hf.decoders.gpt import gpt
from flaxzoo.models.hf.encoder_decoders import bart, t5
from flaxzoo.models.hf.encoders import bert
from flaxzoo.models.hf.tensors.mapping import WeightsError, layer_rules, norm

MAPPING = ConfigMapping(
    (
        Field("hidden_size", "d_model", 8),
        Field("rope_parameters.rope_theta", "rope_base", 10_000.0, kind=float),
        Field("rope_parameters.factor", "rope_factor", 1.0),
        Field("window", "window", None, kind=int),
    ),
    aliases={"rope_scaling": "rope_parameters", "rope_theta": "rope_parameters.rope_theta"},
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(TransformerConfig):
    rope_base: float = 10_000.0
    rope_factor: float = 1.0
    window: int | None = None


def config(**settings):
    return Config(vocab_size=5, max_length=4, num_layers=1, num_heads=1, **settings)


@pytest.mark.parametrize(
    "written",
    [
        {"rope_parameters": {"rope_theta": 500.0}},
        {"rope_scaling": {"rope_theta": 500.0}},
        {"rope_theta": 500.0},
        {"rope_theta": 500.0, "rope_parameters": None},
    ],
    ids=["nested", "other name of the object", "other name of the field", "null object"],
)
def test_a_nested_field_is_found_under_each_of_its_names(written):
    settings = settings_from_hf(MAPPING, written, "config.json")
    assert settings == {"d_model": 8, "rope_base": 500.0, "rope_factor": 1.0, "window": None}


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({"rope_parameters": 3}, r"rope_parameters 3 .*object"),
        ({"rope_parameters": {"beta": 1}}, r"rope_parameters\.beta"),
        ({"rope_parameters": {"rope_theta": "a"}}, r"rope_parameters\.rope_theta 'a'.* number"),
        ({"rope_theta": 1.0, "rope_parameters": {"rope_theta": 2.0}}, r"rope_theta 1\.0.* 2\.0"),
    ],
)
def test_a_wrong_nested_field_is_named(written, message):
    with pytest.raises(WeightsError, match=message):
        settings_from_hf(MAPPING, written, "config.json")


def test_nested_fields_are_written():
    own = {"model_type": "toy", "architecture": "ToyModel"}
    named = {"model_type": "toy", "architectures": ["ToyModel"]}
    plain = settings_to_hf(MAPPING, config(d_model=8), **own)
    rotary = {"rope_theta": 10_000.0, "factor": 1.0}
    assert plain == {**named, "hidden_size": 8, "rope_parameters": rotary, "window": None}
    other = settings_to_hf(MAPPING, config(d_model=8, rope_factor=2.0, window=3), **own)
    assert other == {
        **named,
        "hidden_size": 8,
        "rope_parameters": {"rope_theta": 10_000.0, "factor": 2.0},
        "window": 3,
    }
    settings = settings_from_hf(MAPPING, other, "config.json")
    assert settings == {"d_model": 8, "rope_base": 10_000.0, "rope_factor": 2.0, "window": 3}


def test_a_norm_without_bias_has_one_tensor():
    assert [rule.hf for rule in norm("final_norm", "norm", bias=False)] == ["norm.weight"]
    assert [rule.hf for rule in norm("final_norm", "norm")] == ["norm.weight", "norm.bias"]
    names = {"attention/query": "q_proj", "attention_norm": "input_layernorm"}
    rules = layer_rules("layers", "layers.{i}", names, norm_bias=False)
    assert [rule.hf for rule in rules] == [
        "layers.{i}.q_proj.weight",
        "layers.{i}.q_proj.bias",
        "layers.{i}.input_layernorm.weight",
    ]


def test_the_fields_of_the_page_are_converted_as_it_says():
    """The names in each column of the table in `docs/coming/flax-transformers.md`."""
    mappings = (
        (bert.FORM.fields, llama.FORM.fields),
        (gpt.GPT2.fields,),
        (t5.FIELDS["t5"],),
        (bart.BART.fields,),
    )
    known = [
        {(x.hf, x.flax) for one in of_column for x in one.fields if isinstance(x, Field)}
        for of_column in mappings
    ]
    page = Path(__file__).parents[3] / "docs" / "coming" / "flax-transformers.md"
    _, _, table = page.read_text(encoding="utf-8").partition("| BERT, Llama, …")
    rows = [line.split("|")[1:-1] for line in table.partition("\n\n")[0].splitlines()[2:]]
    assert len(rows) == 14
    for *columns, here in rows:
        (flax,) = re.findall("`(.*?)`", here)
        for column, pairs in zip(columns, known, strict=True):
            assert {(name, flax) for name in re.findall("`(.*?)`", column)} <= pairs
