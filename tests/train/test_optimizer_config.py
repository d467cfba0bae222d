import dataclasses

import pytest
from flaxzoo.train.optimizer_config import OptimizerConfig

CONFIG = OptimizerConfig(peak_learning_rate=0.1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_decay": 0.0}, "layer_decay must .*0.0"),
        ({"layer_decay": 1.1}, "layer_decay must .*1.1"),
        ({"layer_decay": float("nan")}, "layer_decay must .*nan"),
        (
            {"frozen": ("head", "a(b")},
            r"optimizer.frozen 'a\(b' .*missing",
        ),
        ({"frozen": "head"}, "frozen must .*'head'"),
        (
            {"peak_learning_rate": 0.0},
            "peak_learning_rate must .*0.0",
        ),
        ({"weight_decay": -1.0}, "weight_decay must .*-1.0"),
        ({"beta2": 1.0}, "beta2 must .*1.0"),
        ({"muon_beta": 1.0}, "muon_beta must .*1.0"),
        (
            {"name": "adafactor", "state_dtype": "int8"},
            r"optimizer.state_dtype int8 .*adafactor .*--optimizer.adafactor-momentum",
        ),
        (
            {"name": "muon", "adafactor_momentum": True},
            "optimizer.adafactor_momentum .*adafactor, .*muon",
        ),
    ],
)
def test_impossible_configurations(fields, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **fields)


@pytest.mark.parametrize(
    ("field", "value", "choices"),
    [
        ("name", "adam", "adamw, lamb, adafactor, muon"),
        ("schedule", "poly", "constant, linear, cosine, inv"),
    ],
)
def test_unknown_names(field, value, choices):
    config = dataclasses.replace(CONFIG)
    object.__setattr__(config, field, value)  # the tests' check of types would come first
    message = f"{field} .*{choices}.*'{value}'"
    with pytest.raises(ValueError, match=message):
        config.__post_init__()


def test_the_list_of_json_is_taken():
    patterns = ["head", "layers/[0-5]"]
    fields = {**dataclasses.asdict(CONFIG), "frozen": patterns}
    assert OptimizerConfig(**fields) == dataclasses.replace(CONFIG, frozen=tuple(patterns))
