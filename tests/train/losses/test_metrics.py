import dataclasses
import importlib.util
import math
import string
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from flaxzoo.train.losses.metrics import (
    answer_scores,
    classification_scores,
    entity_scores,
    normalize_answer,
    regression_scores,
    rouge_scores,
    text_scores,
    translation_scores,
)


@dataclasses.dataclass
class Table:
    """Counts of a binary classification, from which all is worked by hand."""

    tp: int
    fp: int
    fn: int
    tn: int

    def labels(self):
        pairs = [(1, 1)] * self.tp + [(0, 1)] * self.fp + [(1, 0)] * self.fn + [(0, 0)] * self.tn
        return [list(side) for side in zip(*pairs, strict=True)]


def is_plain(scores):
    return all(type(x) is float and math.isfinite(x) for x in scores.values())


@pytest.mark.parametrize("t", [Table(5, 2, 1, 4), Table(1, 0, 3, 9), Table(0, 2, 3, 1)])
def test_two_labels_by_hand(t):
    gold, predicted = t.labels()
    scores = classification_scores(gold, predicted, ["no", "yes"])
    between = (t.tp + t.fp) * (t.tp + t.fn) * (t.tn + t.fp) * (t.tn + t.fn)
    assert scores == pytest.approx(
        {
            "accuracy": (t.tp + t.tn) / len(gold),
            "f1": 2 * t.tp / (2 * t.tp + t.fp + t.fn),
            "matthews": (t.tp * t.tn - t.fp * t.fn) / math.sqrt(between),
        }
    )
    assert is_plain(scores)


def test_three_labels_by_hand():
    gold, predicted = np.array([0, 0, 1, 1, 2, 2]), np.array([0, 1, 1, 1, 0, 2])
    scores = classification_scores(gold, predicted, ["a", "b", "c"])
    # F1 of a: 2·1 / (2 + 2); of b: 2·2 / (2 + 3); of c: 2·1 / (2 + 1).
    assert scores["f1_macro"] == pytest.approx((1 / 2 + 4 / 5 + 2 / 3) / 3)
    assert scores["accuracy"] == pytest.approx(4 / 6)
    # Gorodkin's R_k: right 4 of 6; Σ gold · predicted = 4 + 6 + 2, Σ gold² = 12, Σ predicted² = 14.
    right, crossed = 4 * 6, 2 * 2 + 2 * 3 + 2 * 1
    assert scores["matthews"] == pytest.approx((right - crossed) / math.sqrt((36 - 14) * (36 - 12)))
    assert is_plain(scores)


def test_a_label_that_does_not_occur_is_not_averaged():
    scores = classification_scores([0, 1, 1], [0, 1, 1], ["a", "b", "never"])
    assert scores == {"accuracy": 1.0, "f1_macro": 1.0, "matthews": 1.0}
    several = classification_scores([[1, 0, 0], [0, 1, 0]], [[1, 0, 0], [0, 1, 0]], "abc")
    assert several == {"accuracy": 1.0, "f1_micro": 1.0, "f1_macro": 1.0}


def test_several_labels_by_hand():
    gold = np.array([[1, 0, 1], [0, 1, 0], [1, 1, 0], [0, 0, 0]], np.float32)
    predicted = np.array([[1, 0, 0], [0, 1, 0], [1, 0, 1], [0, 0, 0]], np.int32)
    scores = classification_scores(gold, predicted, ["a", "b", "c"])
    # a: 2 right; b: 1 right, 1 missed; c: 1 too many, 1 missed.
    assert scores == pytest.approx(
        {"accuracy": 2 / 4, "f1_micro": 6 / (6 + 1 + 2), "f1_macro": (1 + 2 / 3 + 0) / 3}
    )
    assert is_plain(scores)


