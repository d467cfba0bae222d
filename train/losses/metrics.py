"""Computes the scores of predictions as the benchmarks define them.

The scores are pure functions of labels, numbers and texts. Every score is a plain float. It is a
fraction from 0 to 1 or a correlation from -1 to 1, even if papers report percentages. BLEU and chrF
range from 0 to 100, as in their reference implementation. An undefined score is 0, without a
warning. Examples are the correlation of constant predictions, and the F1 of a label that does not
occur.
"""

import importlib.util
import itertools
import re
import string
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import DTypeLike

from ...data.common.fields import require

Scores = dict[str, float]
Labels = Sequence[object] | np.ndarray
"""A number, or a list of numbers, for each example; other values raise UserError."""


def classification_scores(gold: Labels, predicted: Labels, names: Sequence[str]) -> Scores:
    """Returns accuracy, F1 and Matthews correlation of labels, as GLUE defines them.

    Args:
        gold: `[N]` indices into `names`, or an array `[N, L]` of 0 and 1 if an example has several
          labels.
        predicted: as `gold`.
        names: the L labels.

    Returns:
        `accuracy` and `matthews`, with `f1` of the second (positive) label if there are two labels,
        or `f1_macro`, the mean over the labels that occur, if there are more. If an example has
        several labels: `accuracy` (an example is correct if all of its labels are), `f1_micro` and
        `f1_macro`.

    Raises:
        UserError: there are no examples, or a prediction is missing.
    """
    from sklearn.metrics import matthews_corrcoef

    gold, predicted = _paired(gold, predicted, np.int64)
    equal = gold == predicted
    # With several labels, an example is correct if all of its labels are correct.
    if gold.ndim == 2:
        return {
            "accuracy": float(equal.all(axis=1).mean()),
            "f1_micro": _f1(gold, predicted, average="micro"),
            "f1_macro": _f1(gold, predicted, average="macro"),
        }
    # GLUE reports F1 of the positive class for two labels.
    name, average = ("f1", "binary") if len(names) == 2 else ("f1_macro", "macro")
    # Matthews correlation is undefined for a single label; sklearn would warn.
    one_label = len(np.union1d(gold, predicted)) == 1
    return {
        "accuracy": float(equal.mean()),
        name: _f1(gold, predicted, average=average),
        "matthews": 0.0 if one_label else float(matthews_corrcoef(gold, predicted)),
    }


def _f1(gold: np.ndarray, predicted: np.ndarray, *, average: str) -> float:
    """Returns F1 over all labels that occur, or only F1 of label 1 if `average` is "binary"."""
    from sklearn.metrics import f1_score

    # Leave out labels that never occur, because each would add 0 to a macro mean.
    labels = np.flatnonzero((gold + predicted).any(axis=0)) if gold.ndim == 2 else None
    if labels is not None and not len(labels):
        return 0.0
    return float(
        f1_score(gold, predicted, labels=labels, average=average, zero_division=0)  # pyright: ignore[reportArgumentType]
    )


def regression_scores(gold: Labels, predicted: Labels) -> Scores:
    """Returns Pearson's and Spearman's correlation of two `[N]` series of numbers.

    Returns:
        `pearson` and `spearman`; 0 if either series is constant.

    Raises:
        UserError: there are no examples, or a prediction is missing or not finite.
    """
    from scipy import stats

    gold, predicted = _paired(gold, predicted, np.float64)
    bad = np.count_nonzero(~np.isfinite(predicted))
    require(not bad, f"{bad} of {len(predicted)} predicted scores are not finite numbers")
    if np.ptp(gold) == 0 or np.ptp(predicted) == 0:
        return {"pearson": 0.0, "spearman": 0.0}
    # Ignore this warning, because the correlation of nearly constant scores is still defined.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.NearConstantInputWarning)
        pearson = float(stats.pearsonr(gold, predicted).statistic)  # pyright: ignore[reportAttributeAccessIssue]
    spearman = float(stats.spearmanr(gold, predicted).statistic)  # pyright: ignore[reportAttributeAccessIssue]
    return {"pearson": pearson, "spearman": spearman}


