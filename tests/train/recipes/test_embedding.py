"""The recipe of vectors on built-in text, for a moment."""

import dataclasses

import pytest
from flaxzoo import models, train
from flaxzoo.train.evaluation.evaluate import score_run


@pytest.mark.slow
@pytest.mark.usefixtures("on_one_device")
def test_paragraphs_are_found_by_their_first_sentences(tmp_path):
    config = train.recipe("embed")
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, num_layers=1, d_model=32, num_heads=2),
        data=dataclasses.replace(config.data, length=32, query_length=16),
        optimizer=dataclasses.replace(config.optimizer, peak_learning_rate=5e-3),
        steps=40,
        evaluate_every=40,
        checkpoint_every=40,
    )
    train.train(config, tmp_path / "run", quiet=True)
    scores = score_run(tmp_path / "run")
    # A guess would have 0.06.
    assert scores["ndcg@10"] > 0.25
    # Without an initial model the run has settings of its objective.
    assert models.TextEmbedder.of_run(tmp_path / "run").settings.pooling == ("mean",)


def test_the_best_checkpoint_has_the_highest_ndcg():
    objective = train.recipe("embed").objective
    assert objective.to_minimize({"loss": 2.0, "ndcg@10": 0.5}) == -0.5
    assert objective.to_minimize({"loss": 2.0, "spearman": 0.25}) == -0.25
    assert objective.to_minimize({"loss": 2.0}) == 2.0


def test_a_published_model_is_fine_tuned_with_its_length():
    config = train.recipe("embed", preset="bert-base")
    assert (config.data.length, config.data.query_length, config.epochs) == (128, None, 1.0)
    assert config.optimizer.peak_learning_rate == 5e-5
