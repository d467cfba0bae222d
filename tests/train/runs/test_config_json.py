"""The configuration in config.json, also in the form that the first version wrote."""

import copy
import dataclasses
import importlib.metadata
import json
import math

import pytest
from flaxzoo import models, train
from flaxzoo.data.errors import UserError
from flaxzoo.train.runs.config_json import from_dict
from flaxzoo.train.runs.load_run import open_run

from ...support.run_folders import small_run

# As the first version wrote it; its kinds of data and its heads had other names.
TOKENIZER = {"kind": "wordpiece", "vocab_size": 8192, "lowercase": True, "path": None}
FORMER = {
    "model": {
        "architecture": "bert",
        "vocab_size": 8192,
        "max_length": 256,
        "num_layers": 4,
        "d_model": 128,
        "num_heads": 4,
        "d_ff": None,
        "activation": "gelu",
        "norm_eps": 1e-12,
        "dropout_rate": 0.1,
        "init_std": 0.08,
        "attention_dropout": None,
        "classifier_dropout": None,
        "num_token_types": 2,
        "position_offset": 0,
        "head_activation": None,
        "pooler_activation": "tanh",
        "head": "sequence",
        "labels": ["bad", "good"],
    },
    "data": {
        "kind": "classify",
        "source": "tsv:train.tsv",
        "validation": None,
        "validation_fraction": 0.05,
        "length": 64,
        "tokenizer": TOKENIZER,
        "num_workers": 0,
        "target": "several",
    },
    "optimizer": {
        "name": "adamw",
        "peak_learning_rate": 0.0003,
        "schedule": "linear",
        "warmup_steps": 0,
        "warmup_fraction": 0.1,
        "final_fraction": 0.0,
        "beta1": 0.9,
        "beta2": 0.999,
        "epsilon": 1e-08,
        "state_dtype": "float32",
        "state_memory": "device",
        "weight_decay": 0.01,
        "max_gradient_norm": 1.0,
        "layer_decay": 1.0,
        "frozen": [],
    },
    "execution": {
        "dtype": "float32",
        "param_dtype": "float32",
        "layers": "scan",
        "remat": "dots",
        "attention": "auto",
    },
    "mesh": {"data": -1, "fsdp": 1, "expert": 1, "context": 1, "tensor": 1},
    "parallel": "jit",
    "gather": "auto",
    "init_from": None,
    "init_step": None,
    "label_smoothing": 0.0,
    "steps": 0,
    "epochs": 3.0,
    "batch_size": 32,
    "micro_batches": 1,
    "seed": 0,
    "log_every": 10,
    "evaluate_every": 0,
    "checkpoint_every": 0,
    "keep_last": 1,
    "keep_best": 1,
    "skip_bad_steps": 3,
    "wandb_project": None,
    "sample_prompt": None,
}
COMMON = {name: x for name, x in FORMER["data"].items() if name not in ("kind", "target")}
SPANS = {"stride": 128, "max_question_length": 64, "max_answer_length": 30}
LABELS = ("bad", "good")


def test_a_former_config_json_is_the_recipe_of_today():
    expected = train.recipe("bert-classify")
    head = {"head": "sequence_classification", "labels": LABELS}
    expected = dataclasses.replace(
        expected,
        model=dataclasses.replace(expected.model, vocab_size=8192, **head),  # the tokenizer's
        data=dataclasses.replace(expected.data, target="multi_label"),
    )
    assert from_dict(json.loads(json.dumps(FORMER))) == expected


@pytest.mark.parametrize(
    ("former", "kind", "former_head", "head"),
    [
        ({"kind": "classify", "target": "one"}, "sequence_classification", "sequence", None),
        ({"kind": "tag"}, "token_classification", "token", None),
        ({"kind": "span", **SPANS}, "question_answering", "span", None),
        ({"kind": "choice"}, "multiple_choice", "choice", None),
        ({"kind": "pretraining"}, "pretraining", "pretraining", None),
        ({"kind": "causal", "packing": "concat"}, "causal_lm", "causal_lm", "causal_lm"),
    ],
)
def test_former_names_of_kinds_and_heads(former, kind, former_head, head):
    fields = copy.deepcopy(FORMER)
    fields["data"] = {**COMMON, **former}
    fields["model"]["head"] = former_head
    config = from_dict(fields)
    assert (config.data.kind, config.model.head) == (kind, head or kind)


