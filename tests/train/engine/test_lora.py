"""Training adapters: only they change, and on every mesh in the same way."""

import dataclasses

import jax
import numpy as np
import pytest
from flaxzoo import models, train
from flaxzoo.models.adapters.lora import by_path, is_adapter
from flaxzoo.train.distributed import sharding

from ...support.devices import on_devices
from .test_reference import run

LORA = models.LoRAConfig(rank=4, alpha=16.0, dropout_rate=0.2, targets=("attention", "up"))
WAYS = {
    "fsdp 4, tensor 2": {"mesh": train.MeshConfig(data=1, fsdp=4, tensor=2)},
    "pmap, 2 micro-batches": {"parallel": "pmap", "micro_batches": 2},
}


@pytest.fixture(scope="module")
def one_device(train_config, batches):
    with on_devices(1):
        return run(train_config(lora=LORA), batches)


@pytest.mark.slow
def test_only_adapters_are_trained_and_the_reference_is_the_base_alone(one_device):
    _, first, last, metrics = one_device
    assert all(map(is_adapter, by_path(last.params)))
    jax.tree.map(np.testing.assert_array_equal, last.frozen, first.frozen)
    sizes = [sum(x.size for x in jax.tree.leaves(tree)) for tree in (last.params, last.opt_state)]
    assert sizes[0] * 2 <= sizes[1] < sizes[0] * 2 + 8  # two moments, and counters
    changed = jax.tree.map(lambda a, b: bool((a != b).any()), last.params, first.params)
    assert all(jax.tree.leaves(changed))
    # The KL to the base is that of dropout at first, and grows.
    assert 0 < metrics[0]["kl"] < metrics[-1]["kl"]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_every_way_trains_the_same_adapters(way, train_config, batches, one_device):
    _, _, last, metrics = run(train_config(lora=LORA, **WAYS[way]), batches)
    for ours, expected in zip(metrics, one_device[3], strict=True):
        assert ours == pytest.approx(expected, rel=2e-6, abs=2e-7)
    for a, b in zip(*(jax.tree.leaves(x) for x in (last, one_device[2])), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-6)


@pytest.mark.slow
def test_in_bfloat16_only_the_base_and_the_computation_are_rounded(
    train_config, batches, one_device, on_one_device
):
    """Adapters and their moments stay in float32; whatever jax's default, they begin alike."""
    lora = dataclasses.replace(LORA, frozen_dtype="bfloat16")
    config = train_config(lora=lora, execution=models.Execution(dtype="bfloat16"))
    with jax.enable_x64(True):
        _, first, last, metrics = run(config, batches)
    for a, b in zip(*(jax.tree.leaves(x.params) for x in (first, one_device[1])), strict=True):
        np.testing.assert_array_equal(a, b)
    assert {x.dtype for x in jax.tree.leaves(last.params)} == {np.dtype("float32")}
    moments = [x for x in jax.tree.leaves(last.opt_state) if x.ndim]
    assert {x.dtype for x in moments} == {np.dtype("float32")}
    assert {x.dtype for x in jax.tree.leaves(last.frozen)} == {jax.numpy.dtype("bfloat16")}
    for ours, expected in zip(metrics, one_device[3], strict=True):
        assert ours["next_token"] == pytest.approx(expected["next_token"], rel=2e-3)


def test_adapters_are_sharded_as_their_kernels(tiny):
    mesh = sharding.make_mesh(train.MeshConfig(data=1, fsdp=4, tensor=2))
    config = tiny(family="bert").config

    def spec(name, shape):
        return tuple(sharding.parameter_spec(name, shape, mesh, config))

    up = "layers/feed_forward/up"
    assert spec(f"{up}/lora_a", (2, 8, 3)) == (None, "fsdp", None)
    assert spec(f"{up}/lora_b", (2, 3, 16)) == (None, None, "tensor")
    output = "layers/attention/output"
    assert spec(f"{output}/lora_a", (2, 4, 8, 3)) == (None, "tensor", None, None)
    assert spec(f"{output}/lora_b", (2, 3, 8)) == (None, None, "fsdp")
    assert spec("head/classifier/lora_a", (8, 3)) == ("fsdp", None)
    assert spec("head/classifier/lora_b", (3, 5)) == (None, None)


def test_a_state_without_its_base_is_refused(tiny, batches):
    import optax

    t, tx = tiny(vocab_size=48), optax.sgd(0.1)
    lora = models.make_lora(LORA, t.model)
    trained, _ = lora.init(jax.random.key(0), t.params)
    step = train.make_train_step(t.model.apply, train.CAUSAL, tx, adapter=lora)
    batch = jax.tree.map(jax.numpy.asarray, batches[0])
    with pytest.raises(ValueError, match="frozen parameters"):
        step(train.init_state(trained, tx), batch, jax.random.key(0))
