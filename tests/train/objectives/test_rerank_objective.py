"""The objective of rerankers: what its losses learn from, and its measure."""

import pytest
from flaxzoo import data, train
from flaxzoo.data import UserError
from flaxzoo.train.losses.eval_step import Evaluation

LISTS = [{"query": "a", "documents": ["b", "c"], "scores": [0.0, 1.0]}]
PAIRS = [{"query": "a", "passage": "b", "label": 1}, {"query": "a", "passage": "c", "label": 0}]


def data_of(rows):
    words = data.TokenizerConfig(kind="words")
    return data.RerankData(source=data.Examples.of(rows), validation_fraction=0.0, tokenizer=words)


@pytest.mark.parametrize(
    ("loss", "rows", "named"),
    [
        ("contrast", LISTS, "largest score.*list_net .*lambda"),
        ("contrast", PAIRS, "contrast .*--objective.loss binary"),
        ("lambda", PAIRS, "lambda .*documents"),
        ("binary", [{**PAIRS[0], "label": 3}], "score 3, .*binary .* 0 to 1"),
    ],
)
def test_data_that_a_loss_would_not_learn_from_are_refused(loss, rows, named):
    with pytest.raises(UserError, match=named):
        train.RerankConfig(loss=loss).of_data(data_of(rows), is_default=False)


@pytest.mark.parametrize(
    ("loss", "rows"),
    [
        ("contrast", [("a", "b"), ("c", "d")]),
        ("contrast", [{**LISTS[0], "scores": [2, 1]}]),
        ("list_net", LISTS),
        ("binary", PAIRS),
    ],
)
def test_data_that_a_loss_learns_from_are_accepted(loss, rows):
    objective = train.RerankConfig(loss=loss)
    assert objective.of_data(data_of(rows), is_default=False) is objective


def test_the_loss_decides_where_no_query_can_be_ranked():
    config = data_of(PAIRS)
    split = data.DataSplit(_Examples(), [], "", "", ())
    objective, names = train.RerankConfig(), ("ndcg@10", "mrr@10")
    none = Evaluation(0.5, dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0), {})
    scores = objective.score(none, split, config)
    assert scores == {"loss": 0.5, "queries": 2}
    assert objective.to_minimize(scores) == 0.5
    some = Evaluation(0.5, dict.fromkeys(names, 0.25), dict.fromkeys(names, 2.0), {})
    assert objective.to_minimize(objective.score(some, split, config)) == -0.25


class _Examples:
    num_examples = 2
