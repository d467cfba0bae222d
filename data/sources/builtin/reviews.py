"""Reviews made from templates: a labeled source without a download, ``builtin:reviews``.

The label of every review follows from its words, and in the part ``order`` only from the order of
the words:

- plain: "The food was terrible.", the label of the adjective;
- negated: "The food was not terrible.", the opposite label;
- order: "The food was not terrible, great." is positive and "The food was not great, terrible."
  is negative. Both orders of such a review are in the same split, so a model that does not see
  word order is right about exactly one of the two.
"""

import random
from dataclasses import dataclass
from itertools import product

from ...common.errors import DataError
from ...common.fields import require_one_of
from ..hash_split import Split
from ..labelled_names import LabelledSource, Record

NAMES = ("reviews",)
"""The built-in sources of labeled examples."""
POSITIVE, NEGATIVE = "positive", "negative"
"""The labels."""

_OPENERS = ("", "honestly, ", "to me ", "in short, ")
_SUBJECTS = (
    *("food", "service", "room", "film", "plot", "acting"),
    *("hotel", "staff", "music", "book", "ending", "view"),
)
_ADJECTIVES = {
    POSITIVE: (
        *("great", "good", "wonderful", "lovely", "superb"),
        *("charming", "brilliant", "delightful", "fine", "excellent"),
    ),
    NEGATIVE: (
        *("terrible", "bad", "awful", "dull", "dreadful"),
        *("boring", "poor", "horrible", "ugly", "weak"),
    ),
}
_OTHER = {POSITIVE: NEGATIVE, NEGATIVE: POSITIVE}
_TWINS = 480
"""The number of pairs of reviews in the part ``order``, equal to the plain reviews per label."""
_VALIDATION_FRACTION = 0.2


@dataclass(frozen=True)
class Review:
    """A review.

    Attributes:
      text: The review, one sentence.
      label: ``positive`` or ``negative``.
      part: ``plain``, ``negated`` or ``order``.
    """

    text: str
    label: str
    part: str


def template_reviews(split: Split, seed: int = 0) -> list[Review]:
    """Returns the reviews of a split, with equally large parts and nearly balanced labels.

    Args:
      split: 2,304 reviews for training, or 576 other reviews for validation.
      seed: The seed of the split and of the order; ``builtin:reviews`` uses 0.

    Returns:
      The reviews in random order.
    """
    rng = random.Random(seed)
    places = [f"{opener}the {subject} was" for opener, subject in product(_OPENERS, _SUBJECTS)]
    # Reviews of a group are in the same split: one review, or both orders of a review.
    groups: dict[str, list[list[Review]]] = {"plain": [], "negated": [], "order": []}
    for label, adjectives in _ADJECTIVES.items():
        for place, adjective in product(places, adjectives):
            groups["plain"].append([_review(f"{place} {adjective}", label, "plain")])
            groups["negated"].append(
                [_review(f"{place} not {adjective}", _OTHER[label], "negated")]
            )
    for place, good, bad in product(places, _ADJECTIVES[POSITIVE], _ADJECTIVES[NEGATIVE]):
        # Both reviews have the same words in different orders.
        twins = (f"not {bad}, {good}", POSITIVE), (f"not {good}, {bad}", NEGATIVE)
        groups["order"].append(
            [_review(f"{place} {text}", label, "order") for text, label in twins]
        )
    # There are far more combinations of two adjectives; take as many combinations as in the other
    # parts.
    groups["order"] = rng.sample(groups["order"], _TWINS)
    chosen: list[Review] = []
    for group in groups.values():
        rng.shuffle(group)
        # Divide each part separately, so that the parts are equally large in both splits.
        held_out = round(_VALIDATION_FRACTION * len(group))
        part = group[:held_out] if split == "validation" else group[held_out:]
        chosen += [review for twins in part for review in twins]
    rng.shuffle(chosen)
    return chosen


def _review(text: str, label: str, part: str) -> Review:
    return Review(f"{text[0].upper()}{text[1:]}.", label, part)


def review_records(source: LabelledSource, split: Split) -> list[Record]:
    """Returns the reviews of a split as records of the fields that a source names.

    Args:
      source: ``builtin:reviews``, with the fields ``label`` and ``text``, or ``text`` alone.
      split: The split.

    Raises:
      DataError: The built-in source or a field does not exist.
    """
    require_one_of(f"{source.name}: the examples", source.location, NAMES, error=DataError)
    for field in source.fields:
        require_one_of(f"{source.name}: the field", field, ("label", "text"), error=DataError)
    return [
        Record(
            f"{source.name} {split} example {number}",
            tuple(getattr(review, field) for field in source.fields),
            part=review.part,
        )
        for number, review in enumerate(template_reviews(split), start=1)
    ]
