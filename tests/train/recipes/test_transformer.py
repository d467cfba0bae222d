"""The recipes of translation: the paper's numbers, and programs that compile at their shapes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flaxzoo import models, train
from flaxzoo.data.packing.packed_pairs import ARRAYS
from flaxzoo.models.init import parameter_shapes
from flaxzoo.train.config import objective_of
from flaxzoo.train.recipes import RECIPES

PUBLISHED = [name for name in RECIPES if name.startswith("wmt14")]


@pytest.mark.parametrize("d_model", [512, 1024])
def test_the_published_schedule(d_model):
    config = train.recipe("wmt14-en-de-base" if d_model == 512 else "wmt14-en-de-big")
    schedule = train.make_schedule(config.optimizer, config.steps)
    for step in (1, 100, 3999, 4000, 4001, 50_000, 100_000):
        expected = d_model**-0.5 * min(step**-0.5, step * 4000**-1.5)
        # optax rises from 0 to the peak by subtracting from it, in float32.
        rounding = 2e-7 * config.optimizer.peak_learning_rate
        assert float(schedule(step - 1)) == pytest.approx(expected, rel=1e-5, abs=rounding)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_papers_numbers(name):
    config = train.recipe(name)
    big, german = "big" in name, "de" in name
    vocab_size = 37_000 if german else 32_000
    assert config.model == dataclasses.replace(
        models.preset("transformer-big" if big else "transformer-base"),
        vocab_size=vocab_size,
        dropout_rate=0.3 if big and german else 0.1,
    )
    assert config.data.tokenizer.vocab_size == vocab_size
    assert config.data.source.endswith("#en,de" if german else "#en,fr")
    assert config.steps == (300_000 if big else 100_000)
    assert config.objective.label_smoothing == 0.1
    assert 25_000 <= config.batch_size * config.data.length <= 27_000
    assert config.keep_last == (20 if big else 5)
    optimizer = config.optimizer
    assert (optimizer.beta1, optimizer.beta2, optimizer.epsilon) == (0.9, 0.98, 1e-9)
    assert optimizer.weight_decay == 0
    assert optimizer.max_gradient_norm is None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wmt14-en-de-base", "wmt14-en-de-big"])
def test_the_published_train_step_compiles(name):
    """Ahead of time, at its real shapes: nothing is allocated."""
    config = train.recipe(name)
    model = models.create(config.model, config.execution)
    tx = train.make_optimizer(config.optimizer, config.steps)
    step = train.make_train_step(model.apply, objective_of(config), tx)
    state = jax.eval_shape(lambda params: train.init_state(params, tx), parameter_shapes(model))
    shape = (config.batch_size, config.data.length)
    batch = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name in ARRAYS}
    key = jax.eval_shape(lambda: jax.random.key(0))
    compiled = jax.jit(step, donate_argnums=0).lower(state, batch, key).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    parameters = sum(np.prod(x.shape) for x in jax.tree.leaves(state.params))
    # Parameters and two moments, float32; beside them what the README says, nowhere all logits.
    assert memory.argument_size_in_bytes == pytest.approx(12 * parameters, rel=0.01)
    assert memory.temp_size_in_bytes < (26e9 if "big" in name else 13.5e9)
