"""Generates labeled reviews from templates, so that no download is necessary: ``builtin:reviews``.

The reviews have three parts:

- plain: "The food was terrible." has the label of its adjective;
- negated: "The food was not terrible." has the opposite label;
- order: "The food was not terrible, great." is positive and "The food was not great, terrible." is
  negative. Both word orders are in the same split, so a model that ignores the order of words is
  right about exactly one of the two reviews.
"""

import random
from dataclasses import dataclass
from itertools import product

from ...common.errors import DataError
from ...common.fields import require_one_of
from ..hash_split import Split
from ..labelled_names import LabelledSource, Record

NAMES = ("reviews",)
"""The names of the built-in sources of labeled examples."""
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
"""The number of review pairs in the part ``order``. It equals the number of plain reviews for each
label."""
_VALIDATION_FRACTION = 0.2


@dataclass(frozen=True)
class Review:
    """A review with its label.

    Attributes:
      text: The text of the review, which is one sentence.
      label: ``positive`` or ``negative``.
      part: ``plain``, ``negated`` or ``order``.
    """

    text: str
    label: str
    part: str


def template_reviews(split: Split, seed: int = 0) -> list[Review]:
    """Returns the reviews of a split. The parts have equal sizes, and labels are nearly balanced.

    Args:
      split: The split: training has 2,304 reviews, and validation has 576 other reviews.
      seed: The seed for the division into splits and the order; ``builtin:reviews`` uses 0.

    Returns:
      The reviews in random order.
    """
    rng = random.Random(seed)
    places = [f"{opener}the {subject} was" for opener, subject in product(_OPENERS, _SUBJECTS)]
    # All reviews of a group are in the same split. A group has one review, or both orders of one.
    groups: dict[str, list[list[Review]]] = {"plain": [], "negated": [], "order": []}
    for label, adjectives in _ADJECTIVES.items():
        for place, adjective in product(places, adjectives):
            groups["plain"].append([_review(f"{place} {adjective}", label, "plain")])
            groups["negated"].append(
                [_review(f"{place} not {adjective}", _OTHER[label], "negated")]
            )
    for place, good, bad in product(places, _ADJECTIVES[POSITIVE], _ADJECTIVES[NEGATIVE]):
        # The two reviews have the same words in different orders.
        twins = (f"not {bad}, {good}", POSITIVE), (f"not {good}, {bad}", NEGATIVE)
        groups["order"].append(
            [_review(f"{place} {text}", label, "order") for text, label in twins]
        )
    # There are far more combinations of two adjectives than of one, so draw a sample that makes the
    # part as large as the other parts.
    groups["order"] = rng.sample(groups["order"], _TWINS)
    chosen: list[Review] = []
    for group in groups.values():
        rng.shuffle(group)
        # Divide each part separately, so that in both splits all parts are equally large.
        held_out = round(_VALIDATION_FRACTION * len(group))
        part = group[:held_out] if split == "validation" else group[held_out:]
        chosen += [review for twins in part for review in twins]
    rng.shuffle(chosen)
    return chosen


def _review(text: str, label: str, part: str) -> Review:
    return Review(f"{text[0].upper()}{text[1:]}.", label, part)


def review_records(source: LabelledSource, split: Split) -> list[Record]:
    """Returns the reviews of a split as records with the fields that a source names.

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
