"""A new objective with a kind of data of its own: a class, and a line in the table."""

import dataclasses
import json
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flaxzoo import models, train
from flaxzoo.data import CausalLMData, UserError
from flaxzoo.train.config import objective_of, to_dict
from flaxzoo.train.objective_config import ObjectiveConfig
from flaxzoo.train.objectives import causal_lm
from flaxzoo.train.objectives.table import OBJECTIVES
from flaxzoo.train.runs.config_json import from_dict


@dataclasses.dataclass(frozen=True, kw_only=True)
class FirstTokenData(CausalLMData):
    """Text of which only the first token is to be copied."""

    kind: ClassVar[str] = "first_token"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FirstTokenConfig(ObjectiveConfig[FirstTokenData]):
    """Copies the first token."""

    kind = "copy_first"
    data_kinds = (FirstTokenData,)
    progress_metrics = ("first",)
    next_command = "generate {run} --prompt TEXT"

    weight: float = 2.0

    def build(self, data):
        def terms(outputs, batch):
            log_probs = jax.nn.log_softmax(outputs.logits[:, 0])
            return {"first": -jnp.sum(jnp.take_along_axis(log_probs, batch["input_ids"][:, :1], 1))}

        return train.Objective(
            coefficients={"first": self.weight},
            inputs=lambda batch: {"input_ids": batch["input_ids"]},
            counts=lambda batch: {"first": jnp.float32(batch["input_ids"].shape[0])},
            terms=terms,
        )

    def metrics(self, evaluation, split, data):
        return {"first": evaluation.means["first"]}

    def heads(self, data):
        return ("causal_lm",)


@pytest.fixture
def first_token_data(monkeypatch, train_config):
    monkeypatch.setattr(causal_lm, "FirstTokenConfig", FirstTokenConfig, raising=False)
    monkeypatch.setitem(OBJECTIVES, "copy_first", "causal_lm.FirstTokenConfig")
    settings = train_config().data
    fields = {f.name: getattr(settings, f.name) for f in dataclasses.fields(settings)}
    return FirstTokenData(**fields)


@pytest.mark.slow
def test_a_line_registers_an_objective_and_a_step_learns_it(first_token_data, train_config):
    config = train_config(data=first_token_data)
    assert config.objective == FirstTokenConfig()
    config = dataclasses.replace(config, objective=FirstTokenConfig(weight=3.0))
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config

    model, objective = models.create(config.model), objective_of(config)
    params = models.init_params(model, jax.random.key(0))
    tx = optax.adam(0.1)
    step = jax.jit(train.make_train_step(model.apply, objective, tx))
    state = train.init_state(params, tx)
    batch = {"input_ids": np.arange(8, dtype=np.int32).reshape(2, 4)}
    losses = []
    for _ in range(30):
        state, metrics = step(state, batch, jax.random.key(1))
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] / 2


def test_an_objective_learns_from_its_own_data_alone(first_token_data, train_config):
    with pytest.raises(UserError, match=r"dpo .*dpo data.*first_token"):
        train_config(data=first_token_data, objective=train.DPOConfig())


def test_a_default_objective_follows_the_data(first_token_data, train_config):
    config = dataclasses.replace(train_config(), data=first_token_data)
    assert config.objective == FirstTokenConfig()


def test_a_head_has_the_name_of_the_data_unless_the_objective_names_another():
    config = train.recipe("bert-tag")
    assert config.objective.heads(config.data) == ("token_classification",)
    config = train.recipe("ppo")
    assert config.objective.heads(config.data) == ("causal_lm_with_value",)


def test_an_answer_leaves_tokens_for_a_prompt():
    config = train.recipe("grpo")
    objective = dataclasses.replace(config.objective, max_new_tokens=16)
    with pytest.raises(UserError, match=r"max_new_tokens 16 .* data\.length 16"):
        dataclasses.replace(config, objective=objective)
