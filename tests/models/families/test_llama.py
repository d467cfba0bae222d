"""Properties of every Llama: heads in groups, rotary positions, and how it is run."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flaxzoo import models, train
from flaxzoo.models.decoders.llama import PRESETS, LlamaConfig
from flaxzoo.models.init import parameter_shapes
from flaxzoo.train.distributed import sharding

CONFIG = LlamaConfig(
    vocab_size=32,
    max_length=16,
    num_layers=2,
    d_model=16,
    num_heads=4,
    num_kv_heads=2,
    d_ff=24,
    init_std=0.3,
)
IDS = np.random.default_rng(0).integers(0, 32, (8, 12))


@pytest.fixture(scope="module")
def params():
    return jax.jit(lambda: models.init_params(models.create(CONFIG), jax.random.key(0)))()


def logits_of(params, execution=models.Execution(), **inputs):
    model = models.create(CONFIG, execution)
    return np.asarray(jax.jit(lambda p, i: model.apply({"params": p}, **i).logits)(params, inputs))


def loss_of(execution):
    model = models.create(CONFIG, execution)
    return lambda p: jnp.mean(jnp.square(model.apply({"params": p}, input_ids=IDS).logits))


def test_only_distances_between_tokens_matter(params, assert_close):
    positions = np.arange(12)[None]
    moved = logits_of(params, input_ids=IDS, position_ids=positions + 100)
    assert_close(moved, logits_of(params, input_ids=IDS, position_ids=positions), 1e-4)
    stretched = logits_of(params, input_ids=IDS, position_ids=2 * positions)
    assert np.abs(moved - stretched).max() > 1e-2


def test_key_heads_that_cannot_be_sharded():
    mesh = sharding.make_mesh(train.MeshConfig(data=1, fsdp=2, tensor=4))
    message = r"attention/key/kernel .*: dimension 2 .*mesh.tensor 4"
    with pytest.raises(ValueError, match=message):
        sharding.parameter_shardings(parameter_shapes(models.create(CONFIG)), mesh)


# (V, L, D, N, K, F) of table 2 of LLaMA, section 2.2 of Llama 2, table 3 of Llama 3.
SIZES = {
    "llama-7b": (32_000, 32, 4096, 32, 32, 11_008),
    "llama-13b": (32_000, 40, 5120, 40, 40, 13_824),
    "llama-33b": (32_000, 60, 6656, 52, 52, 17_920),
    "llama-65b": (32_000, 80, 8192, 64, 64, 22_016),
    "llama2-7b": (32_000, 32, 4096, 32, 32, 11_008),
    "llama2-13b": (32_000, 40, 5120, 40, 40, 13_824),
    "llama2-70b": (32_000, 80, 8192, 64, 8, 28_672),
    "llama3-8b": (128_256, 32, 4096, 32, 8, 14_336),
    "llama3-70b": (128_256, 80, 8192, 64, 8, 28_672),
    "llama3.1-8b": (128_256, 32, 4096, 32, 8, 14_336),
    "llama3.1-70b": (128_256, 80, 8192, 64, 8, 28_672),
    "llama3.2-1b": (128_256, 16, 2048, 32, 8, 8192),
    "llama3.2-3b": (128_256, 28, 3072, 24, 8, 8192),
}


def test_every_preset_is_checked_here():
    assert PRESETS.keys() == SIZES.keys()


@pytest.mark.parametrize("name", SIZES)
def test_parameter_count(name):
    preset, (V, L, D, N, K, F) = PRESETS[name], SIZES[name]
    c = preset.config
    assert (c.vocab_size, c.num_layers, c.d_model, c.num_heads) == (V, L, D, N)
    H = D // N
    assert (c.kv_heads, c.feed_forward_dim, c.head_dim) == (K, F, H)
    attention = 2 * D * N * H + 2 * D * K * H
    total = (1 if c.tie_output else 2) * V * D + L * (attention + 3 * D * F + 2 * D) + D
    shapes = jax.tree.leaves(parameter_shapes(models.create(c)))
    assert sum(x.size for x in shapes) == total
    printed = re.fullmatch(r"([\d.]+)B", preset.published)[1]  # type: ignore[index]
    ours = f"{total / 1e9:.{len(printed.partition('.')[2])}f}"
    assert (ours != printed) == bool(preset.note)
    assert not preset.note or f"{ours}B" in preset.note


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_kv_heads": 3}, "num_heads 4 .*num_kv_heads 3: .* 1, 2, 4"),
        ({"num_kv_heads": 0}, "num_kv_heads must .*0"),
        ({"d_head": 5}, "size 5 .*d_head"),
        ({"rope_base": 0.0}, "rope_base must .*0.0"),
    ],
)
def test_bad_configurations(fields, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **fields)
