"""The inputs of BERT: ``[CLS] A [SEP]`` or ``[CLS] A [SEP] B [SEP]``, with token types.

Devlin et al. 2018, section 3 and figure 2. If a tokenizer has no such special tokens, its BOS
and EOS are used (RoBERTa's ``<s>`` and ``</s>``).
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ..dataset import ArraySpec, BatchSpec, Values
from ..errors import DataError
from ..tokenizers.base import Tokenizer


@dataclass(frozen=True)
class Template:
    """The special tokens around texts, and the length of an example.

    Attributes:
      cls: The id of the first token.
      sep: The id of the token after each text.
      pad: The id of padding.
      length: The example's length T.
    """

    cls: int
    sep: int
    pad: int
    length: int

    @classmethod
    def of(cls, tokenizer: Tokenizer, length: int) -> "Template":
        """Makes the template of a tokenizer.

        Raises:
          DataError: The tokenizer has no such special tokens.
        """
        special = tokenizer.special_ids
        first = special.bos if special.cls is None else special.cls
        last = special.eos if special.sep is None else special.sep
        if first is None or last is None:
            raise DataError(
                f"the {tokenizer.kind} tokenizer has no [CLS] and [SEP], which every example "
                "needs: choose a WordPiece vocabulary"
            )
        return cls(first, last, special.pad or 0, length)

    def room(self, texts: int) -> int:
        """Returns how many tokens one text, or two texts together, may have."""
        return self.length - 1 - texts


@dataclass(frozen=True, eq=False)
class BertInputs:
    """Many examples with special tokens in flat arrays, which are small and pickle fast.

    Attributes:
      template: The special tokens and the length T.
      ids: All tokens with special tokens, int32.
      starts: The start of each example in ``ids``, and the end, int64 [n + 1].
      second: The start of the second text in its example, T if there is none, int32 [n].
    """

    template: Template
    ids: np.ndarray
    starts: np.ndarray
    second: np.ndarray

    @classmethod
    def of(
        cls, template: Template, pairs: Iterable[tuple[Sequence[int], Sequence[int] | None]]
    ) -> "BertInputs":
        """Adds special tokens to texts that fit.

        Args:
          template: The special tokens and the length.
          pairs: The ids of the first and, if there is one, of the second text.
        """
        ids, starts, second = array("i"), array("q", [0]), array("i")
        for one, other in pairs:
            ids.append(template.cls)
            ids.extend(one)
            ids.append(template.sep)
            second.append(template.length if other is None else len(one) + 2)
            if other is not None:
                ids.extend(other)
                ids.append(template.sep)
            starts.append(len(ids))
        return cls(
            template,
            np.array(ids, np.int32),
            np.array(starts, np.int64),
            np.array(second, np.int32),
        )

    def __len__(self) -> int:
        return len(self.second)

    def example(self, index: int) -> dict[str, np.ndarray]:
        """Makes ``input_ids``, ``attention_mask`` and ``token_type_ids``, int32 [T] each."""
        tokens = self.ids[self.starts[index] : self.starts[index + 1]]
        position = np.arange(self.template.length, dtype=np.int32)  # [T]
        real = position < len(tokens)  # False at padding
        input_ids = np.full(self.template.length, self.template.pad, np.int32)
        input_ids[: len(tokens)] = tokens
        return {
            "input_ids": input_ids,
            "attention_mask": real.astype(np.int32),
            "token_type_ids": (real & (position >= self.second[index])).astype(np.int32),
        }


def token_specs(*shape: int) -> BatchSpec:
    """Describes the arrays that ``BertInputs.example`` makes, each of this shape."""
    return {
        "input_ids": ArraySpec(shape, Values.SOURCE_TOKEN),
        "attention_mask": ArraySpec(shape, Values.MASK),
        "token_type_ids": ArraySpec(shape, Values.TOKEN_TYPE),
    }


def encode_texts(
    texts: Sequence[tuple[str, ...]], tokenizer: Tokenizer, template: Template
) -> tuple[BertInputs, int]:
    """Tokenizes single texts and pairs, truncates them, and adds special tokens.

    Args:
      texts: One or two texts each.
      tokenizer: The tokenizer.
      template: The special tokens and the length.

    Returns:
      The inputs, and the number of truncated examples.
    """
    encoded = iter(tokenizer.encode_batch([text for pair in texts for text in pair]))
    pairs: list[tuple[list[int], list[int] | None]] = []
    num_truncated = 0
    for pair in texts:
        one, other = next(encoded), next(encoded) if len(pair) == 2 else None
        if other is None:
            kept: tuple[list[int], list[int] | None] = one[: template.room(1)], None
            num_truncated += len(one) > template.room(1)
        else:
            first, second = truncate_longest_first(len(one), len(other), template.room(2))
            kept = one[:first], other[:second]
            num_truncated += first + second < len(one) + len(other)
        pairs.append(kept)
    return BertInputs.of(template, pairs), num_truncated


def truncate_longest_first(one: int, other: int, room: int) -> tuple[int, int]:
    """Truncates two texts to fit by removing tokens from the end of the longer one.

    The result is the same as removing one token at a time from the longer text, and from the second
    text if both are equally long
    (google-research/bert ``run_classifier.py``, ``create_pretraining_data.py``).

    Args:
      one: Tokens of the first text.
      other: Tokens of the second.
      room: The most tokens for both together.

    Returns:
      The tokens to keep of each.
    """
    if one + other <= room:
        return one, other
    if other <= room // 2:
        return room - other, other
    if one <= room - room // 2:
        return one, room - one
    return room - room // 2, room // 2
