import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flaxzoo import models, train
from flaxzoo.models.heads.outputs import ClassifierOutput
from flaxzoo.models.heads.specs import HEADS, encoder_heads
from flaxzoo.models.nn.layers import Linear
from flaxzoo.models.registry import FAMILIES, families
from flaxzoo.train.recipes import RECIPES

SIZES = {"vocab_size": 20, "max_length": 8, "num_layers": 1, "d_model": 8, "num_heads": 2}
LABELS = ("a", "b")


class LastTokenHead(nn.Module):
    """Labels of a sequence by its last token."""

    config: models.BertConfig
    execution: models.Execution

    @nn.compact
    def __call__(self, inputs):
        hidden = inputs.body.last_hidden_state[:, -1]
        number = len(self.config.labels)
        linear = Linear((number,), self.config.init_std, execution=self.execution, name="labels")
        return ClassifierOutput(inputs.body, linear(hidden))


@pytest.mark.parametrize("name", list(HEADS))
def test_a_record_is_complete(name):
    spec = HEADS[name]
    assert spec.name == name
    assert spec.default_recipe in RECIPES
    assert all(
        hasattr(spec.output, x) or x in spec.output.__annotations__ for x in spec.output_names
    )
    assert spec.hf_auto_class.startswith("AutoModel")


@pytest.mark.parametrize("head", encoder_heads())
def test_outputs_have_the_declared_arrays(head):
    own = (x for name, x in families().items() if FAMILIES[name].startswith("encoders"))
    family = next(x for x in own if head in x.config(**SIZES).heads)
    config = family.config(**SIZES, head=head, labels=LABELS)
    model = models.create(config)
    inputs = family.smallest_inputs(config)
    params = jax.eval_shape(lambda: models.init_params(model, jax.random.key(0)))

    def look(params):
        outputs = model.apply({"params": params}, **inputs)
        assert isinstance(outputs, HEADS[head].output)
        return {name: getattr(outputs, name) for name in HEADS[head].output_names}

    outputs = jax.eval_shape(look, params)  # a name without an array has no shape
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in outputs.values())


@pytest.mark.slow
def test_a_new_record_is_trained(monkeypatch):
    spec = dataclasses.replace(HEADS["token_classification"], name="last", module=LastTokenHead)
    monkeypatch.setitem(HEADS, "last", spec)
    monkeypatch.setattr(models.BertConfig, "heads", ("last",))
    model = models.create(models.BertConfig(**SIZES, head="last", labels=LABELS))
    params = models.init_params(model, jax.random.key(0))
    tx = optax.sgd(0.1)
    step = jax.jit(train.make_train_step(model.apply, train.CLASSIFICATION, tx))
    ids = jnp.arange(8).reshape(2, 4)
    batch = {"input_ids": ids, "attention_mask": jnp.ones_like(ids), "labels": jnp.array([0, 1])}
    state, metrics = step(train.init_state(params, tx), batch, jax.random.key(1))
    before, after = (x["head"]["labels"]["kernel"] for x in (params, state.params))
    assert np.isfinite(metrics["loss"])
    assert (before != after).any()
    assert train.parameter_shardings(params, train.make_mesh(train.MeshConfig()))


def test_logits_are_hidden_states_times_the_tied_embedding(tiny):
    model = tiny()
    out = model(input_ids=np.arange(5)[None])
    table = model.params["token_embedding"]["embedding"]
    expected = np.einsum("BTD,VD->BTV", out.last_hidden_state, table)
    np.testing.assert_allclose(out.logits, expected, rtol=0, atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, out.projection.kernel, table)
