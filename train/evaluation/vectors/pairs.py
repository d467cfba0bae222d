"""Scores pairs of vectors in the same way as the evaluators of sentence-transformers."""

from collections.abc import Sequence

import numpy as np

from ....data.common.fields import require
from ....models.text.embed import normalized
from .nearest import nearest


def cosines(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Returns the cosine of each pair of vectors: float32 `[N]` for two arrays `[N, D]`.

    Raises:
        UserError: the shapes differ.
    """
    shapes = np.shape(first), np.shape(second)
    problem = (
        f"the two arrays must have the same shape, got {list(shapes[0])} and {list(shapes[1])}"
    )
    require(shapes[0] == shapes[1], f"{problem}: give two vectors for each pair")
    return (normalized(first) * normalized(second)).sum(-1)


def similarity_scores(
    first: np.ndarray, second: np.ndarray, labels: Sequence[float] | Sequence[int] | np.ndarray
) -> dict[str, float]:
    """Correlates the cosines of pairs with their scores, as EmbeddingSimilarityEvaluator does.

    Args:
        first: float `[N, D]`.
        second: float `[N, D]`.
        labels: the score of each pair, `[N]`.

    Returns:
        `spearman`, the rank correlation, and `pearson`, the linear correlation.

    Raises:
        UserError: the shapes differ, or the scores or the cosines are all equal.
    """
    from scipy.stats import pearsonr, spearmanr

    similarities = cosines(first, second)
    for name, values in {"labels": labels, "the cosines": similarities}.items():
        require(
            len(values) == len(similarities) > 1 and len(set(map(float, values))) > 1,
            f"{name} must have different values for the {len(similarities)} pairs, got "
            f"{len(values)}: give pairs that differ in similarity",
        )
    return {
        "spearman": float(spearmanr(labels, similarities)[0]),  # pyright: ignore[reportArgumentType]
        "pearson": float(pearsonr(labels, similarities)[0]),  # pyright: ignore[reportArgumentType]
    }


def pair_classification_scores(
    first: np.ndarray, second: np.ndarray, labels: Sequence[int] | np.ndarray
) -> dict[str, float]:
    """Scores how well cosines classify pairs as similar, as BinaryClassificationEvaluator does.

    Args:
        first: float `[N, D]`.
        second: float `[N, D]`.
        labels: 1 if the texts of a pair are similar, else 0, `[N]`.

    Returns:
        `accuracy` at the threshold that maximizes the accuracy (`accuracy_threshold`), `f1`,
        `precision`, `recall` and `mcc` (Matthews correlation coefficient) at the threshold that
        maximizes F1 (`f1_threshold`), and `ap` (average precision).

    Raises:
        UserError: the shapes differ, a label is neither 0 nor 1, or all labels are equal.
    """
    from sklearn.metrics import average_precision_score, matthews_corrcoef

    scores, truth = cosines(first, second), np.asarray(labels)
    kinds = sorted(set(truth.tolist()))
    require(
        kinds == [0, 1] and truth.shape == scores.shape,
        f"labels must be 0 or 1 for each of the {len(scores)} pairs, with both values, got "
        f"{len(truth)} of {kinds[:4]}",
    )
    # Sort the pairs by score. Pairs with equal scores form a group, and a threshold lies between
    # two groups.
    order = np.argsort(-scores, kind="stable")
    ranked, positive = scores[order], truth[order] == 1
    last = np.flatnonzero(np.append(ranked[:-1] != ranked[1:], True))
    lower = np.append(ranked[last[1:] - np.diff(last) + 1], ranked[-1])
    middle = (ranked[last] + lower) / 2
    # If a midpoint is rounded down to the next group's score, use the score of the upper group
    # instead, so that the threshold excludes the next group.
    thresholds = np.where(middle == lower, ranked[last], middle)
    hits, num_predicted = positive.cumsum()[last], last + 1
    # For the accuracy, there is an additional threshold above all scores. At this threshold, no
    # pair is classified as similar.
    correct = np.append(0, 2 * hits - num_predicted) + (~positive).sum()
    above = np.nextafter(ranked[0], np.float32(np.inf))
    # F1 = 2 · hits / (predicted positives + true positives), at each threshold.
    f1 = 2 * hits / (num_predicted + positive.sum())
    best = int(f1.argmax())
    predicted = scores >= thresholds[best]
    return {
        "accuracy": float(correct.max() / len(truth)),
        "accuracy_threshold": float(np.append(above, thresholds)[correct.argmax()]),
        "f1": float(f1[best]),
        "f1_threshold": float(thresholds[best]),
        "precision": float(hits[best] / num_predicted[best]),
        "recall": float(hits[best] / positive.sum()),
        "ap": float(average_precision_score(truth, scores)),
        "mcc": float(matthews_corrcoef(truth, predicted)),
    }


def triplet_scores(
    anchors: np.ndarray, positives: np.ndarray, negatives: np.ndarray
) -> dict[str, float]:
    """Scores triplets of vectors, given as three arrays, float `[N, D]`, as TripletEvaluator does.

    Returns:
        `accuracy`: the fraction of triplets in which the positive has a larger cosine with the
          anchor than the negative has.

    Raises:
        UserError: the shapes differ.
    """
    closer = cosines(anchors, positives) > cosines(anchors, negatives)
    return {"accuracy": float(closer.mean())}


def bitext_scores(
    sources: np.ndarray,
    targets: np.ndarray,
    *,
    texts: tuple[Sequence[str], Sequence[str]] | None = None,
) -> dict[str, float]:
    """Scores the retrieval of each sentence's translation, as TranslationEvaluator and MTEB do.

    Args:
        sources: float `[N, D]`.
        targets: float `[N, D]`; row i translates row i of `sources`.
        texts: the texts of the sources and the texts of the targets. A different row with the same
          text is then also a correct result. If None, only row i is correct for row i.

    Returns:
        `source_to_target_accuracy`, `target_to_source_accuracy`, their mean `accuracy`, and `f1`,
        the macro-averaged F1 of the sources, where source i is the only member of class i.

    Raises:
        UserError: the shapes differ.
    """
    num_pairs = len(cosines(sources, targets))
    rows = np.arange(num_pairs)
    keys = (rows, rows) if texts is None else tuple(np.array(one, object) for one in texts)
    vectors = normalized(sources), normalized(targets)
    forward = nearest(vectors[0], vectors[1], 1)[1][:, 0]
    backward = nearest(vectors[1], vectors[0], 1)[1][:, 0]
    accuracies = [
        float(np.mean(keys[1][forward] == keys[1])),
        float(np.mean(keys[0][backward] == keys[0])),
    ]
    # Source i is the only member of class i.
    counts = np.bincount(forward, minlength=num_pairs)
    return {
        "source_to_target_accuracy": accuracies[0],
        "target_to_source_accuracy": accuracies[1],
        "accuracy": sum(accuracies) / 2,
        "f1": float(np.mean(2 * (forward == rows) / (counts + 1))),
    }
