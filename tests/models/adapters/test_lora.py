"""Adapters of low rank: where they are, what they compute, and the model they merge into."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flaxzoo import models
from flaxzoo.models.adapters.lora import by_path, linear_maps, nested

IDS = np.arange(24, dtype=np.int32).reshape(3, 8)
INPUTS = {
    "gpt": {"input_ids": IDS},
    "bert": {"input_ids": IDS},
    "transformer": {"input_ids": IDS, "decoder_input_ids": IDS[:, :5]},
}
HEADS = {"bert": {"head": "sequence_classification", "labels": ("no", "yes")}}


def adapted(tiny, family, **fields):
    """A tiny model, adapters on every map but the head's, and both parts of its parameters."""
    t = tiny(family=family, **HEADS.get(family, {}))
    settings = {"targets": (".*",), "rank": 3, **fields}
    if family in HEADS:
        settings["also_trained"] = ("head",)
    lora = models.make_lora(models.LoRAConfig(**settings), t.model)
    trained, frozen = jax.jit(lora.init)(jax.random.key(1), t.params)
    return t, lora, trained, frozen


def perturbed(params, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: x + jnp.asarray(rng.normal(0, 0.1, x.shape), x.dtype), params)


def values(outputs):
    return np.asarray(outputs.logits)


@pytest.mark.slow
@pytest.mark.parametrize("family", INPUTS)
def test_a_model_begins_as_its_base_and_merges_into_one_that_computes_the_same(family, tiny):
    t, lora, trained, frozen = adapted(tiny, family)
    apply = jax.jit(lora.adapt(lambda variables, **inputs: t.model.apply(variables, **inputs)))
    zero, off = lora.combine(trained, frozen)
    inputs = INPUTS[family]
    base = values(apply({"params": off}, **inputs))
    np.testing.assert_array_equal(values(apply({"params": zero}, **inputs)), base)
    tuned = perturbed(trained)
    ours = values(apply({"params": lora.combine(tuned, frozen)[0]}, **inputs))
    assert np.abs(ours - base).max() > 1e-3
    merged = jax.jit(lora.merge)(tuned, frozen)
    assert jax.tree.map(jnp.shape, merged) == jax.tree.map(jnp.shape, t.params)
    np.testing.assert_allclose(values(apply({"params": merged}, **inputs)), ours, atol=2e-5)


def test_exactly_one_factor_is_zero_and_the_other_is_uniform_as_in_peft(tiny):
    _, lora, trained, frozen = adapted(tiny, "bert")
    factors = by_path(trained)
    for m in lora.maps:
        a, b = factors.pop(f"{m.path}/lora_a"), factors.pop(f"{m.path}/lora_b")
        limit = np.prod(m.inputs) ** -0.5
        assert 0.5 * limit < np.abs(a).max() <= limit
        assert not b.any()
        assert a.shape[-1] == 3
    # All else that is trained belongs to the head, and nothing is both trained and frozen.
    assert factors.keys() == {f"head/classifier/{name}" for name in ("kernel", "bias")}
    assert not factors.keys() & by_path(frozen).keys()


def test_the_reference_has_the_initial_value_of_what_is_trained_whole(tiny):
    t, lora, _, _ = adapted(tiny, "bert")
    trained, frozen = lora.init(jax.random.key(1), t.params, keep_initial=True)
    on, off = lora.combine(perturbed(trained), frozen)
    jax.tree.map(np.testing.assert_array_equal, off, t.params)
    kernels = [tree["head"]["classifier"]["kernel"] for tree in (on, off)]
    assert not np.array_equal(*kernels)


@pytest.mark.slow
def test_dropout_is_a_function_of_row_layer_and_map(tiny):
    t, lora, trained, frozen = adapted(tiny, "gpt", dropout_rate=0.5)
    params = lora.combine(perturbed(trained), frozen)[0]
    keys = models.row_keys(jax.random.key(2), 3)

    scanned, unrolled = (
        jax.jit(lora.adapt(models.create(t.config, models.Execution(**how)).apply))
        for how in ({"remat": "dots"}, {"layers": "unroll"})
    )
    whole = values(scanned({"params": params}, input_ids=IDS, rng=keys))
    alone = values(unrolled({"params": params}, input_ids=IDS[1:2], rng=keys[1:2]))
    np.testing.assert_allclose(alone, whole[1:2], atol=2e-5)
    other = values(scanned({"params": params}, input_ids=IDS, rng=keys[::-1]))
    assert np.abs(other - whole).max() > 1e-2
    drawn = jax.tree.leaves(lora._keys_of_maps(params, keys))
    data = np.concatenate([np.asarray(jax.random.key_data(x)).reshape(-1, 2) for x in drawn])
    assert len(np.unique(data, axis=0)) == len(data) == 2 * 3 * len(lora.maps)


