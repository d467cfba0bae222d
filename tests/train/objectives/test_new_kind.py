"""A new kind of data, in one row of the table of tasks, is known everywhere."""

import dataclasses
import json
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flaxzoo import models, train
from flaxzoo.data import CausalLMData
from flaxzoo.train.config import to_dict
from flaxzoo.train.objectives.tasks import TASKS, Task, objective_of, task_of
from flaxzoo.train.runs.config_json import from_dict


@dataclasses.dataclass(frozen=True, kw_only=True)
class FirstTokenData(CausalLMData):
    """Text of which only the first token is to be copied."""

    kind: ClassVar[str] = "first_token"
    weight: float = 2.0


def first_token_objective(data):
    def terms(outputs, batch):
        log_probs = jax.nn.log_softmax(outputs.logits[:, 0])
        return {"first": -jnp.sum(jnp.take_along_axis(log_probs, batch["input_ids"][:, :1], 1))}

    return train.Objective(
        coefficients={"first": data.weight},
        inputs=lambda batch: {"input_ids": batch["input_ids"]},
        counts=lambda batch: {"first": jnp.float32(batch["input_ids"].shape[0])},
        terms=terms,
    )


@pytest.fixture
def kind(monkeypatch):
    task = Task(
        data=FirstTokenData,
        objective=lambda config, data: first_token_objective(data),
        heads=lambda data: ("causal_lm",),
        scores=lambda evaluation, split, data: {"first": evaluation.means["first"]},
        progress_metrics=("first",),
        next_command="generate {run} --prompt TEXT",
    )
    monkeypatch.setitem(TASKS, FirstTokenData.kind, task)
    return task


@pytest.mark.slow
def test_one_row_registers_a_kind_and_a_step_learns_it(kind, train_config):
    settings = train_config().data
    fields = {f.name: getattr(settings, f.name) for f in dataclasses.fields(settings)}
    config = train_config(data=FirstTokenData(**fields, weight=3.0))
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config
    assert task_of(config.data) is kind
    assert kind.heads_for(config.data) == ("causal_lm",)

    model, objective = models.create(config.model), objective_of(config)
    params = models.init_params(model, jax.random.key(0))
    tx = optax.adam(0.1)
    step = jax.jit(train.make_train_step(model.apply, objective, tx))
    state = train.init_state(params, tx)
    batch = {"input_ids": np.arange(8, dtype=np.int32).reshape(2, 4)}
    losses = []
    for _ in range(10):
        state, metrics = step(state, batch, jax.random.key(1))
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] / 2


def test_a_row_without_heads_takes_the_head_of_its_name():
    data = train.recipe("bert-tag").data
    assert task_of(data).heads is None
    assert task_of(data).heads_for(data) == ("token_classification",)


def test_label_smoothing_is_asked_of_the_data(kind, train_config, monkeypatch):
    data = train_config().data
    fields = {f.name: getattr(data, f.name) for f in dataclasses.fields(data)}
    monkeypatch.setattr(FirstTokenData, "allows_label_smoothing", True)
    assert train_config(data=FirstTokenData(**fields), label_smoothing=0.1).label_smoothing == 0.1
