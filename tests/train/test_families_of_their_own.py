"""Patterns of parameter paths concern the models of their own family."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flaxzoo import models, train
from flaxzoo.models.registry import Family, families
from flaxzoo.train.optim.optimizer import rate_factors
from jax.sharding import PartitionSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixerConfig(models.TransformerConfig):
    """The configuration of a toy family."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolConfig(models.TransformerConfig):
    """The configuration of another one, which has a parameter of the same name."""


@pytest.fixture
def toys(monkeypatch):
    """Two families that shard `mix/kernel` over different axes, and place it in the model so."""
    for cls, axes, below in (
        (MixerConfig, ("model", "feed_forward"), "mix"),
        (PoolConfig, (None, "model"), "nothing"),
    ):
        family = Family(
            config=cls,
            module=nn.Module,
            presets={},
            parameter_axes={r"mix/kernel": axes},
            below_layers=below,
            above_layers="mix|head",
        )
        monkeypatch.setitem(families(), cls.__name__, family)
    sizes = {"vocab_size": 8, "max_length": 8, "num_layers": 2, "d_model": 8, "num_heads": 2}
    return MixerConfig(**sizes), PoolConfig(**sizes)


PARAMS = {"mix": {"kernel": jax.ShapeDtypeStruct((8, 8), jnp.float32)}}


def test_two_families_may_shard_one_path_over_different_axes(toys):
    over = train.make_mesh(train.MeshConfig(data=2, fsdp=2, tensor=2))
    specs = [
        train.parameter_shardings(PARAMS, over, config)["mix"]["kernel"].spec for config in toys
    ]
    assert specs == [PartitionSpec("fsdp", "tensor"), PartitionSpec(None, "fsdp")]
    tx = optax.sgd(0.1, momentum=0.9)
    state = jax.eval_shape(lambda: train.init_state(jax.tree.map(jnp.zeros_like, PARAMS), tx))
    placed = train.state_shardings(state, over, toys[1])
    assert {x.spec for x in jax.tree.leaves(placed) if len(x.spec)} == {specs[1]}
    with pytest.raises(ValueError, match=r"2 rules .*all families"):
        train.parameter_shardings(PARAMS, over)


def test_layer_decay_asks_the_models_own_family(toys):
    config = train.OptimizerConfig(peak_learning_rate=1e-3, layer_decay=0.5)
    rates = [rate_factors(PARAMS, config, model)["mix"]["kernel"] for model in toys]
    assert [float(x) for x in rates] == [0.5, 1.0]  # below the layers (none are stored), above
