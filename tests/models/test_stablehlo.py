"""The exported forward pass: one program for any number of rows and any lengths."""

from typing import Any

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from flaxzoo import models
from flaxzoo.models.encoders.distilbert import DistilBertConfig
from flaxzoo.models.stablehlo import export_forward

SIZES = {"vocab_size": 32, "max_length": 16, "num_layers": 2, "d_model": 16, "num_heads": 2}
CONFIGS = {
    "gpt": models.GPTConfig(**SIZES),
    "gpt-banded": models.GPTConfig(**SIZES, local_window=4, positions="sinusoidal"),
    "transformer": models.EncoderDecoderConfig(**SIZES),
    "bert-span": models.BertConfig(**SIZES, head="question_answering"),
    "bert-choice": models.BertConfig(**SIZES, head="multiple_choice"),
    "bert-causal": models.BertConfig(**SIZES, head="causal_lm"),
    "distilbert": DistilBertConfig(**SIZES, head="sequence_classification", labels=("a", "b")),
}

OUTPUTS = (
    *("last_hidden_state", "pooler_output", "logits", "prediction_logits"),
    *("seq_relationship_logits", "start_logits", "end_logits"),
)
"""All arrays that a model can return."""


def inputs(config, rows, length):
    draw = np.random.default_rng(length)
    shape = (rows, 3, length) if config.head == "multiple_choice" else (rows, length)
    given = {"input_ids": draw.integers(0, 32, shape), "attention_mask": np.ones(shape)}
    given["attention_mask"][-1, ..., length - 1 :] = 0
    if getattr(config, "num_token_types", 0):
        given["token_type_ids"] = draw.integers(0, 2, shape)
    if config.head == "seq2seq_lm":
        given["decoder_input_ids"] = draw.integers(0, 32, (rows, length + 2))
    return {name: x.astype(np.int32) for name, x in given.items()}


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_it_answers_as_the_model(config):
    model = models.create(config)
    params = models.init_params(model, jax.random.key(0))
    program = jax.export.deserialize(bytearray(export_forward(model)))
    given = inputs(config, rows=3, length=9)  # nothing in the program says so
    output = jax.jit(model.apply)({"params": params}, **given)
    answers: Any = program.call(flatten_dict(params, sep="/"), **given)
    assert answers.keys() == {n for n in OUTPUTS if getattr(output, n, None) is not None}
    for name, x in answers.items():
        np.testing.assert_allclose(x, getattr(output, name), atol=1e-5)
