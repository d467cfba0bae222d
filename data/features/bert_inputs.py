"""Rows of one or two texts with the special tokens and token types of the tokenizer's frame.

In BERT these are ``[CLS] A [SEP]`` or ``[CLS] A [SEP] B [SEP]`` (Devlin et al. 2018, section 3
and figure 2).
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ..common.errors import DataError
from ..dataset import ArraySpec, BatchSpec, Values
from ..tokenizers.base import Tokenizer
from ..tokenizers.frame import Frame


@dataclass(frozen=True)
class Template:
    """The special tokens around texts, and the length of an example.

    Attributes:
      frame: The special tokens.
      pad: The id of padding.
      length: The example's length T.
    """

    frame: Frame
    pad: int
    length: int

    @classmethod
    def of(cls, tokenizer: Tokenizer, length: int) -> "Template":
        """Makes the template of a tokenizer."""
        return cls(tokenizer.frame, tokenizer.special_ids.pad or 0, length)

    def room(self, texts: int) -> int:
        """Returns the number of tokens that one text, or two texts together, may have.

        Raises:
          DataError: Fewer than two tokens would fit.
        """
        room = self.length - (added := self.frame.layout(texts).num_added)
        if room < 2:
            raise DataError(
                f"length {self.length} leaves no room for two tokens between {added} special "
                f"tokens: choose at least {added + 2}"
            )
        return room


@dataclass(frozen=True, eq=False)
class BertInputs:
    """Many examples with special tokens in flat arrays, which are small and pickle fast.

    Attributes:
      template: The special tokens and the length T.
      ids: All tokens with special tokens, int32.
      types: Their token types, uint8.
      starts: The start of each example in ``ids``, then the end, int64 [n + 1].
      second: The start of the second text in its example, or T without one, int32 [n].
    """

    template: Template
    ids: np.ndarray
    types: np.ndarray
    starts: np.ndarray
    second: np.ndarray

    @classmethod
    def of(
        cls, template: Template, pairs: Iterable[tuple[Sequence[int], Sequence[int] | None]]
    ) -> "BertInputs":
        """Adds special tokens to texts that fit.

        Args:
          template: The special tokens and the length.
          pairs: The ids of the first text, and the ids of the second text or None.
        """
        # Typed arrays grow without an object per token.
        ids, types, starts, second = array("i"), array("B"), array("q", [0]), array("i")
        for one, other in pairs:
            framed = template.frame.join(one) if other is None else template.frame.join(one, other)
            ids.extend(framed.ids)
            types.extend(framed.types)
            second.append(template.length if other is None else framed.starts[1])
            starts.append(len(ids))
        return cls(
            template,
            np.array(ids, np.int32),
            np.array(types, np.uint8),
            np.array(starts, np.int64),
            np.array(second, np.int32),
        )

    def __len__(self) -> int:
        return len(self.second)

    def example(self, index: int) -> dict[str, np.ndarray]:
        """Makes ``input_ids``, ``attention_mask`` and ``token_type_ids``, int32 [T] each."""
        own = slice(self.starts[index], self.starts[index + 1])
        size = int(own.stop - own.start)
        # Padding is 0 except for the ids, where it is the padding token.
        row = {name: np.zeros(self.template.length, np.int32) for name in token_specs()}
        row["input_ids"][:size], row["input_ids"][size:] = self.ids[own], self.template.pad
        row["attention_mask"][:size] = 1
        row["token_type_ids"][:size] = self.types[own]
        return row


def token_specs(*shape: int) -> BatchSpec:
    """Describes the arrays that ``BertInputs.example`` makes, each with this shape."""
    return {
        "input_ids": ArraySpec(shape, Values.SOURCE_TOKEN),
        "attention_mask": ArraySpec(shape, Values.MASK),
        "token_type_ids": ArraySpec(shape, Values.TOKEN_TYPE),
    }


def encode_texts(
    texts: Sequence[tuple[str, ...]],
    tokenizer: Tokenizer,
    template: Template,
    locations: Sequence[str],
) -> tuple[BertInputs, int]:
    """Tokenizes single texts and pairs, truncates them, and adds special tokens.

    Args:
      texts: One or two texts each.
      tokenizer: The tokenizer.
      template: The special tokens and the length.
      locations: The location of each example, for messages.

    Returns:
      The inputs, and the number of truncated examples.

    Raises:
      DataError: An example has no token, because its texts and the frame are empty.
    """
    # Tokenize all texts in one call, which uses all threads of the tokenizer.
    encoded = iter(tokenizer.encode_batch([text for pair in texts for text in pair]))
    pairs: list[tuple[list[int], list[int] | None]] = []
    num_truncated = 0
    for pair, location in zip(texts, locations, strict=True):
        # Results come in the order of the flattened texts.
        one, other = next(encoded), next(encoded) if len(pair) == 2 else None
        if other is None:
            kept: tuple[list[int], list[int] | None] = (
                tokenizer.truncated(one, template.room(1)),
                None,
            )
            num_truncated += len(one) > template.room(1)
        else:
            first, second = truncate_longest_first(len(one), len(other), template.room(2))
            kept = tokenizer.truncated(one, first), tokenizer.truncated(other, second)
            num_truncated += first + second < len(one) + len(other)
        # A row without any token would have nothing to attend to.
        if not any((*kept, template.frame.layout(len(pair)).num_added)):
            raise DataError(
                f"{location} has no text, and this {tokenizer.kind} tokenizer adds no special "
                "token that a model could read instead: leave it out"
            )
        pairs.append(kept)
    return BertInputs.of(template, pairs), num_truncated


def truncate_longest_first(one: int, other: int, room: int) -> tuple[int, int]:
    """Truncates two texts to fit by removing tokens from the end of the longer one.

    Follows the tokenizers library: if both texts are longer than half of an odd room, the longer
    text keeps the extra token, or the second text if both are equally long.
    (google-research/bert ``run_classifier.py`` always gives the extra token to the first text.)

    Args:
      one: The number of tokens of the first text.
      other: The number of tokens of the second text.
      room: The maximum number of tokens of both together.

    Returns:
      The number of tokens to keep of each.
    """
    if one + other <= room:
        return one, other
    # A text shorter than half of the room stays whole; the other text gets the rest.
    shorter = min(one, other, room // 2)
    return (room - shorter, shorter) if one > other else (shorter, room - shorter)
