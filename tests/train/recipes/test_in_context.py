"""The recipe that learns in context, and a model small enough to do so within a test."""

import dataclasses

import pytest
from flaxzoo import data, models, train
from support.in_context import accuracy_by_shots


def test_an_episode_with_sixteen_examples_fits_the_context():
    config = train.recipe("in-context")
    patterns = data.Patterns.parse(config.data.source_name)
    assert config.data.length == config.model.max_length
    longest = max(sum(map(len, episode.lines[:17])) for episode in patterns.held_out)
    assert longest < config.model.max_length


@pytest.mark.slow
def test_examples_of_a_task_that_was_never_trained_on_raise_the_accuracy(tmp_path):
    """Copying, with letters around that only the examples tell."""
    recipe = train.recipe("in-context")
    config = dataclasses.replace(
        recipe,
        model=dataclasses.replace(recipe.model, num_layers=2, max_length=96),
        data=dataclasses.replace(recipe.data, source="builtin:patterns#copy", length=96),
        steps=300,
        evaluate_every=300,
        checkpoint_every=300,
        sample_prompt=None,
    )
    train.train(config, tmp_path / "run")
    model, params = models.load(tmp_path / "run")
    tokenizer = data.load_tokenizer(tmp_path / "run")
    held_out = data.Patterns.parse("builtin:patterns#copy").held_out
    accuracy = accuracy_by_shots(model, params, tokenizer, held_out, (0, 1, 4))["copy"]
    assert accuracy[0] < 0.05
    assert accuracy[4] > 0.8