@pytest.mark.parametrize(
    ("gold", "predicted"), [([1, 1], [1, 1]), ([0, 0], [0, 0]), ([0, 1], [1, 1]), ([0], [1])]
)
def test_what_is_not_defined_is_zero_without_a_warning(gold, predicted):
    assert classification_scores(gold, predicted, ["no", "yes"])["matthews"] == 0
    assert is_plain(classification_scores(gold, predicted, ["no", "yes"]))
    assert classification_scores([[0, 0]], [[0, 0]], ["a", "b"]) == {
        "accuracy": 1.0,
        "f1_micro": 0.0,
        "f1_macro": 0.0,
    }


def test_labels_may_be_of_any_number_type():
    gold, predicted = np.array([[1.0, 0.0], [0.0, 1.0]]), [[True, False], [True, True]]
    scores = classification_scores(gold, predicted, ["a", "b"])
    assert scores == pytest.approx({"accuracy": 0.5, "f1_micro": 4 / 5, "f1_macro": 5 / 6})


def test_correlations_by_hand():
    scores = regression_scores([1, 2, 3, 4], [1.0, 4.0, 9.0, 2.0])
    # Deviations -1.5 … 1.5 and -3, 0, 5, -2; ranks 1, 3, 4, 2.
    assert scores["pearson"] == pytest.approx((4.5 + 0 + 2.5 - 3) / math.sqrt(5 * 38))
    assert scores["spearman"] == pytest.approx(1 - 6 * (0 + 1 + 1 + 4) / (4 * 15))
    assert is_plain(scores)


def test_spearman_of_ties_is_pearson_of_mean_ranks():
    scores = regression_scores([0.0, 1.0, 1.0, 5.0], [3.0, 3.0, 7.0, 8.0])
    ranks = np.corrcoef([1, 2.5, 2.5, 4], [1.5, 1.5, 3, 4])[0, 1]
    assert scores["spearman"] == pytest.approx(ranks)


@pytest.mark.parametrize(
    ("gold", "predicted"), [([1, 2, 3], [2, 2, 2]), ([4, 4], [1, 2]), ([1], [2])]
)
def test_a_constant_has_no_correlation(gold, predicted):
    assert regression_scores(gold, predicted) == {"pearson": 0.0, "spearman": 0.0}


def test_nearly_constant_predictions_do_not_warn():
    predicted = np.array([1, 1 + 4e-16, 1, 1])
    assert np.ptp(predicted) > 0
    assert -1 <= regression_scores([1, 2, 3, 4], predicted)["spearman"] <= 1


def test_entities_by_hand():
    gold = ["B-PER I-PER O B-LOC".split(), "B-ORG O B-PER B-PER".split(), []]
    predicted = [
        # One right, one of another type; then one too long, one right, one too many.
        "B-PER I-PER O B-ORG".split(),
        "B-ORG I-ORG B-PER B-LOC".split(),
        [],
    ]
    scores = entity_scores(gold, predicted)
    # 2 right of 5 in gold and of 5 predicted; PER: 2 of 3 and of 2.
    assert scores == pytest.approx(
        {
            "precision": 2 / 5,
            "recall": 2 / 5,
            "f1": 2 / 5,
            "token_accuracy": 5 / 8,
            "f1_PER": 2 * 2 / (3 + 2),
            "f1_LOC": 0.0,
            "f1_ORG": 0.0,
        }
    )
    assert is_plain(scores)


@pytest.mark.parametrize(
    ("predicted", "right"),
    [
        ("B-X I-X O", 1),
        ("I-X I-X O", 0),  # begins with I-
        ("B-X I-Y O", 0),
        ("B-X B-X O", 0),
        ("B-X I-X I-X", 0),
    ],
)
def test_strict(predicted, right):
    assert entity_scores([["B-X", "I-X", "O"]], [predicted.split()])["recall"] == right


