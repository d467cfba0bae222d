"""The built-in reviews: labels that follow from the words, or from their order alone."""

from collections import Counter

import pytest
from flaxzoo.data import DataError, TokenizerConfig, train_tokenizer
from flaxzoo.data.sources.builtin.reviews import template_reviews
from flaxzoo.data.tasks.question_answering import QuestionAnsweringData
from flaxzoo.data.tasks.sequence_classification import SequenceClassificationData

TRAINED, HELD_OUT = template_reviews("train"), template_reviews("validation")


def words(review):
    """The words of a review in the order of the alphabet."""
    return tuple(sorted(review.text.lower().replace(",", " ,").replace(".", " .").split()))


def test_parts_and_labels_are_balanced():
    assert Counter(r.part for r in TRAINED) == {"plain": 768, "negated": 768, "order": 768}
    assert Counter(r.part for r in HELD_OUT) == {"plain": 192, "negated": 192, "order": 192}
    for reviews in (TRAINED, HELD_OUT):
        positive = sum(r.label == "positive" for r in reviews)
        assert abs(positive / len(reviews) - 0.5) < 0.01
    assert len({r.text for r in TRAINED + HELD_OUT}) == 2880


def test_the_order_of_the_same_words_decides():
    """In each split every review of the part has its twin, with the other label."""
    for reviews in (TRAINED, HELD_OUT):
        labels = {}
        for review in reviews:
            labels.setdefault((review.part == "order", words(review)), []).append(review.label)
        for (ordered, _), found in labels.items():
            assert sorted(found) == ["negative", "positive"] if ordered else len(found) == 1


def test_labels_follow_from_the_words_elsewhere():
    for review in TRAINED:
        bad = any(word in review.text for word in ("terrible", "awful", "dull"))
        if bad and review.part != "order":
            assert review.label == ("positive" if " not " in review.text else "negative")
    examples = {r.text: r.label for r in TRAINED + HELD_OUT}
    assert examples["The food was terrible."] == "negative"
    assert examples["The food was not terrible."] == "positive"


def test_the_seed_decides():
    assert template_reviews("train") == TRAINED
    assert template_reviews("train", seed=1) != TRAINED
    first = {words(r) for r in template_reviews("train", seed=1)}
    assert not first & {words(r) for r in template_reviews("validation", seed=1)}


def test_as_a_source():
    config = SequenceClassificationData(
        source="builtin:reviews", length=16, tokenizer=TokenizerConfig("words")
    )
    tokenizer = train_tokenizer(config.texts(), config.tokenizer)
    assert config.labels() == ("negative", "positive")
    trained = config.train_split(tokenizer, config.labels(), seed=0)
    held_out = config.validation_split(tokenizer, config.labels())
    assert (trained.examples.num_examples, held_out.examples.num_examples) == (2304, 576)
    assert [e.part for e in held_out.content] == [r.part for r in HELD_OUT]
    again = config.whole_source("builtin:reviews", tokenizer, config.labels())
    assert again.fingerprint == held_out.fingerprint
    unlabeled = config.input_split("builtin:reviews", tokenizer, config.labels())
    assert [e.label for e in unlabeled.content] == [None] * 576
    ids = held_out.examples.example(0, 0)["input_ids"]
    assert tokenizer.decode(ids.tolist()) == HELD_OUT[0].text.lower()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("builtin:review", "reviews, got .review."),
        ("builtin:reviews#label,words", "label, text, got .words."),
    ],
)
def test_unknown_built_in_sources_are_refused(source, message):
    with pytest.raises(DataError, match=message):
        SequenceClassificationData(source=source, tokenizer=TokenizerConfig("words")).labels()


def test_other_data_have_no_reviews():
    data = QuestionAnsweringData(source="builtin:reviews", tokenizer=TokenizerConfig("words"))
    with pytest.raises(DataError, match="got 'builtin'"):
        data.texts()
