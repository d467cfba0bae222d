"""Models saved by commit 3b1442f, before each family had a layer of its own, load unchanged.

Each file in `made_before/` has a configuration as `config.json` holds it, the parameters by path,
inputs, the logits with and without dropout, and the norm of each parameter's gradient. Where
attention weights are dropped, the logits with dropout and the gradients were written anew when
their draws changed (`models.nn.layers.kept_weights`); the others are those of then.
"""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from flaxzoo import models
from flaxzoo.models.nn.layers import row_keys
from flaxzoo.models.registry import config_from_dict

FOLDER = Path(__file__).parent / "made_before"
NAMES = sorted(path.stem for path in FOLDER.glob("*.npz"))
EXECUTIONS = {
    "scan": models.Execution(),
    "unroll": models.Execution(layers="unroll"),
    "separate": models.Execution(layers="separate"),
    "remat": models.Execution(remat="dots"),
}


def test_every_family_has_a_file():
    assert NAMES == ["bert", "gpt", "gpt2", "gpt3", "transformer", "transformer-pre"]


# That all executions compute the same has tests of its own, of every family.
CASES = [
    *((name, "scan") for name in NAMES),
    ("gpt3", "unroll"),
    ("transformer-pre", "unroll"),
    ("gpt2", "separate"),
    ("transformer-pre", "separate"),
    ("transformer", "remat"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "execution"), CASES)
def test_parameters_made_before(name, execution, assert_close):
    with np.load(FOLDER / f"{name}.npz") as file:
        saved = dict(file)
    groups = {"params": {}, "inputs": {}}
    for path, array in saved.items():
        group, _, rest = path.partition("/")
        if rest:
            groups[group][rest] = array
    params = unflatten_dict({p: jnp.asarray(x) for p, x in groups["params"].items()}, sep="/")
    inputs = groups["inputs"]
    config = config_from_dict(json.loads(str(saved["config"])))

    stacked = models.create(config, dataclasses.replace(EXECUTIONS[execution], layers="scan"))
    expected = jax.eval_shape(lambda: models.init_params(stacked, jax.random.key(0)))
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, expected)
    model = models.create(config, EXECUTIONS[execution])
    if execution == "separate":
        model, params = models.unstack_layers(stacked, params)

    keys = row_keys(jax.random.key(3, impl="threefry2x32"), 3)

    def loss(params):
        logits = model.apply({"params": params}, **inputs, rng=keys).logits
        return jnp.mean(jnp.square(logits)), logits

    @jax.jit
    def run(params):
        without_dropout = model.apply({"params": params}, **inputs).logits
        return without_dropout, jax.value_and_grad(loss, has_aux=True)(params)

    logits, ((_, dropped), gradients) = run(params)
    assert_close(logits, saved["logits"])
    assert_close(dropped, saved["dropped_logits"])
    if execution != "separate":
        flat = {path: np.asarray(x) for path, x in flatten_dict(gradients, sep="/").items()}
        norms = [np.linalg.norm(flat[path]) for path in sorted(flat)]
        np.testing.assert_allclose(norms, saved["gradient_norms"], rtol=1e-4, atol=1e-6)