def test_seqeval_agrees_over_random_tags():
    from seqeval.metrics import classification_report
    from seqeval.scheme import IOB2

    rng = np.random.default_rng(0)
    tags = np.array("O O O B-PER I-PER B-LOC I-LOC".split())
    gold, predicted = (
        [tags[rng.integers(0, 7, 1 + i % 9)].tolist() for i in range(60)] for _ in range(2)
    )
    # Half of it right, so that something is.
    predicted = [g if i % 2 else p for i, (g, p) in enumerate(zip(gold, predicted, strict=True))]
    how = {"mode": "strict", "scheme": IOB2, "output_dict": True, "zero_division": 0}
    report: Any = classification_report(gold, predicted, **how)
    scores = entity_scores(gold, predicted)
    assert 0.3 < scores["f1"] < 0.9
    for name, key in (("precision", "precision"), ("recall", "recall"), ("f1", "f1-score")):
        assert scores[name] == pytest.approx(report["micro avg"][key])
    assert {n for n in scores if n.startswith("f1_")} == {"f1_PER", "f1_LOC"}
    for name in ("PER", "LOC"):
        assert scores[f"f1_{name}"] == pytest.approx(report[name]["f1-score"])


def test_without_entities():
    zeros = {"precision": 0.0, "recall": 0.0, "f1": 0.0}
    assert entity_scores([["O", "O"]], [["O", "O"]]) == {**zeros, "token_accuracy": 1.0}
    # No entity to strict eyes.
    assert entity_scores([["O", "O"]], [["O", "I-X"]]) == {**zeros, "token_accuracy": 0.5}
    nothing_found = entity_scores([["B-X", "O"]], [["O", "O"]])
    assert nothing_found == {**zeros, "token_accuracy": 0.5, "f1_X": 0.0}
    too_much_found = entity_scores([["O", "O"]], [["B-X", "O"]])
    assert too_much_found == {**zeros, "token_accuracy": 0.5, "f1_X": 0.0}


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The  Cat's\tpyjamas!", "cats pyjamas"),
        ("a an the", ""),
        ("A.", ""),
        ("theatre another banana", "theatre another banana"),
        ("U.S.A.", "usa"),
        ("the-end", "theend"),  # the hyphen goes first: no article is left
        ("Ångström, ÉCOLE", "ångström école"),
        ("“quoted” – dash", "“quoted” – dash"),  # only ASCII punctuation goes
        ("non\u00a0breaking\u3000spaces", "non breaking spaces"),
        ("10,000 $", "10000"),
        ("", ""),
        (string.punctuation, ""),
    ],
)
def test_normalisation(text, normal):
    assert normalize_answer(text) == normal
    assert normalize_answer(normal) == normal


@pytest.mark.parametrize(
    ("golds", "predicted", "exact", "f1"),
    [
        (["Denver Broncos"], "the Denver Broncos!", 1, 1),
        (["Denver Broncos"], "Broncos", 0, 2 / 3),
        (["Denver Broncos"], "Carolina Panthers", 0, 0),
        # The best of several, each for itself.
        (["Santa Clara, California", "Levi's Stadium"], "Levis stadium in Santa Clara", 0, 4 / 7),
        (["gold", "gold gold"], "Gold Gold", 1, 1),
        # A word counts as often as both have it.
        (["to be or not to be"], "to to to", 0, 2 * 2 / (6 + 3)),
        (["Зеленоград"], "зеленоград.", 1, 1),
        (["東京"], "東京 都", 0, 2 / 3),
        (["yes"], "", 0, 0),
        # No answer (2.0).
        ([], "", 1, 1),
        ([""], "", 1, 1),
        ([], "the", 1, 1),
        ([], "something", 0, 0),
        # A gold answer of which nothing is left has no words (1.1; 2.0 drops it).
        (["A", "type A"], "A", 1, 0),
        (["type A"], "A", 0, 0),
        (["A", "type A"], "Type A", 1, 1),
    ],
)
def test_answers_by_hand(golds, predicted, exact, f1):
    scores = answer_scores({"q": golds}, {"q": predicted})
    assert scores == pytest.approx({"exact_match": exact, "f1": f1})
    assert is_plain(scores)


def test_answers_are_averaged_over_questions():
    gold = {"a": ["one"], "b": ["two three"], "c": [], "d": ["four"]}
    predicted = {"d": "five", "c": "", "b": "two", "a": "One.", "other": "?"}
    assert answer_scores(gold, predicted) == pytest.approx(
        {"exact_match": 2 / 4, "f1": (1 + 2 / 3 + 1 + 0) / 4}
    )


