"""The greatest logit of each token equals the maximum of all logits, and so does its gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flaxzoo.models import token_log_probs
from flaxzoo.models.greatest_logits import NEVER, greatest_logits
from flaxzoo.models.heads.outputs import Projection

B, T, D, V = 3, 7, 4, 11


def arrays():
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(B, T, D)).astype(np.float32)
    hidden[0, 4] = hidden[0, 2]  # equal logits: the first position counts
    kernel, bias = (rng.normal(size=s).astype(np.float32) for s in ((V, D), (V,)))
    mask = np.arange(T) < np.array([7, 4, 0])[:, None]
    return hidden, kernel, bias, mask.astype(np.int32)


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("chunk", [1, 3, 7])  # positions, of which the last chunk may have fewer
def test_value_and_gradient_equal_torch(chunk, cap, monkeypatch, assert_close):
    monkeypatch.setattr(token_log_probs, "MOST_POSITIONS", chunk * B)
    hidden, kernel, bias, mask = arrays()
    weights = np.random.default_rng(1).normal(size=(B, V)).astype(np.float32)
    given = [torch.tensor(x, requires_grad=True) for x in (hidden, kernel, bias)]
    logits = given[0] @ given[1].T + given[2]
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    expected = logits[:2].masked_fill(torch.tensor(mask[:2, :, None] == 0), NEVER).max(1).values
    (expected * torch.tensor(weights[:2])).sum().backward()

    @jax.jit
    def loss(hidden, kernel, bias):
        values = greatest_logits(Projection(hidden, kernel, bias, cap), jnp.asarray(mask))
        return jnp.sum(jnp.where(values > NEVER, values, 0) * weights), values

    (_, values), gradients = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(hidden, kernel, bias)
    assert_close(values[:2], expected.detach().numpy())
    assert (np.asarray(values[2]) == np.float32(NEVER)).all()
    for ours, theirs in zip(gradients, given, strict=True):
        assert theirs.grad is not None
        assert_close(ours, theirs.grad.numpy())
