"""Router losses for a mixture of experts. They can be added to any objective.

Fedus et al. 2022, "Switch transformers", section 2.2: a loss that balances the experts. Zoph et al.
2022, "ST-MoE", section 3.2: a loss that keeps the logits of the router small. Both losses are means
over the sequences of a batch.
"""

import dataclasses
from typing import TypeVar

import jax.numpy as jnp

from ...data.common.fields import require
from ...models.config import TransformerConfig
from ...models.nn.experts import (
    RouterStatistics,
    balance_loss,
    batch_balance_loss,
    router_z_loss,
)
from ...models.nn.typing import Array, Float
from .objective import Batch, Inputs, Objective, Outputs, Terms

T = TypeVar("T")
BALANCE, Z = "router_balance", "router_z"


def with_router(objective: Objective, model: TransformerConfig) -> Objective:
    """Returns the objective with additional losses that balance the experts of a model.

    The coefficients of the terms `router_balance` and `router_z` are the fields with these names in
    the model's configuration. The evaluation loss does not include these terms. If the model has no
    experts, the objective is returned unchanged.

    Example::

        step = train.make_train_step(model.apply, train.with_router(train.CAUSAL, model.config), tx)

    Args:
        objective: the objective without router losses.
        model: the model's configuration. With `router_balance_over="batch"`, the objective needs
          the whole batch and does not support micro-batches.

    Raises:
        UserError: the model has experts, and the objective runs auxiliary models (`forward`).
    """
    if not model.num_experts:
        return objective
    require(
        objective.forward is None,
        f"num_experts {model.num_experts} requires an objective without forward, because "
        f"the router losses need the outputs of a single model: choose a model without experts",
    )
    over_batch = model.router_balance_over == "batch"

    def counts(batch: Batch) -> Terms:
        inputs = _of_each_run(objective.inputs(batch))
        rows = sum(map(_num_sequences, inputs), jnp.float32(0))
        # Balancing over a batch gives one value per run of the model; balancing over sequences
        # gives one value per sequence.
        balanced = jnp.float32(len(inputs)) if over_batch else rows
        return {**objective.counts(batch), BALANCE: balanced, Z: rows}

    def terms(outputs: Outputs, batch: Batch, *reference: Outputs) -> Terms:
        routers: list[RouterStatistics] = [run.router for run in _of_each_run(outputs)]
        balance = batch_balance_loss if over_batch else balance_loss
        return {
            **objective.terms(outputs, batch, *reference),
            BALANCE: sum((jnp.sum(balance(router)) for router in routers), jnp.float32(0)),
            Z: sum((jnp.sum(router_z_loss(router)) for router in routers), jnp.float32(0)),
        }

    coefficients = {BALANCE: model.router_balance, Z: model.router_z}
    return dataclasses.replace(
        objective,
        coefficients={**objective.coefficients, **coefficients},
        counts=counts,
        terms=terms,
        regularizers=(*objective.regularizers, *coefficients),
        # The balance loss over a batch is not a sum over its examples.
        whole_batch=objective.whole_batch or (over_batch and model.router_balance > 0),
    )


def _of_each_run(values: T | tuple[T, ...]) -> tuple[T, ...]:
    """Returns a tuple of the inputs or the outputs of each run of the model."""
    return values if isinstance(values, tuple) else (values,)


def _num_sequences(inputs: Inputs) -> Float[Array, ""]:
    """Returns the number of sequences that have at least one token."""
    tokens = inputs.get("segment_ids", inputs.get("attention_mask"))
    # Without a mask, every row has tokens.
    if tokens is None:
        return jnp.float32(inputs["input_ids"].shape[0])
    return jnp.sum(jnp.any(tokens != 0, axis=-1).astype(jnp.float32))
