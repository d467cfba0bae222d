"""Answers sampled in one compiled program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flaxzoo import models
from flaxzoo.models.decoding.padding import pad_rows
from flaxzoo.models.decoding.rollout import sample_answers
from flaxzoo.models.decoding.unstack_layers import unstack_layers

V, N, END = 19, 9, 3
PROMPTS = [[5, 6, 7, 8], [9], [10, 11, 12], [4, 4]]
KEYS = models.row_keys(jax.random.key(3), len(PROMPTS))
TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def policy():
    config = models.GPTConfig(vocab_size=V, max_length=16, num_layers=2, d_model=16, num_heads=2)
    model = models.create(config)
    return model, models.init_params(model, jax.random.key(0))


def sampled(policy, prompts, keys, length=6, temperature=TEMPERATURE):
    model, params = unstack_layers(*policy)
    ids, mask = pad_rows(prompts, length=length, left=True)
    answers = jax.jit(
        lambda params, ids, mask, keys: sample_answers(
            model,
            params,
            ids,
            mask,
            keys=keys,
            max_new_tokens=N,
            end_ids=(END,),
            temperature=temperature,
        )
    )(params, ids, mask, keys)
    return jax.device_get(answers), ids, mask


@pytest.fixture(scope="module")
def answers(policy):
    return sampled(policy, PROMPTS, KEYS)


def test_log_probabilities_are_those_of_a_full_forward_pass(policy, answers):
    model, params = policy
    found, ids, mask = answers
    whole = np.concatenate([ids, found.tokens], axis=1)
    real = np.concatenate([mask, found.mask], axis=1)
    logits = model.apply({"params": params}, whole, real).logits
    every = jax.nn.log_softmax(logits[:, 5:-1])  # position 5 is the last of the prompts
    expected = np.take_along_axis(np.asarray(every), found.tokens[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(found.log_probs, expected * found.mask, rtol=0, atol=1e-5)


def test_an_answer_ends_with_its_end_token_and_depends_on_its_row_alone(policy, answers):
    found, *_ = answers
    for row in range(len(PROMPTS)):
        length = found.mask[row].sum()
        written = found.tokens[row, :length].tolist()
        assert END not in written[:-1]
        assert written[-1] == END or length == N
        assert not found.tokens[row, length:].any()
        assert not found.log_probs[row, length:].any()
        assert (found.mask[row] == (np.arange(N) < length)).all()
    assert END in found.tokens  # some answer ends before the others
    # Alone, and with other padding.
    alone, *_ = sampled(policy, PROMPTS[2:3], KEYS[2:3], length=3)
    np.testing.assert_array_equal(alone.tokens[0], found.tokens[2])
    np.testing.assert_allclose(alone.log_probs[0], found.log_probs[2], atol=1e-5)


def test_the_loop_stops_when_all_answers_have_ended(policy):
    model, params = policy
    calls = []

    def counting(*args, **kwargs):
        output = model.apply(*args, **kwargs)
        jax.debug.callback(lambda: calls.append(1))
        ends = jnp.zeros((V, 16)).at[END].set(1.0)  # always the end token
        hidden = jnp.ones_like(output.projection.hidden)
        return output.replace(projection=output.projection.replace(hidden=hidden, kernel=ends))

    ids, mask = map(jnp.asarray, pad_rows(PROMPTS, left=True))
    found = jax.jit(
        lambda params: sample_answers(
            model,
            params,
            ids,
            mask,
            keys=KEYS,
            max_new_tokens=N,
            end_ids=(END,),
            temperature=0.0,
            apply_fn=counting,
        )
    )(params)
    jax.effects_barrier()
    assert len(calls) == 1
    np.testing.assert_array_equal(found.mask.sum(axis=1), 1)
    assert (found.tokens[:, 0] == END).all()
