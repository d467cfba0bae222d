"""Makes rows of one or two texts with the special tokens and token types of the tokenizer.

In BERT, a row is ``[CLS] A [SEP]`` or ``[CLS] A [SEP] B [SEP]`` (Devlin et al. 2018, section 3 and
figure 2).
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..common.errors import DataError
from ..dataset import ArraySpec, BatchSpec, Values, zeros
from ..tokenizers.base import Tokenizer
from ..tokenizers.frame import Frame

_MULTIPLE = 8
"""Fitted lengths are multiples of this number, so that they can be sharded over a mesh."""


@dataclass(frozen=True)
class Template:
    """The special tokens around texts and the padded length of an example.

    Attributes:
      frame: The special tokens.
      pad: The id of the padding token.
      length: The length of an example, T.
    """

    frame: Frame
    pad: int
    length: int

    @classmethod
    def of(cls, tokenizer: Tokenizer, length: int) -> "Template":
        """Creates the template for a tokenizer."""
        return cls(tokenizer.frame, tokenizer.special_ids.pad or 0, length)

    def room(self, num_texts: int) -> int:
        """Returns the maximum total number of tokens in one or two texts; see ``Layout.room``."""
        return self.frame.layout(num_texts).room(self.length)

    def fitted(self, longest: int) -> "Template":
        """Returns a template with a length that is just sufficient for the longest example.

        Args:
          longest: The number of tokens in the longest example, including special tokens. The new
            length is this number, rounded up to a multiple of 8, but at most the current length.
        """
        return replace(self, length=min(self.length, -(-longest // _MULTIPLE) * _MULTIPLE))


@dataclass(frozen=True, eq=False)
class BertInputs:
    """Examples with special tokens, stored in flat arrays, which are small and quick to pickle.

    Attributes:
      template: The special tokens and the padded length, T.
      ids: The tokens of all examples, including special tokens, int32.
      types: The token type of each token in ``ids``, uint8.
      starts: The start of each example in ``ids``, followed by the end, int64 [n + 1].
      second: The start of the second text within each example, or T if there is only one text,
        int32 [n].
    """

    template: Template
    ids: np.ndarray
    types: np.ndarray
    starts: np.ndarray
    second: np.ndarray

    @classmethod
    def of(cls, template: Template, examples: Iterable[Sequence[Sequence[int]]]) -> "BertInputs":
        """Adds special tokens to texts that are short enough for the template.

        Args:
          template: The special tokens and the length.
          examples: The token ids of the one or two texts in each example.
        """
        # Use typed arrays, which do not need a Python object for each token.
        ids, types, starts, second = array("i"), array("B"), array("q", [0]), array("i")
        for texts in examples:
            framed = template.frame.join(*texts)
            ids.extend(framed.ids)
            types.extend(framed.types)
            second.append((*framed.starts, template.length)[1])
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

    @property
    def lengths(self) -> list[int]:
        """The number of tokens in each example, including special tokens."""
        return np.diff(self.starts).tolist()

    def tokens(self, index: int) -> np.ndarray:
        """Returns the tokens of an example without padding, int32 [size]."""
        return self.ids[self.starts[index] : self.starts[index + 1]]

    def fitted(self) -> "BertInputs":
        """Returns inputs that are padded only to the longest example; requires single texts."""
        return replace(self, template=self.template.fitted(max(self.lengths, default=1)))

    def example(self, index: int) -> dict[str, np.ndarray]:
        """Makes ``input_ids``, ``attention_mask`` and ``token_type_ids``, int32 [T] each."""
        own = slice(self.starts[index], self.starts[index + 1])
        size = int(own.stop - own.start)
        # Padding is 0, except in `input_ids`, where it is the id of the padding token.
        row = zeros(token_specs(self.template.length))
        row["input_ids"][:size], row["input_ids"][size:] = self.ids[own], self.template.pad
        row["attention_mask"][:size] = 1
        row["token_type_ids"][:size] = self.types[own]
        return row


def token_specs(*shape: int) -> BatchSpec:
    """Returns the specifications of the arrays of ``BertInputs.example`` with a given shape."""
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
      texts: The one or two texts in each example.
      tokenizer: The tokenizer.
      template: The special tokens and the length.
      locations: The location of each example, for messages.

    Returns:
      The inputs, and the number of truncated examples.

    Raises:
      DataError: An example has no tokens, because its texts are empty and the tokenizer adds no
        special tokens.
    """
    # Tokenize all texts in one call, which uses all threads of the tokenizer.
    encoded = iter(tokenizer.encode_batch([text for pair in texts for text in pair]))
    kept: list[list[list[int]]] = []
    num_truncated = 0
    for example, location in zip(texts, locations, strict=True):
        # The results are in the order of the flattened texts.
        rows = [next(encoded) for _ in example]
        sizes = truncate_longest_first(*map(len, rows), room=template.room(len(rows)))
        num_truncated += sum(sizes) < sum(map(len, rows))
        rows = [tokenizer.truncated(row, size) for row, size in zip(rows, sizes, strict=True)]
        # In a row without tokens, there would be nothing to attend to.
        if not any((*rows, template.frame.layout(len(rows)).num_added)):
            raise DataError(
                f"{location} has no text, and this {tokenizer.kind} tokenizer adds no special "
                "token that a model could read instead: leave it out"
            )
        kept.append(rows)
    return BertInputs.of(template, kept), num_truncated


def truncate_longest_first(*sizes: int, room: int) -> tuple[int, ...]:
    """Truncates one or two texts by removing tokens from the end of the longer text.

    Follows the tokenizers library. If both texts must be truncated and the room is an odd number of
    tokens, the longer text keeps one token more. If both texts are equally long, the second text
    keeps one token more. (In google-research/bert ``run_classifier.py``, the first text always
    keeps one token more.)

    Args:
      sizes: The number of tokens in each text.
      room: The maximum total number of tokens.

    Returns:
      The number of tokens to keep from each text.
    """
    if sum(sizes) <= room:
        return sizes
    if len(sizes) == 1:
        return (room,)
    # If a text is shorter than half of the room, keep all of it, and give the other text the
    # remaining room.
    one, other = sizes
    shorter = min(one, other, room // 2)
    return (room - shorter, shorter) if one > other else (shorter, room - shorter)