def test_nothing_slow_is_imported_before_it_is_needed():
    program = (
        "import sys, flaxzoo.train.losses.metrics;"
        "print([m for m in ('jax', 'sklearn', 'scipy', 'seqeval') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_bleu_and_chrf_by_hand():
    references = ["the cat sat on the mat today", "a dog"]
    translations = ["the cat sat on a mat today", "a dog"]
    scores = translation_scores(references, translations)
    # Of the words 8 of 9 are right, of their pairs 5 of 7, then 2 of 5 and 1 of 4.
    matched = 8 / 9 * 5 / 7 * 2 / 5 * 1 / 4
    assert scores["bleu"] == pytest.approx(100 * matched ** (1 / 4), rel=1e-6)
    assert 0 < scores["chrf"] < 100
    assert scores["exact_match"] == 0.5
    assert "tok:13a" in scores["bleu_signature"]
    assert "nc:6" in scores["chrf_signature"]


def test_a_perfect_translation_has_all_points():
    scores = translation_scores(["one two three four"], ["one two three four"])
    assert scores["bleu"] == pytest.approx(100)
    assert scores["chrf"] == pytest.approx(100)
    assert scores["exact_match"] == 1


def test_rouge_by_hand():
    references, texts = ["The cat sat on the mat", "a dog"], ["the mat: the cat sat", "A dog."]
    # All 5 words of the first text are among the 6; 3 of its 4 pairs of words are among the 5; the
    # longest common subsequence is "the cat sat". Case and punctuation do not count.
    expected = {"rouge1": 10 / 11, "rouge2": 6 / 9, "rougeL": 6 / 11}
    scores = rouge_scores(references, texts)
    assert scores == {name: pytest.approx((x + 1) / 2) for name, x in expected.items()}
    everything = text_scores(references, texts)
    assert everything == {**translation_scores(references, texts), **scores}


def test_without_rouge_the_other_scores_are_there(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert text_scores(["a"], ["a"]) == translation_scores(["a"], ["a"])
    with pytest.raises(ValueError, match=r"rouge-score .*pip install 'flaxzoo"):
        rouge_scores(["a"], ["a"])


@pytest.mark.parametrize(
    ("score", "arguments", "message"),
    [
        (classification_scores, ([], [], "ab"), r"gold and predicted .* \[0\]"),
        (classification_scores, ([1, 0], [1], "ab"), r"\[2\] and \[1\]"),
        (classification_scores, ([[1, 0]], [1, 0], "ab"), r"\[1, 2\] and \[2\]"),
        (classification_scores, ([1, 0], ["yes", "no"], "ab"), "predicted must be numbers.*'yes'"),
        (regression_scores, ([1, 2, 3], [1, math.nan, math.inf]), "2 of 3 predicted .* finite"),
        (
            entity_scores,
            ([["O", "O"]], [["O"]]),
            "gold and predicted .* 1 sentences with 2 tags .* 1 tags",
        ),
        (
            entity_scores,
            ([["O"], ["O"]], [["O", "O"]]),
            "gold and predicted .* 2 sentences with 2 .* 1 sentences with 2",
        ),
        (entity_scores, ([], []), "gold and predicted .* 0 sentences with 0 tags"),
        (entity_scores, ([["O"]], [["PER"]]), "'PER' is not BIO"),
        (entity_scores, ([["E-PER"]], [["O"]]), "'E-PER' is not BIO"),
        (answer_scores, ({"a": ["x"], "b": ["y"]}, {"a": "x"}), "1 of 2 questions .*'b'"),
        (answer_scores, ({}, {}), "0 of 0 questions"),
        (translation_scores, ([], []), "0 texts .*0 references"),
        (translation_scores, ([], ["a"]), "1 texts .*0 references"),
        (rouge_scores, (["a", "b"], ["a"]), "1 texts .*2 references"),
    ],
)
def test_predictions_that_cannot_be_scored_are_refused(score, arguments, message):
    with pytest.raises(ValueError, match=message):
        score(*arguments)
