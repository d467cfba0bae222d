"""An objective that compares the model with frozen parameters, as distillation and DPO do."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flaxzoo import data, models, train
from flaxzoo.train.engine.checkpoint import Checkpoints
from flaxzoo.train.engine.compile import compile_trainer

from ...support.devices import on_devices


def is_real(batch):
    return (batch["segment_ids"] != 0).astype(jnp.float32)


def terms(outputs, batch, reference):
    """Next tokens, and KL(reference ‖ model) at the same positions."""
    ours, theirs = (jax.nn.log_softmax(x.logits) for x in (outputs, reference))
    kl = jnp.sum(jnp.exp(theirs) * (theirs - ours), axis=-1)
    return {**train.CAUSAL.terms(outputs, batch), "kl": jnp.sum(kl * is_real(batch))}


OBJECTIVE = dataclasses.replace(
    train.CAUSAL,
    coefficients={"next_token": 1.0, "kl": 0.5},
    counts=lambda batch: dict.fromkeys(("next_token", "kl"), jnp.sum(is_real(batch))),
    terms=terms,
    reference=True,
)
WAYS = {
    "fsdp 4, tensor 2": {"mesh": train.MeshConfig(data=1, fsdp=4, tensor=2)},
    "2 micro-batches": {"micro_batches": 2},
    "pmap": {"parallel": "pmap"},
}


def run(config, batches):
    """Returns the trainer, the first and the last state, and the metrics of each batch."""
    trainer = compile_trainer(config, OBJECTIVE)
    state, metrics = trainer.init(), []
    initial = jax.device_get(state)
    for batch in batches:
        state, values = trainer.step(state, batch)
        metrics.append({name: float(x) for name, x in values.items()})
    sums, counts, _ = trainer.evaluate(state, batches[0])
    metrics.append({name: float(sums[name] / counts[name]) for name in sums})
    return trainer, initial, state, metrics


@pytest.fixture(scope="module")
def one_device(train_config, batches):
    with on_devices(1):
        return run(train_config(), batches)


def assert_equal(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.slow
def test_the_reference_is_the_initial_model_and_stays(one_device):
    _, initial, state, metrics = one_device
    assert_equal(state.frozen, initial.params)
    pairs = zip(*map(jax.tree.leaves, (state.params, initial.params)), strict=True)
    assert any((a != b).any() for a, b in pairs)
    # Before the first step the two differ by the model's dropout alone, which the reference lacks.
    assert 0 < metrics[0]["kl"] < metrics[-1]["kl"]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_every_way_trains_the_same_model(way, train_config, batches, one_device):
    _, initial, state, metrics = run(train_config(**WAYS[way]), batches)
    for ours, expected in zip(metrics, one_device[3], strict=True):
        # The KL term is small beside the logarithms that it is the difference of.
        assert ours == pytest.approx(expected, rel=2e-6, abs=1e-7)
    for a, b in zip(*(jax.tree.leaves(x) for x in (state, one_device[2])), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=0, atol=2e-6)
    assert_equal(state.frozen, initial.params)
    of = [jax.tree.map(lambda x: x.sharding, x) for x in (state.params, state.frozen)]
    assert of[0] == of[1]


def test_a_resumed_run_is_the_run_never_stopped(tmp_path, batches, one_device):
    trainer, _, last, _ = one_device
    state, _ = trainer.step(trainer.init(), batches[0])
    with Checkpoints(tmp_path, keep_last=1, keep_best=0) as checkpoints:
        checkpoints.save(state, {}, None)
        checkpoints.wait()
        state, _ = checkpoints.restore(1, trainer.shapes)
    for batch in batches[1:]:
        state, _ = trainer.step(state, batch)
    assert_equal(state, last)


def test_a_checkpoint_without_frozen_parameters_is_refused(tmp_path, one_device):
    trainer = one_device[0]
    with Checkpoints(tmp_path, keep_last=1, keep_best=0) as checkpoints:
        checkpoints.save(dataclasses.replace(trainer.init(), frozen=None), {}, None)
        checkpoints.wait()
        with pytest.raises(train.RunError, match=r"checkpoint 0 .*frozen parameters"):
            checkpoints.restore(0, trainer.shapes)


def test_a_state_without_frozen_parameters_is_refused(batches):
    with pytest.raises(ValueError, match=r"state .*frozen parameters"):
        OBJECTIVE.apply(lambda *_, **__: None, {}, jax.tree.map(jnp.asarray, batches[0]))


def test_precomputed_log_probabilities_are_of_the_whole_model(tmp_path, monkeypatch):
    monkeypatch.setenv("FLAXZOO_CACHE", str(tmp_path / "cache"))
    tokenizer = data.train_tokenizer(["user: bot: \n"], data.TokenizerConfig(kind="characters"))
    sizes = {"max_length": 16, "num_layers": 1, "d_model": 8, "num_heads": 2}
    config = models.GPTConfig(vocab_size=tokenizer.vocab_size, **sizes)
    params = models.init_params(models.create(config), jax.random.key(0))
    pairs = data.Examples.of([{"prompt": "us", "chosen": "er", "rejected": " bot"}])
    dpo = data.DPOData(source=pairs, length=8, tokenizer=data.TokenizerConfig(kind="characters"))
    found = []
    for name, norm_eps in (("one", 1e-5), ("other", 1.0)):  # the same parameters
        model = models.create(dataclasses.replace(config, norm_eps=norm_eps))
        train.save_run(tmp_path / name, model, params, tokenizer)
        reference = train.ReferenceModel(str(tmp_path / name), log=lambda _: None)
        split = dpo.with_reference(reference).whole_source(pairs, tokenizer, ())
        found.append(split.examples.reference_log_probs)
    assert not np.allclose(*found)
