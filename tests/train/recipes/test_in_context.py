"""The recipe that learns in context, and a model small enough to do so within a test."""

import dataclasses

import pytest
from flaxzoo import data, models, train


def test_an_episode_with_sixteen_examples_fits_the_context():
    config = train.recipe("in-context")
    patterns = data.Patterns.parse(config.data.source_name)
    assert patterns is not None
    assert config.data.length == config.model.max_length
    longest = max(sum(map(len, episode.lines[:17])) for episode in patterns.held_out)
    assert longest < config.model.max_length


@pytest.mark.slow
@pytest.mark.usefixtures("on_one_device")
def test_examples_of_a_task_that_was_never_trained_on_raise_the_accuracy(tmp_path):
    """Copying, with an ending that only the examples tell."""
    recipe = train.recipe("in-context")
    copying = "builtin:patterns#copy"
    config = dataclasses.replace(
        recipe,
        model=dataclasses.replace(recipe.model, max_length=96),
        data=dataclasses.replace(recipe.data, source=copying, length=96),
        # A higher rate learns in fewer steps.
        optimizer=dataclasses.replace(recipe.optimizer, peak_learning_rate=2e-3, warmup_steps=20),
        steps=300,
        evaluate_every=300,
        checkpoint_every=300,
        sample_prompt=None,
    )
    train.train(config, tmp_path / "run")
    found = models.few_shot_accuracy(
        models.ContinuationScorer.of_run(tmp_path / "run"),
        data.PATTERNS["patterns"],
        data.prompt_examples(copying),
        shots=(0, 4),
        answers="texts",
        limit=60,
    )
    assert found[0].accuracy < 0.1
    assert found[4].accuracy > 0.8
