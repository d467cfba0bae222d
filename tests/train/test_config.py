import dataclasses
import json

import pytest
from flaxzoo import data, models, train
from flaxzoo.data import TokenizerConfig
from flaxzoo.train import OptimizerConfig
from flaxzoo.train.config import OPERATIONAL_FIELDS, differences, flatten, in_steps, to_dict
from flaxzoo.train.optim.schedules import make_schedule
from flaxzoo.train.recipes import RECIPES
from flaxzoo.train.runs.config_json import from_dict


def test_recipes_survive_json():
    for name in RECIPES:
        config = train.recipe(name)
        assert from_dict(json.loads(json.dumps(to_dict(config)))) == config, name


def test_values_that_are_not_defaults_survive_json(train_config):
    config = train_config(
        execution=models.Execution(dtype="bfloat16", layers="unroll", remat="full"),
        mesh=train.MeshConfig(data=2, fsdp=4),
        parallel="pmap",
        data=data.CausalLMData(
            source="text:a.txt",
            validation="text:b.txt",
            length=8,
            packing="first-fit",
            tokenizer=TokenizerConfig(path="somewhere"),
        ),
        wandb_project="zoo",
    )
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


def test_flatten():
    assert flatten({"a": 1, "b": {"c": None, "d": {"e": "x"}}}) == {
        "a": 1,
        "b.c": None,
        "b.d.e": "x",
    }


def test_differences_name_each_field_with_both_values(train_config):
    old = train_config()
    assert differences(old, old) == {}
    new = dataclasses.replace(
        old,
        seed=7,
        model=dataclasses.replace(old.model, d_model=64),
        optimizer=dataclasses.replace(old.optimizer, beta2=0.5),
        data=dataclasses.replace(old.data, source="text:x"),
        execution=models.Execution(dtype="bfloat16"),
    )
    assert differences(old, new) == {
        "data.source": ("builtin:python-docs", "text:x"),
        "execution.dtype": ("float32", "bfloat16"),
        "model.d_model": (32, 64),
        "optimizer.beta2": (0.95, 0.5),
        "seed": (0, 7),
    }


def test_operational_fields_are_not_a_difference(train_config):
    old = train_config()
    new = dataclasses.replace(
        old,
        mesh=train.MeshConfig(data=2, fsdp=4),
        parallel="pmap",
        execution=models.Execution(layers="unroll", remat="dots"),
        data=dataclasses.replace(old.data, num_workers=3),
        log_every=5,
        evaluate_every=6,
        checkpoint_every=7,
        keep_last=8,
        keep_best=9,
        wandb_project="zoo",
        sample_prompt="Once",
    )
    assert differences(old, new) == {}
    names = flatten(to_dict(old))
    for field in OPERATIONAL_FIELDS:
        assert any(name == field or name.startswith(f"{field}.") for name in names), field


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"steps": 0}, "steps 0 .*epochs 0.0 "),
        ({"batch_size": -1}, "batch_size must .*-1"),
        ({"keep_last": 0}, "keep_last must .*0"),
        (
            {"batch_size": 6, "micro_batches": 4},
            "batch_size 6 .*micro_batches 4",
        ),
    ],
)
def test_impossible_values(train_config, fields, message):
    with pytest.raises(ValueError, match=message):
        train_config(**fields)


def test_a_run_may_resume_with_other_micro_batches_and_tasks(train_config):
    config, tasks = train_config(batch_size=8), train.EvaluateConfig(tasks=("hellaswag",))
    other = dataclasses.replace(config, micro_batches=4, evaluate=tasks)
    assert differences(config, other) == {}
    assert from_dict(to_dict(other)) == other


def test_impossible_lengths(train_config):
    data = train_config().data
    too_long = dataclasses.replace(data, length=17)
    message = "data.length 17 .*model.max_length 16"
    with pytest.raises(ValueError, match=message):
        train_config(data=too_long)
    with pytest.raises(ValueError, match=r"length must .*0"):
        dataclasses.replace(data, length=0)


def test_unknown_recipe_names_the_nearest():
    with pytest.raises(ValueError, match=r"'quikstart': .*quickstart"):
        train.recipe("quikstart")


@pytest.mark.parametrize(("steps", "warmup"), [(600, 400), (400, 40), (60, 6), (20, 2), (2, 1)])
def test_a_warmup_that_does_not_fit_is_shortened(train_config, steps, warmup):
    optimizer = OptimizerConfig(peak_learning_rate=1e-3, warmup_steps=400)
    config = in_steps(train_config(steps=steps, optimizer=optimizer), num_examples=8)
    assert config.optimizer.warmup_steps == warmup
    make_schedule(config.optimizer, config.steps)
