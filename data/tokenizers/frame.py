"""The frame of a text: the special tokens around one text, or around and between two.

A tokenizer has one frame, which is that of its own template: ``[CLS] A [SEP] B [SEP]`` with token
types 0 and 1 (BERT), ``<s> A </s></s> B </s>`` (RoBERTa, BART), ``A </s> en_XX`` (mBART), ``<s> A``
(Llama), ``A B`` (GPT-2, Qwen2). Every part of the package that puts special tokens around a text
takes them from here, so that a model reads the ids that transformers makes of the same folder.

The tokens that separate the documents of a corpus are not a frame; see
``Tokenizer.begins_document``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..errors import DataError


@dataclass(frozen=True)
class Framed:
    """Texts with their special tokens.

    Attributes:
      ids: All tokens.
      types: The token type of each.
      starts: The index of the first token of each text.
    """

    ids: list[int]
    types: list[int]
    starts: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """The special tokens around n texts.

    Attributes:
      marks: The special tokens before the first text and after each text, n + 1 tuples.
      mark_types: Their token types.
      text_types: The token type of each text.
    """

    marks: tuple[tuple[int, ...], ...]
    mark_types: tuple[tuple[int, ...], ...]
    text_types: tuple[int, ...]

    @classmethod
    def read(cls, ids: Sequence[int], types: Sequence[int], texts: Sequence[int]) -> "Layout":
        """Reads a layout from framed texts of one token each.

        Args:
          ids: The tokens of the framed texts.
          types: The token type of each.
          texts: The token of each text, none of which is a special token.

        Raises:
          DataError: A text is missing or repeated, or the texts are in another order.
        """
        if [id for id in ids if id in texts] != list(texts):
            raise DataError(
                "the template of this tokenizer puts its texts in another order or repeats one: "
                "choose a tokenizer whose template is A, or A before B"
            )
        edges = [-1, *(ids.index(text) for text in texts), len(ids)]
        gaps = [slice(a + 1, b) for a, b in pairwise(edges)]
        return cls(
            tuple(tuple(ids[gap]) for gap in gaps),
            tuple(tuple(types[gap]) for gap in gaps),
            tuple(types[edge] for edge in edges[1:-1]),
        )

    @property
    def num_added(self) -> int:
        """The number of special tokens."""
        return sum(map(len, self.marks))

    def join(self, *texts: Sequence[int]) -> Framed:
        """Adds the special tokens to the tokens of n texts."""
        ids, types = list(self.marks[0]), list(self.mark_types[0])
        starts: list[int] = []
        after = zip(self.marks[1:], self.mark_types[1:], self.text_types, strict=True)
        for text, (marks, mark_types, text_type) in zip(texts, after, strict=True):
            starts.append(len(ids))
            ids += [*text, *marks]
            types += [*[text_type] * len(text), *mark_types]
        return Framed(ids, types, tuple(starts))


@dataclass(frozen=True)
class Frame:
    """The special tokens around one text, and around two; by default there are none.

    Attributes:
      single: The layout of one text.
      pair: The layout of two texts.
    """

    single: Layout = Layout(((), ()), ((), ()), (0,))
    pair: Layout = Layout(((), (), ()), ((), (), ()), (0, 1))

    @classmethod
    def ending(cls, end: int) -> "Frame":
        """Returns the frame ``A end`` and ``A end B end`` (T5)."""
        single = Layout(((), (end,)), ((), (0,)), (0,))
        return cls(single, Layout(((), (end,), (end,)), ((), (0,), (0,)), (0, 0)))

    @property
    def before(self) -> tuple[int, ...]:
        """The special tokens before one text.

        A prompt that a decoder continues has these tokens and not those after a text: a tokenizer
        that ends each text with an end token does not end a prompt.
        """
        return self.single.marks[0]

    @property
    def after(self) -> tuple[int, ...]:
        """The special tokens after one text."""
        return self.single.marks[1]

    def layout(self, num_texts: int) -> Layout:
        """Returns the layout of one or two texts."""
        return self.single if num_texts == 1 else self.pair

    def join(self, *texts: Sequence[int]) -> Framed:
        """Adds the special tokens to the tokens of one or two texts."""
        return self.layout(len(texts)).join(*texts)