def entity_scores(gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> Scores:
    """Returns entity scores in seqeval's strict mode.

    An entity is correct if its type and both of its ends are correct. An `I-` tag that does not
    continue an entity of its type is ignored. (The older CoNLL script and seqeval's default mode
    start a new entity at such a tag.)

    Args:
        gold: for each sentence, a BIO tag for each word: `O`, `B-TYPE` or `I-TYPE`.
        predicted: as `gold`.

    Returns:
        `precision`, `recall` and `f1` over all entities, `f1_TYPE` for each entity type in `gold`
        or `predicted`, and `token_accuracy`.

    Raises:
        UserError: there are no examples, a word has no predicted tag, or a tag is not BIO.
    """
    from seqeval.metrics.v1 import precision_recall_fscore_support
    from seqeval.scheme import IOB2, Entities

    _check_tags(gold, predicted)
    tags, predicted_tags = list(map(list, gold)), list(map(list, predicted))
    # Find the entities once, and use them for both averages.
    entities = Entities(tags, IOB2, False)
    predicted_entities = Entities(predicted_tags, IOB2, False)

    def score(average: str | None) -> tuple:
        return precision_recall_fscore_support(
            tags,
            predicted_tags,
            average=average,
            zero_division=0,  # pyright: ignore[reportArgumentType]
            scheme=IOB2,
            entities_true=entities,
            entities_pred=predicted_entities,
        )

    precision, recall, f1, _ = score("micro")
    types = sorted(entities.unique_tags | predicted_entities.unique_tags)
    of_types = np.atleast_1d(score(None)[2])[: len(types)]
    words = np.array([*itertools.chain(*gold)])
    predicted_words = np.array([*itertools.chain(*predicted)])
    return {
        "precision": float(precision),
        "recall": float(recall),
        "f1": float(f1),
        "token_accuracy": float(np.mean(words == predicted_words)),
        **{f"f1_{name}": float(x) for name, x in zip(types, of_types, strict=True)},
    }


def answer_scores(gold: Mapping[str, Sequence[str]], predicted: Mapping[str, str]) -> Scores:
    """Returns exact match and F1 of answers, as SQuAD's official scripts compute them.

    For each question, both scores use the gold answer that matches best. The results are means over
    the questions. Questions with answers are scored as in version 1.1; for other questions the
    answer "" is correct, as in version 2.0. (The versions differ for gold answers that are empty
    after normalization, such as "A", which occur in SQuAD 1.1. Version 2.0 drops them; in version
    1.1 a prediction can match them exactly but its F1 is 0.)

    Args:
        gold: the answers to each question; an empty list or "" for a question without an answer.
        predicted: the answer to each question, or "" if there is none.

    Returns:
        `exact_match` and `f1`, as fractions (the scripts print percentages).

    Raises:
        UserError: there are no examples, or a question has no prediction.
    """
    missing = [question for question in gold if question not in predicted]
    require(
        gold and not missing,
        f"{len(missing)} of {len(gold)} questions have no predicted answer {missing[:1]}: give at "
        'least one question, and an answer for each, "" for none',
    )
    pairs = [_answer_score(texts, predicted[question]) for question, texts in gold.items()]
    exact_match, f1 = np.mean(pairs, axis=0).tolist()
    return {"exact_match": exact_match, "f1": f1}


def _answer_score(gold: Sequence[str], predicted: str) -> tuple[float, float]:
    answer = normalize_answer(predicted)
    # For a question without an answer, only an empty prediction is correct.
    answers = [normalize_answer(text) for text in gold if text]
    if not answers:
        return float(not answer), float(not answer)
    # Each of the two scores uses the gold answer that gives the best result.
    words = answer.split()
    return float(answer in answers), max(_word_f1(right.split(), words) for right in answers)


def normalize_answer(text: str) -> str:
    """Returns the text in lower case without ASCII punctuation, articles and excess white space."""
    text = text.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def _word_f1(gold: list[str], predicted: list[str]) -> float:
    """Returns 2 P R / (P + R) with P = common / predicted and R = common / gold."""
    common = (Counter(gold) & Counter(predicted)).total()
    return 2 * common / max(len(gold) + len(predicted), 1)


def _paired(gold: Labels, predicted: Labels, dtype: DTypeLike) -> tuple[np.ndarray, np.ndarray]:
    """Returns `gold` and `predicted` as arrays of numbers."""
    gold, predicted = np.asarray(gold), np.asarray(predicted)
    require(
        gold.shape == predicted.shape and gold.size,
        f"gold and predicted must have equal shapes and at least one example, got "
        f"{list(gold.shape)} and {list(predicted.shape)}",
    )
    for name, labels in {"gold": gold, "predicted": predicted}.items():
        require(
            labels.dtype.kind in "biuf",
            f"{name} must be numbers, got {str(labels.flat[0])!r}. Give the index of each label in "
            "`names`.",
        )
    return gold.astype(dtype), predicted.astype(dtype)


def _check_tags(gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> None:
    lengths, predicted_lengths = list(map(len, gold)), list(map(len, predicted))
    require(
        lengths == predicted_lengths and any(lengths),
        "gold and predicted must have the same numbers of tags in each sentence, and at least one "
        f"tag, got {len(gold)} sentences with {sum(lengths)} tags and {len(predicted)} sentences "
        f"with {sum(predicted_lengths)} tags",
    )
    for tag in set(itertools.chain(*gold, *predicted)):
        problem = f"tag {tag!r} is not BIO: it must be O, B-TYPE or I-TYPE"
        require(re.fullmatch(r"O|[BI]-.+", tag), problem)


def text_scores(references: Sequence[str], texts: Sequence[str]) -> dict[str, float | str]:
    """Returns BLEU, chrF and exact match of generated texts, and ROUGE if its package is installed.

    Args:
        references: a reference for each text, as in the data.
        texts: a text for each reference.

    Returns:
        The scores of `translation_scores`, plus `rouge_scores` if the package rouge-score is
        installed.

    Raises:
        UserError: there are no examples, or the numbers of texts and references differ.
    """
    scores = translation_scores(references, texts)
    return scores if missing_rouge() else {**scores, **rouge_scores(references, texts)}


def missing_rouge() -> str | None:
    """Returns a line that explains how to install ROUGE, or None if ROUGE is installed."""
    if importlib.util.find_spec("rouge_score") is not None:
        return None
    return "ROUGE is left out, because rouge-score is not installed: pip install 'flaxzoo[rouge]'"


def rouge_scores(references: Sequence[str], texts: Sequence[str]) -> Scores:
    """Returns ROUGE-1, ROUGE-2 and ROUGE-L of the rouge-score package (Lin 2004).

    Words are lowercased runs of a to z and digits, without stemming, as in Hugging Face's evaluate.
    Text in other scripts is ignored.

    Args:
        references: a reference for each text.
        texts: a text for each reference.

    Returns:
        `rouge1`, `rouge2` and `rougeL`: the mean F1 of single words, of word pairs and of the
        longest common subsequence, as fractions.

    Raises:
        UserError: the package is not installed, there are no texts, or the numbers of texts
          and references differ.
    """
    missing = missing_rouge()
    require(not missing, str(missing))
    _check_texts(references, texts)
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"])
    scores = [scorer.score(a, b) for a, b in zip(references, texts, strict=True)]
    return {name: float(np.mean([s[name].fmeasure for s in scores])) for name in scores[0]}


def translation_scores(
    references: Sequence[str], translations: Sequence[str]
) -> dict[str, float | str]:
    """Returns cased BLEU and chrF of plain text, computed by the package sacreBLEU (Post 2018).

    Args:
        references: a reference for each sentence, as in the data.
        translations: a translation for each reference.

    Returns:
        `bleu` and `chrf`, from 0 to 100, each with the signature of its settings; and
        `exact_match`, the fraction of translations that equal their reference.

    Raises:
        UserError: there are no examples, or the numbers of translations and references differ.
    """
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    _check_texts(references, translations)
    # The signature shows whether scores are comparable, because it names the version and the
    # settings.
    scores: dict[str, float | str] = {}
    for name, metric in (("bleu", BLEU()), ("chrf", CHRF())):
        scores[name] = metric.corpus_score(list(translations), [list(references)]).score
        scores[f"{name}_signature"] = str(metric.get_signature())
    equal = sum(a == b for a, b in zip(references, translations, strict=True))
    return {**scores, "exact_match": equal / len(references)}


def _check_texts(references: Sequence[str], texts: Sequence[str]) -> None:
    require(
        len(references) == len(texts) > 0,
        f"got {len(texts)} texts for {len(references)} references: give at least one text, and a "
        "reference for each text",
    )
