"""PPO against what TRL 1.12.0 computed; `ppo_arrays.py` made the file."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flaxzoo import models, train

from ..support.hf_weights import parameters_of
from .ppo_arrays import ANSWER, CONFIG, END, FILE, PROMPT, SETTINGS

MODEL = models.create(dataclasses.replace(CONFIG, head="causal_lm_with_value", dropout_rate=0.0))
PPO = train.PPOConfig(
    **{name: SETTINGS[name] for name in ("temperature", "beta", "gamma", "gae_lambda")}
)
OBJECTIVE = train.ppo(PPO)


def part(stored, prefix):
    return {name.removeprefix(prefix): x for name, x in stored.items() if name.startswith(prefix)}


def with_value(arrays):
    """Parameters, or gradients, of the policy with its value head."""
    own = {name: x for name, x in arrays.items() if name.startswith("transformer.")}
    score = arrays["score.weight"]
    return {**parameters_of(own, CONFIG), "head": {"value": {"kernel": score.T}}}


@pytest.fixture(scope="module")
def stored():
    with np.load(FILE) as arrays:
        return dict(arrays)


@pytest.fixture(scope="module")
def batch(stored):
    """The batch that is learned from, as anyone can make it of answers and scores."""
    ids = np.concatenate([stored["prompts"], stored["answers"]], axis=1).astype(np.int32)
    is_end = stored["answers"] == END
    real = np.cumsum(is_end, axis=1) - is_end == 0  # up to the first end token
    mask = np.concatenate([np.ones_like(ids[:, :PROMPT]), real], axis=1).astype(np.int32)
    last = np.zeros_like(ids[:, :1])
    rows = {
        "input_ids": ids * mask,
        "labels": np.concatenate([(ids * mask)[:, 1:], last], axis=1),
        "attention_mask": mask,
        "loss_mask": np.concatenate(
            [np.zeros_like(ids[:, : PROMPT - 1]), real.astype(np.int32), last], axis=1
        ),
    }
    policy = with_value(part(stored, "0/"))
    reference = {**parameters_of(part(stored, "reference/"), CONFIG), "head": policy["head"]}
    (log_probs, values), (reference_log_probs, _) = (
        outputs_of(p, rows) for p in (policy, reference)
    )
    penalty = SETTINGS["penalty"] * ~is_end.any(axis=1)
    targets = jax.jit(
        lambda *arrays: train.ppo_targets(*arrays[:4], reference_log_probs=arrays[4], settings=PPO)
    )(
        jnp.asarray((stored["scores"] - penalty).astype(np.float32)),
        log_probs,
        values,
        jnp.asarray(rows["loss_mask"]),
        reference_log_probs,
    )
    return {**rows, **targets}


@jax.jit
def outputs_of(params, rows):
    outputs = MODEL.apply(
        {"params": params}, input_ids=rows["input_ids"], attention_mask=rows["attention_mask"]
    )
    temperature = SETTINGS["temperature"]
    found = train.token_log_probs(outputs.projection, rows["labels"], temperature=temperature)
    return found.log_prob, outputs.values


def test_advantages(stored, batch):
    ours = np.asarray(batch["advantages"])[:, PROMPT - 1 : PROMPT - 1 + ANSWER]
    np.testing.assert_allclose(ours, stored["advantages"], rtol=0, atol=1e-5)
    value_mask = np.asarray(batch["value_mask"])[:, PROMPT - 1 : PROMPT - 1 + ANSWER]
    raw = (np.asarray(batch["returns"]) - np.asarray(batch["old_values"]))[:, PROMPT - 1 : -1]
    np.testing.assert_allclose(raw * value_mask, stored["raw_advantages"] * value_mask, atol=1e-5)


@pytest.mark.parametrize("number", [0, 1])
def test_loss_and_gradient_of_each_pass(number, stored, batch):
    arrays = part(stored, f"{number}/")
    counts = OBJECTIVE.counts(batch)

    @jax.jit
    def loss(params):
        _, sums = OBJECTIVE.apply(MODEL.apply, params, batch)
        means = {name: sums[name] / counts[name] for name in sums}
        return sum(c * means[name] for name, c in OBJECTIVE.coefficients.items()), means

    found = jax.value_and_grad(loss, has_aux=True)(with_value(arrays))
    (value, means), gradient = found
    np.testing.assert_allclose(value, arrays["loss"], rtol=1e-5, atol=1e-6)
    expected = with_value(part(arrays, "gradient/"))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), gradient, expected
    )
    if number:  # the ratios have left 1, and values and probabilities their bounds
        assert means["policy/clipfrac_avg"] > 0
        assert means["val/clipfrac_avg"] > 0