def test_a_former_gpt_predicts_next_tokens():
    """The configurations of the first GPTs had neither a head nor labels."""
    fields = models.config_to_dict(models.preset("gpt2"))
    del fields["head"], fields["labels"]
    assert models.config_from_dict(fields) == models.preset("gpt2")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": {**COMMON, "kind": "clasify"}}, "'clasify' is not known"),
        ({"data": {**COMMON, "kind": "tag", "stride": 3}}, "unknown field data.stride"),
        ({"speed": 3}, "unknown field speed"),
        ({"mesh": {"data": 1, "stages": 2}}, "unknown field mesh.stages"),
        ({"mesh": 3}, "mesh 3 is not an object"),
        ({"data": []}, r"data \(\) is not an object"),
        ({"model": "bert"}, "model 'bert' is not an object"),
        ({"steps": "10"}, "steps '10' must be of the type int"),
        ({"steps": True}, "steps True"),
        ({"steps": 1.5}, r"steps 1\.5"),
        ({"steps": 10**30}, "steps 1000"),
        ({"epochs": math.nan}, "epochs nan"),
        ({"init_from": 3}, "init_from 3"),
        ({"init_from": {}}, "init_from {}"),
        ({"parallel": "both"}, "parallel 'both'"),
        ({"parallel": 1}, "parallel 1"),
        ({"model": {**FORMER["model"], "d_model": "128"}}, "d_model"),
        ({"model": {**FORMER["model"], "d_model": None}}, "d_model"),
        ({"model": {**FORMER["model"], "d_model": [128]}}, "d_model"),
        ({"model": {**FORMER["model"], "labels": "good"}}, "labels"),
        ({"model": {**FORMER["model"], "labels": [1, 2]}}, "labels"),
        ({"model": {**FORMER["model"], "norm_eps": "small"}}, "norm_eps"),
        ({"model": {**FORMER["model"], "architecture": ["bert"]}}, "architecture"),
        ({"data": {**FORMER["data"], "tokenizer": None}}, r"data\.tokenizer None"),
        ({"data": {**FORMER["data"], "tokenizer": {"kind": "bytes"}}}, "kind 'bytes'"),
        ({"data": {**FORMER["data"], "length": "64"}}, r"data\.length '64'"),
        ({"model": {**FORMER["model"], "rope": 3}}, r"unknown fields \['rope'\]"),
    ],
)
def test_unknown_names_are_refused(change, message):
    with pytest.raises(UserError, match=message):
        from_dict({**FORMER, **change})


def test_a_field_that_must_be_there_is_named():
    fields = {name: value for name, value in FORMER.items() if name != "batch_size"}
    with pytest.raises(UserError, match="the field batch_size is missing"):
        from_dict(fields)


OWN = importlib.metadata.version("flaxzoo")
WRITERS = [
    ("9.1", f"flaxzoo 9.1 wrote it, and this is {OWN}: use flaxzoo 9.1"),
    (OWN, f"this version, flaxzoo {OWN}, wrote it: restore it"),
    (None, f"it does not name the flaxzoo that wrote it, and this is {OWN}: restore it"),
]


@pytest.mark.parametrize(("writer", "remedy"), WRITERS)
@pytest.mark.parametrize(
    ("train_fields", "model_fields", "told"),
    [
        ({"speed": 3}, {}, "unknown field speed"),
        ({}, {"rope": 3}, "bert configuration has unknown fields ['rope']"),
    ],
)
def test_a_file_of_another_version_is_told(
    tmp_path, writer, remedy, train_fields, model_fields, told
):
    train_config = {name: value for name, value in FORMER.items() if name != "model"}
    content = {"model": {**FORMER["model"], **model_fields}, "train": train_config | train_fields}
    if writer is not None:
        content["flaxzoo"] = writer
    (tmp_path / "config.json").write_text(json.dumps(content))
    message = f"{tmp_path}/config.json: {told}; {remedy}"
    with pytest.raises(UserError) as caught:
        open_run(tmp_path)
    assert str(caught.value) == message
    if model_fields:
        with pytest.raises(UserError) as caught:
            models.load(tmp_path)
        assert str(caught.value) == message


@pytest.mark.slow
def test_a_run_of_another_version_is_taken_up_and_that_is_told(tmp_path, capsys, on_one_device):
    config = small_run(tmp_path, steps=4, evaluate_every=4, checkpoint_every=4)
    train.train(config, tmp_path / "run", quiet=True)
    file = tmp_path / "run" / "config.json"
    content = json.loads(file.read_text())
    assert content["flaxzoo"] == OWN
    for writer, expected in (("0.0.9", 1), (OWN, 0), (None, 0)):
        changed = {**content, "flaxzoo": writer}
        if writer is None:
            del changed["flaxzoo"]
        file.write_text(json.dumps(changed))
        assert train.train(config, tmp_path / "run").finished
        told = f"{tmp_path / 'run'} was made by flaxzoo 0.0.9, and this is {OWN}\n"
        assert capsys.readouterr().err.count(told) == expected
