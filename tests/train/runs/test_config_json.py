"""The configuration in config.json, also in the form that the first version wrote."""

import copy
import dataclasses
import json

import pytest
from flaxzoo import models, train
from flaxzoo.data.errors import UserError
from flaxzoo.train.runs.config_json import from_dict

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
    "mesh": {"data": -1, "fsdp": 1, "context": 1, "tensor": 1},
    "parallel": "jit",
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
        model=dataclasses.replace(expected.model, **head),
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
    ("change", "named"),
    [
        ({"data": {**COMMON, "kind": "clasify"}}, "clasify"),
        ({"data": {**COMMON, "kind": "tag", "stride": 3}}, "stride"),
        ({"speed": 3}, "speed"),
    ],
)
def test_unknown_names_are_refused(change, named):
    with pytest.raises(UserError, match=f"config.json does not fit.*{named}"):
        from_dict({**FORMER, **change})
