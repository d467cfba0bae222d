import dataclasses
import math

import numpy as np
import optax
import pytest
from flaxzoo.train.optim.schedules import make_schedule
from flaxzoo.train.optimizer_config import OptimizerConfig

STEPS, WARMUP, PEAK, FINAL = 100, 10, 0.5, 0.1


def rates(kind, warmup=WARMUP, steps=STEPS):
    config = OptimizerConfig(
        peak_learning_rate=PEAK, schedule=kind, warmup_steps=warmup, final_fraction=FINAL
    )
    schedule = make_schedule(config, steps)
    return np.array([float(schedule(step)) for step in range(steps)])


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "inverse_sqrt", "wsd"])
def test_warmup_rises_by_equal_parts_from_the_first_step(kind):
    np.testing.assert_allclose(rates(kind)[:WARMUP], PEAK * np.arange(1, 11) / 10, rtol=1e-6)


@pytest.mark.parametrize(
    ("kind", "middle", "end"),
    [
        ("constant", PEAK, PEAK),
        ("linear", PEAK * (1 + FINAL) / 2, PEAK * FINAL),
        ("cosine", PEAK * (1 + FINAL) / 2, PEAK * FINAL),
        ("inverse_sqrt", PEAK * math.sqrt(10 / 55), PEAK * math.sqrt(10 / 100)),
    ],
)
def test_after_the_warmup(kind, middle, end):
    values = rates(kind)
    # The peak is step 10, the last is step 100; step 55 is half-way (counted from 1).
    assert values[54] == pytest.approx(middle, rel=1e-5)
    assert values[-1] == pytest.approx(end, rel=1e-5)
    assert (np.diff(values[WARMUP - 1 :]) <= 1e-9).all()
    assert values.max() == pytest.approx(PEAK)


def test_cosine_is_a_cosine():
    progress = (np.arange(10, 101) - 10) / 90
    expected = PEAK * (FINAL + (1 - FINAL) * (1 + np.cos(np.pi * progress)) / 2)
    np.testing.assert_allclose(rates("cosine")[9:], expected, rtol=1e-5)


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_without_warmup_from_the_peak_to_the_end(kind):
    values = rates(kind, warmup=0)
    assert values[0] == pytest.approx(PEAK)
    assert values[-1] == pytest.approx(PEAK if kind == "constant" else PEAK * FINAL, rel=1e-5)
    assert rates(kind, warmup=0, steps=1)[0] == pytest.approx(PEAK)


def test_linear_is_bert_s():
    """10,000 steps up and 990,000 down, as in transformers, which counts the steps from 0."""
    warmup, steps = 10_000, 1_000_000
    config = OptimizerConfig(
        peak_learning_rate=1e-4, schedule="linear", warmup_steps=warmup, final_fraction=0.0
    )
    schedule = make_schedule(config, steps)
    for step in (1, 2, 5_000, 9_999, 10_000, 10_001, 505_000, 999_999, 1_000_000):
        rises, falls = step / warmup, (steps - step) / (steps - warmup)
        expected = 1e-4 * min(rises, falls)
        assert float(schedule(step - 1)) == pytest.approx(expected, rel=1e-5, abs=1e-11)
        # The original code falls from the first step on.
        original = 1e-4 * (rises if step < warmup else 1 - step / steps)
        assert float(schedule(step - 1)) == pytest.approx(original, rel=0.0102, abs=1e-11)


@pytest.mark.parametrize("warmup", [-1, 100, 101])
def test_warmup_must_end_within_the_run(warmup):
    with pytest.raises(ValueError, match=rf"warmup_steps .*{warmup}\b"):
        rates("cosine", warmup)


def test_inverse_sqrt_needs_a_warmup():
    with pytest.raises(ValueError, match="inverse_sqrt schedule"):
        rates("inverse_sqrt", 0)


def test_wsd_is_stable_and_then_decays():
    """Rises to step 10, stays to step 80, and falls to a tenth at step 100 (counted from 1)."""
    parts = [
        optax.linear_schedule(0.0, PEAK, WARMUP),
        optax.constant_schedule(PEAK),
        optax.linear_schedule(PEAK, PEAK * FINAL, 20),
    ]
    expected = optax.join_schedules(parts, [WARMUP, 80])
    values = rates("wsd")
    np.testing.assert_array_equal(values, np.asarray([expected(n) for n in range(1, 101)]))
    assert values[[9, 79, 89]].tolist() == pytest.approx([PEAK, PEAK, PEAK * (1 + FINAL) / 2])
    assert values[-1] == pytest.approx(PEAK * FINAL)
    # Without a stable phase it is linear.
    whole = OptimizerConfig(peak_learning_rate=PEAK, schedule="wsd", decay_fraction=1.0)
    linear = dataclasses.replace(whole, schedule="linear")
    schedules = [make_schedule(x, STEPS) for x in (whole, linear)]
    assert [float(schedules[0](i)) for i in range(STEPS)] == [
        float(schedules[1](i)) for i in range(STEPS)
    ]


def test_a_stable_phase_and_its_decay_as_a_stage_are_wsd():
    config = OptimizerConfig(
        peak_learning_rate=PEAK, schedule="wsd", warmup_steps=WARMUP, final_fraction=FINAL
    )
    whole = make_schedule(config, STEPS)
    stable = make_schedule(dataclasses.replace(config, schedule="constant"), 80)
    decay = dataclasses.replace(config, schedule="linear", warmup_steps=0)
    falls = make_schedule(decay, STEPS, start=80)
    for step in range(STEPS):
        assert float((stable if step < 80 else falls)(step)) == pytest.approx(float(whole(step)))
