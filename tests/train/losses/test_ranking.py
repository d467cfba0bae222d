"""Losses of rerankers equal sentence-transformers in value and gradient."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flaxzoo.train.losses import ranking
from flaxzoo.train.losses.cross_entropy import sigmoid_cross_entropy, softmax_cross_entropy

from ...support.stated_table import check_row

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from sentence_transformers.cross_encoder import CrossEncoder, losses

GUIDE, HEADING = "docs/explain/losses.md", "loss of scores"
B, C = 4, 5
RNG = np.random.default_rng(0)
SCORES = RNG.normal(size=(B, C)).astype(np.float32)
LABELS = RNG.integers(0, 3, size=(B, C)).astype(np.float32)
NUMBERS = (5, 3, 4, 2)
"""The documents of each query; further ones are missing."""
REAL = np.arange(C) < np.array(NUMBERS)[:, None]
GIVEN = (jnp.asarray(LABELS), jnp.asarray(REAL))


class Scores(CrossEncoder):
    """A model that returns a parameter for each pair (query, document), named by indices."""

    def __init__(self, table):
        torch.nn.Module.__init__(self)
        self.table = torch.nn.Parameter(torch.tensor(table))

    @property
    def num_labels(self) -> int:
        return 1

    @property
    def device(self):
        return torch.device("cpu")

    def preprocess(self, inputs: Any, prompt=None, **kwargs) -> Any:
        return {"pairs": torch.tensor([[int(query), int(document)] for query, document in inputs])}

    def forward(self, input: Any, **kwargs) -> Any:
        query, document = input["pairs"].T
        return {"scores": self.table[query, document][:, None]}


class Classes(Scores):
    """A model that returns a row of the parameter for each pair."""

    @property
    def num_labels(self) -> int:
        return C

    def forward(self, input: Any, **kwargs) -> Any:
        return {"scores": self.table[input["pairs"][:, 0]]}


def theirs(loss_class, documents, labels, table=SCORES, made=Scores, **options):
    """The loss of the package and its gradient; `documents` are columns, or a list for each."""
    model = made(table)
    queries = [str(i) for i in range(len(table))]
    loss = loss_class(model, **options)([queries, *documents], labels)
    loss.backward()
    assert model.table.grad is not None
    return loss.item(), model.table.grad.numpy()


def compare(name, ours, expected, table=SCORES):
    value, gradient = jax.value_and_grad(ours)(jnp.asarray(table))
    assert np.abs(expected[1]).max() > 1e-3
    measured = [abs(float(value) - expected[0]), float(np.abs(gradient - expected[1]).max())]
    print(name, measured)
    assert max(measured) < 1e-5
    check_row(GUIDE, HEADING, name, measured)


ROWS = {
    "list_net": "`list_net`",
    "rank_net": "`rank_net`",
    "lambda_rank": "`lambda`, `lambda_rank`",
    "ndcg_loss_2": "`lambda`, `ndcg_loss_2`",
    "ndcg_loss_2pp": "`lambda`, `ndcg_loss_2pp`",
}
"""The names of the rows of the guide's table."""
LISTS = {
    "list_net": (losses.ListNetLoss, {}),
    "rank_net": (losses.RankNetLoss, {"sigma": 2.0}),
    "lambda_rank": (losses.LambdaLoss, {"weighting_scheme": losses.LambdaRankScheme()}),
    "ndcg_loss_2": (losses.LambdaLoss, {"weighting_scheme": losses.NDCGLoss2Scheme()}),
    "ndcg_loss_2pp": (losses.LambdaLoss, {}),
}


