"""Losses of vectors and their gradients against sentence-transformers, on fixed vectors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flaxzoo import data, train
from flaxzoo.train.losses.embedding import in_batch, labelled, scored
from flaxzoo.train.losses.embedding.matryoshka import matryoshka
from flaxzoo.train.losses.embedding.vectors import Real, Vectors

from ..support.stated_table import check_row

torch = pytest.importorskip("torch")
theirs = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
theirs_sparse = pytest.importorskip("sentence_transformers.sparse_encoder.losses")

GUIDE, HEADING = "docs/explain/losses.md", "loss of vectors"
B, D = 6, 8
DIRECTIONS = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
SYMMETRIC = {"directions": ("query_to_doc", "doc_to_query")}
RNG = np.random.RandomState(0)
A, P, N1, N2, *GUIDES = (RNG.randn(B, D).astype(np.float32) for _ in range(8))
Y = np.array([0.1, 0.9, 0.5, 0.5, 0, 1], np.float32)
LABELS = np.array([1, 0, 0, 1, 0, 1], np.float32)
CLASSES = np.array([0, 0, 1, 1, 2, 2], np.int32)
TEACHER = RNG.randn(B, 3).astype(np.float32)
ONE, TWO = (P,), (P, N1)
DATA = data.EmbeddingData(source=[("a", "b")], length=8, tokenizer=data.TokenizerConfig())
MORE = (P, N1, N2)


class Columns(torch.nn.Module):
    """A model that returns the vectors that it is given, with a tokenizer for GIST."""

    max_seq_length = 8

    def __init__(self):
        from tokenizers import Tokenizer, models
        from transformers import PreTrainedTokenizerFast

        super().__init__()
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel()))

    def forward(self, features):
        return {"sentence_embedding": features["vectors"]}

    def get_embedding_dimension(self):
        return D


class Guide(Columns):
    """A model that returns other vectors for the columns, in their order."""

    def forward(self, features):
        return {"sentence_embedding": features["guide"]}


def real(v):
    return Real(jnp.ones(v.anchors.shape[:1], bool), jnp.ones(v.documents.shape[:2], bool))


def among(**options):
    return lambda v: in_batch.multiple_negatives(v, real(v), **options)


def ranked(**options):
    return lambda model: theirs.MultipleNegativesRankingLoss(model, **options)


def ordered(similarity, scale=20.0):
    return lambda v: scored.cosent(similarity(v), jnp.asarray(Y), real(v).pairs, scale=scale)


def guided(**options):
    return lambda model: theirs.GISTEmbedLoss(model, Guide(), **options)


def ours_guided(**options):
    return lambda v: in_batch.gist(v, real(v), **options)


def nested(loss):
    return lambda model: theirs.MatryoshkaLoss(model, loss(model), [8, 4, 2], [1, 0.5, 2])


def ours_nested(loss):
    return matryoshka(loss, (8, 4, 2), (1.0, 0.5, 2.0))


def distilled(v):
    return scored.distillation(v, jnp.asarray(TEACHER), real(v), temperature=2.0)


def to_each(name):
    return getattr(theirs.BatchHardTripletLossDistanceFunction, f"{name}_distance")


def regularized(make):
    return lambda model: theirs_sparse.SpladeLoss(model, make(model), 0.3, 0.5)


def ours_regularized(given=None, **options):
    """A weight of each term, as in the last step of a ramp."""
    config = train.SpladeConfig(document_weight=0.3, query_weight=0.5, **options)

    def loss(v):
        objective, v = config.build(DATA), Vectors(v.anchors, v.documents)
        masks = jnp.ones((B, 2)), jnp.ones((B, v.documents.shape[1], 2), int)
        batch = {"anchor_mask": masks[0], "input_ids": masks[1], "attention_mask": masks[1]}
        batch |= {} if given is None else {"scores": jnp.asarray(given)}
        sums, counts = objective.terms(v, batch), objective.counts(batch)
        return sum(c * sums[name] / counts[name] for name, c in objective.coefficients.items())

    return loss


HARD = {"hardness_strength": 5.0}
# Name: documents, labels, the loss of sentence-transformers, ours.
CASES = {
    "`multiple_negatives`": (ONE, None, ranked(), among()),
    "`multiple_negatives`, hard negatives": (MORE, None, ranked(), among()),
    "`multiple_negatives`, symmetric": (
        ONE,
        None,
        ranked(**SYMMETRIC, partition_mode="per_direction"),
        among(**SYMMETRIC, partition="per_direction"),
    ),
    "`multiple_negatives`, four directions": (
        TWO,
        None,
        ranked(directions=DIRECTIONS),
        among(directions=DIRECTIONS),
    ),
    **{
        f"`multiple_negatives`, hardness `{mode}`": (
            MORE,
            None,
            ranked(hardness_mode=mode, **HARD),
            among(hardness=mode, **HARD),
        )
        for mode in ("in_batch_negatives", "hard_negatives", "all_negatives")
    },
    "`cosent`": (ONE, Y, theirs.CoSENTLoss, ordered(scored.cosine)),
    "`angle`": (ONE, Y, theirs.AnglELoss, ordered(scored.angle)),
    "`cosine`": (
        ONE,
        Y,
        theirs.CosineSimilarityLoss,
        lambda v: scored.cosine_error(v, jnp.asarray(Y)),
    ),
    "`contrastive`": (
        ONE,
        LABELS,
        theirs.ContrastiveLoss,
        lambda v: scored.contrastive(v, jnp.asarray(LABELS)),
    ),
    **{
        f"`triplet`, {name}": (
            TWO,
            None,
            lambda model, name=name: theirs.TripletLoss(
                model, theirs.TripletDistanceMetric.__dict__[name.upper()]
            ),
            lambda v, name=name: scored.triplet(v, distance=name),
        )
        for name in ("euclidean", "cosine", "manhattan")
    },
    **{
        f"`batch_all_triplet`, {name}": (
            (),
            CLASSES,
            lambda model, name=name: theirs.BatchAllTripletLoss(model, to_each(name), margin=1),
            lambda v, name=name: labelled.batch_all_triplet(
                labelled.TO_EACH[name](v.anchors), jnp.asarray(CLASSES), real(v).anchors, margin=1.0
            ),
        )
        for name in ("euclidean", "cosine")
    },
    "`batch_hard_soft_margin`": (
        (),
        CLASSES,
        theirs.BatchHardSoftMarginTripletLoss,
        lambda v: labelled.batch_hard_soft_margin(
            labelled.TO_EACH["euclidean"](v.anchors), jnp.asarray(CLASSES), real(v).anchors
        ),
    ),
    "`margin_mse`": (
        MORE,
        TEACHER,
        theirs.MarginMSELoss,
        lambda v: scored.margin_error(v, jnp.asarray(TEACHER)),
    ),
    "`distillation`": (
        MORE,
        TEACHER,
        lambda model: theirs.DistillKLDivLoss(model, temperature=2.0),
        distilled,
    ),
    "`gist`": (ONE, None, guided(), ours_guided()),
    "`gist`, negatives, relative margin": (
        TWO,
        None,
        guided(margin_strategy="relative", margin=0.1, temperature=0.05, contrast_anchors=False),
        ours_guided(
            margin_strategy="relative", margin=0.1, temperature=0.05, contrast_anchors=False
        ),
    ),
    "`splade`, with regularizers": (
        TWO,
        None,
        regularized(theirs_sparse.SparseMultipleNegativesRankingLoss),
        ours_regularized(),
    ),
    "`splade` of `margin_mse`": (
        MORE,
        TEACHER,
        regularized(theirs_sparse.SparseMarginMSELoss),
        ours_regularized(TEACHER, ranking="margin_mse"),
    ),
    "`splade` of `distillation`": (
        MORE,
        TEACHER,
        regularized(theirs_sparse.SparseDistillKLDivLoss),
        ours_regularized(TEACHER, ranking="distillation", temperature=2.0),
    ),
    "Matryoshka of `multiple_negatives`": (ONE, None, nested(ranked()), ours_nested(among())),
    "Matryoshka of `distillation`": (
        MORE,
        TEACHER,
        nested(lambda model: theirs.DistillKLDivLoss(model, temperature=2.0)),
        ours_nested(distilled),
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore")  # sentence-transformers warns of scores and of dimensions
def test_loss_and_gradient(name):
    documents, labels, make_theirs, ours = CASES[name]
    columns = [torch.tensor(x, requires_grad=True) for x in (A, *documents)]
    guide = GUIDES[: len(columns)]
    features = [
        {"vectors": x, "guide": torch.tensor(g)} for x, g in zip(columns, guide, strict=True)
    ]
    given = None if labels is None else torch.tensor(labels)
    loss = make_theirs(Columns())(features, given)
    loss = torch.stack([*loss.values()]).sum() if isinstance(loss, dict) else loss
    loss.backward()

    vectors = Vectors(
        jnp.asarray(A),
        jnp.asarray(np.stack((A, *documents), axis=1)[:, 1:]),
        Vectors(jnp.asarray(guide[0]), jnp.stack(guide, axis=1)[:, 1:]),
    )
    value, slope = jax.value_and_grad(lambda v: jnp.mean(ours(v)))(vectors)
    expected = [np.asarray(x.grad) for x in columns]
    found = [np.asarray(slope.anchors), *np.moveaxis(np.asarray(slope.documents), 1, 0)]
    assert max(np.abs(x).max() for x in expected) > 1e-3
    apart = np.max([np.abs(a - b).max() for a, b in zip(found, expected, strict=True)])
    measured = [abs(float(value) - loss.item()), float(apart)]
    print(name, measured)
    assert max(measured) < 1e-5
    check_row(GUIDE, HEADING, name, measured)
