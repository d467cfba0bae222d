"""Scores of vectors during training, from the texts that the validation data repeat."""

import numpy as np
import pytest
from flaxzoo import data, train
from flaxzoo.train.evaluation.vectors.held_out import label_scores, vector_scores
from flaxzoo.train.losses.eval_step import Evaluation

RNG = np.random.default_rng(0)
VECTORS = {text: RNG.normal(size=4).astype(np.float32) for text in "abcdefgh"}
WORDS = data.TokenizerConfig(kind="words")


def evaluated(rows):
    """The scores of rows of texts, whose vectors are fixed."""
    source = data.Examples.of(rows)
    config = data.EmbeddingData(source=source, validation=source, length=8, tokenizer=WORDS)
    tokenizer = config.make_tokenizer()
    split = config.validation_split(tokenizer, ())

    def vectors(ids):
        texts = [tokenizer.decode([int(x) for x in row if x]) for row in ids]
        return np.stack([VECTORS.get(text, np.zeros(4, np.float32)) for text in texts])

    number = split.examples.num_examples
    arrays = [split.examples.example(0, i) for i in range(number)]
    found = {
        "anchors": vectors([one["anchor_ids"] for one in arrays]),
        "documents": np.stack([vectors(one["input_ids"]) for one in arrays]),
    }
    return vector_scores(Evaluation(0.0, {}, {}, found), split)


def test_each_text_is_searched_once():
    rows = [
        {"anchor": "a", "positive": "e", "negative": "f"},
        {"anchor": "b", "positive": "e", "negative": "g"},
        {"anchor": "a", "positive": "h", "negative": None},
        {"anchor": "c", "positive": "f", "negative": "d"},
    ]
    queries, documents = (np.stack([VECTORS[x] for x in texts]) for texts in ("abc", "efghd"))
    relevant = [{0: 1, 3: 1}, {0: 1}, {1: 1}]
    assert evaluated(rows) == pytest.approx(train.retrieval_scores(queries, documents, relevant))


def test_scored_pairs_are_compared_with_their_scores():
    rows = [{"text1": a, "text2": b, "score": i} for i, (a, b) in enumerate(["ab", "cd", "ef"])]
    first, second = (np.stack([VECTORS[x] for x in texts]) for texts in ("ace", "bdf"))
    expected = train.similarity_scores(first, second, [0, 1, 2])
    assert evaluated(rows) == pytest.approx(expected)


def test_a_score_that_is_a_difference_is_not_compared_with_a_cosine():
    rows = [{"anchor": "a", "positive": "b", "negative": "c", "score": i} for i in range(3)]
    assert evaluated(rows) == {}


def test_equal_cosines_have_no_correlation():
    rows = [{"text1": "a", "text2": "b", "score": i} for i in range(3)]
    assert evaluated(rows) == {"spearman": 0.0, "pearson": 0.0}


def test_the_nearest_other_text_has_the_same_label():
    vectors = np.array([[1, 0], [1, 0], [0.9, 0.1], [0, 1]], np.float32)
    assert label_scores(vectors, np.array([0, 0, 1, 1])) == {"label_accuracy": 0.75}
    assert label_scores(vectors[:1], np.array([0])) == {}