@pytest.mark.parametrize("name", LISTS)
def test_losses_of_lists_equal_the_package(name):
    loss_class, options = LISTS[name]
    documents = [[str(c) for c in range(number)] for number in NUMBERS]
    labels = [torch.tensor(row[:n]) for row, n in zip(LABELS, NUMBERS, strict=True)]
    expected = theirs(loss_class, [documents], labels, **options)

    def ours(scores):
        if name == "list_net":
            return jnp.mean(ranking.list_net(scores, *GIVEN))
        sigma = options.get("sigma", 1.0)
        weighting = "none" if name == "rank_net" else name
        sums = ranking.lambda_loss(scores, *GIVEN, weighting=weighting, sigma=sigma)
        return jnp.sum(sums) / jnp.sum(ranking.ordered_pairs(*GIVEN))

    compare(ROWS[name], ours, expected)


def test_losses_of_single_pairs_equal_the_package():
    wanted = np.array([0.0, 1.0, 0.3, 1.0], np.float32)
    columns = [[str(i) for i in range(B)]]
    expected = theirs(losses.BinaryCrossEntropyLoss, columns, torch.tensor(wanted))

    def binary(scores):
        found = jnp.diagonal(scores)[:, None]
        return sigmoid_cross_entropy(found, jnp.asarray(wanted)[:, None], jnp.ones(B)) / B

    compare("`binary`", binary, expected)
    classes = np.arange(B)
    expected = theirs(losses.CrossEntropyLoss, columns, torch.tensor(classes), made=Classes)

    def several(scores):
        return softmax_cross_entropy(scores, jnp.asarray(classes), jnp.ones(B)).loss / B

    compare("several labels (`bert-classify`)", several, expected)


def test_contrast_equals_the_package():
    """With all in-batch negatives of two columns, a positive and a hard negative."""
    table = RNG.normal(size=(B, 2 * B)).astype(np.float32)
    columns = [[str(i) for i in range(B)], [str(B + i) for i in range(B)]]
    loss = losses.MultipleNegativesRankingLoss
    expected = theirs(loss, columns, None, table, num_negatives=None)
    # The positive of each query first.
    order = np.stack([np.roll(np.arange(2 * B), -i) for i in range(B)])

    def ours(scores):
        scores = jnp.take_along_axis(scores, order, axis=1)
        return jnp.mean(ranking.contrast(scores, jnp.ones(scores.shape, bool)))

    compare("`contrast`", ours, expected, table)


def test_margin_error_equals_the_package():
    columns = [[str(c)] * B for c in range(C)]
    expected = theirs(losses.MarginMSELoss, columns, torch.tensor(LABELS))
    compare("`margin_mse`", lambda s: jnp.mean(ranking.margin_error(s, GIVEN[0])), expected)


def test_measures_equal_the_scores_of_rankings(assert_close):
    from flaxzoo.train.evaluation.vectors.ranking import reranking_scores

    measures = ranking.ranking_measures(jnp.asarray(SCORES), *GIVEN)
    counted = np.asarray(ranking.can_be_ranked(*GIVEN))
    expected = reranking_scores(
        [row[:n] for row, n in zip(SCORES, NUMBERS, strict=True)],
        [row[:n] > 0 for row, n in zip(LABELS, NUMBERS, strict=True)],
    )
    assert 0 < counted.sum() < B or counted.all()
    for name, values in measures.items():
        assert_close(np.asarray(values)[counted].mean(), expected[name])


def test_equal_scores_are_not_a_perfect_ranking():
    labels = jnp.asarray([[1.0, 0.0, 0.0, 0.0]])
    measures = ranking.ranking_measures(jnp.zeros((1, 4)), labels, jnp.ones((1, 4), bool))
    assert [float(x) for [x] in measures.values()] == pytest.approx([1 / np.log2(5), 1 / 4])


def test_filler_has_no_loss_that_is_not_finite():
    """A row without documents has a finite gradient, so that a weight of 0 removes it."""
    missing = jnp.zeros((B, C), bool)
    for loss in (
        lambda s: ranking.contrast(s, missing),
        lambda s: ranking.list_net(s, GIVEN[0], missing),
        lambda s: ranking.lambda_loss(s, GIVEN[0], missing),
    ):
        assert np.isfinite(jax.grad(lambda s, f=loss: jnp.sum(f(s)))(jnp.zeros((B, C)))).all()
