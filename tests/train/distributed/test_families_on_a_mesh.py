"""Families over eight devices: generation with sharded parameters, mixtures with a kernel."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flaxzoo import models, train
from flaxzoo.models.decoders.llama import LlamaConfig
from flaxzoo.models.decoders.mixtral import MixtralConfig
from flaxzoo.models.encoder_decoders.t5 import T5Config
from flaxzoo.train.distributed import activations, sharding
from flaxzoo.train.distributed.expert_parallel import over_mesh
from jax._src.cudnn import fused_attention_stablehlo
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

SIZES = {"vocab_size": 32, "max_length": 16, "num_layers": 2, "d_model": 16, "num_heads": 4}
GROUPED = {"num_kv_heads": 2, "d_ff": 24, "init_std": 0.3}
MIXTURE = MixtralConfig(**{**SIZES, "max_length": 128}, **GROUPED, num_experts=4, window=40)
OF_EXPERTS = train.MeshConfig(data=1, fsdp=2, expert=2, tensor=2)
DENSE = train.MeshConfig(data=2, fsdp=2, tensor=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "mesh"),
    [
        (LlamaConfig(**SIZES, **GROUPED), DENSE),
        (MixtralConfig(**SIZES, **GROUPED, num_experts=4), OF_EXPERTS),
        (T5Config(**SIZES, d_ff=24, init_std=0.3), DENSE),
    ],
    ids=["llama", "mixtral", "t5"],
)
def test_sharded_parameters_write_the_tokens_of_one_device(config, mesh, tmp_path):
    model = models.create(config)
    params = models.init_params(model, jax.random.key(0))
    models.save(tmp_path / "model", model, params)
    shardings_of = functools.partial(sharding.parameter_shardings, mesh=sharding.make_mesh(mesh))
    again, sharded = models.load(tmp_path / "model", shardings=shardings_of)
    cut = [x for x in jax.tree.leaves(sharded) if not x.sharding.is_fully_replicated]
    assert len(cut) > 5
    ids = np.random.default_rng(0).integers(3, 32, (3, 6))
    options = {"max_new_tokens": 5, "eos_token_id": 2, "decoder_start_token_id": 0}
    expected = models.generate(model, params, ids, **options)
    np.testing.assert_array_equal(models.generate(again, sharded, ids, **options), expected)


def loss_of(apply):
    ids = np.random.default_rng(0).integers(0, 32, (8, 128))
    segments = np.broadcast_to(np.repeat([1, 2, 0], [50, 70, 8]), (8, 128))

    def loss(params):
        output = apply({"params": params}, ids, segment_ids=segments)
        real = jnp.asarray(segments != 0)[..., None]
        return jnp.mean(jnp.square(output.last_hidden_state.astype(jnp.float32) * real))

    return loss


@pytest.mark.slow
def test_a_mixture_with_a_kernel_computes_what_it_does_without(monkeypatch, assert_close):
    """Splash attention, interpreted, and experts, both on each device's part."""
    interpreted = functools.partial(splash_attention_kernel.make_splash_mha, interpret=True)
    monkeypatch.setattr(splash_attention_kernel, "make_splash_mha", interpreted)
    mesh = sharding.make_mesh(OF_EXPERTS)
    model = models.create(MIXTURE, models.Execution(attention="splash"))
    params = models.init_params(model, jax.random.key(0))
    apply = activations.shard_map_attention(over_mesh(model.apply, mesh, MIXTURE), mesh)
    placed = jax.device_put(params, sharding.parameter_shardings(params, mesh))
    found = jax.jit(jax.value_and_grad(loss_of(apply)))
    assert "pallas_call" in str(found.trace(placed).jaxpr)
    expected = jax.jit(jax.value_and_grad(loss_of(models.create(MIXTURE).apply)))
    jax.tree.map(assert_close, found(placed), expected(params))


@pytest.mark.slow
def test_a_mixture_calls_cudnn_on_a_gpu(monkeypatch):
    """Lowered for a GPU that is not here: one call forward, one backward, in a scan."""
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91_000)
    config = dataclasses.replace(MIXTURE, d_model=32, window=None)  # heads of size 8
    model = models.create(config, models.Execution(dtype="bfloat16", attention="cudnn"))
    params = jax.eval_shape(lambda: models.init_params(model, jax.random.key(0)))
    traced = jax.jit(jax.grad(loss_of(model.apply))).trace(params)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert [text.count(f"@__cudnn$fmhaScaleBiasSoftmax{end}(") for end in ("", "Backward")] == [
        1,
        1,
    ]