@pytest.mark.slow
def test_the_choices_of_a_question_have_dropout_of_their_own(tiny):
    t = tiny(family="bert", head="multiple_choice")
    lora = models.make_lora(models.LoRAConfig(dropout_rate=0.5, targets=("query",)), t.model)
    trained, frozen = jax.jit(lora.init)(jax.random.key(1), t.params)
    params = lora.combine(perturbed(trained), frozen)[0]
    apply = jax.jit(lora.adapt(t.model.apply))
    ids = np.broadcast_to(IDS[:1], (3, 2, 8))  # equal texts
    logits = values(
        apply({"params": params}, input_ids=ids, rng=models.row_keys(jax.random.key(2), 3))
    )
    assert len(np.unique(logits)) == 6


def test_targets_name_whole_parts_of_paths(tiny):
    def paths(*targets, family="transformer", **fields):
        model = tiny(family=family, **fields).model
        return {m.path for m in models.make_lora(models.LoRAConfig(targets=targets), model).maps}

    assert paths("query", family="gpt") == {"layers/attention/query"}
    both = {f"{side}/layers/attention/{part}" for side in ("encoder", "decoder") for part in "qk"}
    both = {path.replace("/q", "/query").replace("/k", "/key") for path in both}
    assert paths("attention/(query|key)") == both
    assert paths("decoder/.*cross_attention/output") == {"decoder/layers/cross_attention/output"}
    assert len(paths(".*", family="gpt")) == 6
    assert paths(".*") == set(linear_maps(tiny(family="transformer").model))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"targets": ("quer",)}, "lora.targets 'quer' .*query"),
        ({"targets": ("(",)}, r"lora.targets '\(' "),
        ({"targets": ()}, r"lora.targets \(\) must name"),
        ({"also_trained": ("nothing",)}, "lora.also_trained 'nothing'"),
        ({"targets": ("query",), "also_trained": ("layers",)}, "lora.also_trained"),
        ({"rank": 0}, "rank must .*0"),
        ({"alpha": 0.0}, "alpha must .*0.0"),
        ({"dropout_rate": 1.0}, "dropout_rate must .*1.0"),
    ],
)
def test_settings_that_cannot_be_are_refused(fields, message, tiny):
    with pytest.raises(ValueError, match=message):
        models.make_lora(models.LoRAConfig(**fields), tiny().model)


def test_the_scale_is_peft_s():
    assert models.LoRAConfig(rank=4, alpha=16.0).scale == 4
    assert models.LoRAConfig(rank=4, alpha=16.0, use_rslora=True).scale == 8


def test_a_base_in_bfloat16_rounds_what_is_frozen_alone(tiny):
    t, lora, trained, frozen = adapted(tiny, "bert", frozen_dtype="bfloat16")
    assert {x.dtype for x in jax.tree.leaves(frozen)} == {jnp.dtype("bfloat16")}
    assert {x.dtype for x in jax.tree.leaves(trained)} == {jnp.dtype("float32")}
    rounded = {
        path: x if path.startswith("head") else x.astype(jnp.bfloat16).astype(jnp.float32)
        for path, x in by_path(t.params).items()
    }
    merged = lora.merge(trained, frozen)
    jax.tree.map(np.testing.assert_array_equal, merged, nested(rounded))


@pytest.mark.parametrize(
    ("name", "ours"),
    # A GPT has no gate.
    [("all-linear", r"'\.\*'"), ("q_proj", "'query'"), ("gate_proj", "(?!.*'gate')")],
)
def test_a_target_of_peft_is_translated(tiny, name, ours):
    with pytest.raises(ValueError, match=f"lora.targets '{name}'.*{ours}"):
        adapted(tiny, "gpt", targets=(name,))
