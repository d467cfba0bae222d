"""Defines the frame of a text: the special tokens around one text, or around and between two.

A tokenizer has one frame, which its template defines. Examples are ``[CLS] A [SEP] B [SEP]`` with
token types 0 and 1 (BERT), ``<s> A </s></s> B </s>`` (RoBERTa, BART), ``A </s> en_XX`` (mBART),
``<s> A`` (Llama), and ``A B`` (GPT-2, Qwen2). All code that adds special tokens to a text uses the
frame, so that a model reads the same ids as with transformers.

The tokens that separate the documents of a corpus are not part of the frame; see
``Tokenizer.begins_document``. ``BatchSettings`` contains the other settings of a folder that affect
batches: padding and truncation.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from ..common.errors import DataError
from ..common.fields import Checked, FieldError, require
from ..common.json_text import JsonObject, optional_object

Side = Literal["left", "right"]

CONFIG = "tokenizer_config.json"
# The classes of transformers 5 that pad on the left, and the classes that return token types.
_PAD_LEFT = ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "CohereTokenizer")
_TYPED = ("BertTokenizer", "ElectraTokenizer", "DebertaTokenizer", "DebertaV2Tokenizer")
# The default tokenizer class of each model type.
_CLASSES = {
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text"), "GemmaTokenizer"),
    **dict.fromkeys(("bert", "distilbert", "electra"), "BertTokenizer"),
    **{"deberta": "DebertaTokenizer", "deberta-v2": "DebertaV2Tokenizer"},
}
_TYPES = "token_type_ids"

GENERIC_TYPES = ("mistral", "mixtral", "phi3", "olmo2", "olmo3", "granite", "stablelm")
"""The model types that use ``tokenizer.json`` or ``tokenizer.model`` unchanged, even if their files
state a class."""
FIXED_TYPES = ("qwen2",)
"""The model types whose default class replaces the stated class, unless there is an ``auto_map``.
"""


@dataclass(frozen=True)
class Framed:
    """The tokens of one or several texts, including the special tokens of a frame.

    Attributes:
      ids: All tokens, including the special tokens.
      types: The token type of each token.
      starts: The index of the first token of each text.
    """

    ids: list[int]
    types: list[int]
    starts: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """The special tokens before, between and after n texts.

    Attributes:
      marks: The special tokens before the first text, then after each text, n + 1 tuples.
      mark_types: The token types of these special tokens.
      text_types: The token type of each text.
    """

    marks: tuple[tuple[int, ...], ...]
    mark_types: tuple[tuple[int, ...], ...]
    text_types: tuple[int, ...]

    @classmethod
    def read(cls, ids: Sequence[int], types: Sequence[int], texts: Sequence[int]) -> "Layout":
        """Infers the layout from texts of one token each, together with their special tokens.

        Args:
          ids: All tokens, including the special tokens.
          types: The token type of each token.
          texts: For each text, its only token, which is not a special token.

        Raises:
          DataError: A text is missing or repeated, or the order of the texts has changed.
        """
        require(
            list(filter(texts.__contains__, ids)) == list(texts),
            "the template of this tokenizer puts its texts in another order or repeats one: "
            "choose a tokenizer whose template is A, or A before B",
            DataError,
        )
        # All tokens between the texts are special tokens.
        edges = [-1, *map(ids.index, texts), len(ids)]
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

    def room(self, length: int) -> int:
        """Returns how many tokens all texts of an example may have in total.

        Args:
          length: The length of the example.

        Raises:
          DataError: Fewer than two tokens would fit.
        """
        require(
            length - self.num_added >= 2,
            f"length {length} leaves no room for two tokens between {self.num_added} special "
            f"tokens: choose at least {self.num_added + 2}",
            DataError,
        )
        return length - self.num_added

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
    """The special tokens around one text and around two texts. By default, there are none.

    Attributes:
      single: The layout of one text.
      pair: The layout of two texts.
    """

    single: Layout = Layout(((), ()), ((), ()), (0,))
    pair: Layout = Layout(((), (), ()), ((), (), ()), (0, 1))

    @classmethod
    def ending(cls, end: int) -> "Frame":
        """Returns the frame with the layouts ``A end`` and ``A end B end`` (T5)."""
        single = Layout(((), (end,)), ((), (0,)), (0,))
        return cls(single, Layout(((), (end,), (end,)), ((), (0,), (0,)), (0, 0)))

    @property
    def before(self) -> tuple[int, ...]:
        """The special tokens before one text.

        A prompt for a decoder begins with these tokens. The tokens of ``after`` are not added to
        it, because the model could not continue a text after an end token.
        """
        return self.single.marks[0]

    @property
    def after(self) -> tuple[int, ...]:
        """The special tokens after one text."""
        return self.single.marks[1]

    def without_types(self) -> "Frame":
        """Returns this frame with all token types set to 0, for a tokenizer without token types."""
        one, two = (
            replace(
                layout,
                mark_types=tuple((0,) * len(marks) for marks in layout.marks),
                text_types=(0,) * len(layout.text_types),
            )
            for layout in (self.single, self.pair)
        )
        return Frame(one, two)

    def layout(self, num_texts: int) -> Layout:
        """Returns the layout of one or two texts."""
        return self.single if num_texts == 1 else self.pair

    def join(self, *texts: Sequence[int]) -> Framed:
        """Adds the special tokens to the tokens of one or two texts."""
        return self.layout(len(texts)).join(*texts)

    def join_offsets(
        self, ids: Sequence[int], offsets: Sequence[tuple[int, int]]
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Adds special tokens to the ids of one text, and an offset ``(0, 0)`` for each of them."""
        before, after = ([(0, 0)] * len(marks) for marks in self.single.marks)
        return self.join(ids).ids, [*before, *offsets, *after]


@dataclass(frozen=True)
class BatchSettings(Checked):
    """The settings that determine how transformers makes batches with the tokenizer of a folder.

    A tokenizer has no such settings if flaxzoo trained it, or if it was loaded from a single file.

    Attributes:
      padding_side: Whether texts are padded on the left or on the right.
      truncation_side: Whether texts are truncated on the left or on the right.
      split_special_tokens: Whether the name of a special token in a text is read as ordinary text.
      token_types: Whether token types are returned. If not, they are all 0.
    """

    padding_side: Side = "right"
    truncation_side: Side = "right"
    split_special_tokens: bool = False
    token_types: bool = False

    @classmethod
    def of_folder(cls, folder: Path) -> "BatchSettings | None":
        """Reads the settings of a folder that contains a model or that ``save`` wrote.

        Raises:
          DataError: A setting has a wrong type.
        """
        stated = optional_object(folder / CONFIG)
        model = optional_object(folder / "config.json")
        # Return None if the folder neither contains a model nor was written by `save`.
        if not model and "padding_side" not in stated:
            return None
        # Find the class as AutoTokenizer does, because the class determines the defaults.
        tokenizer_json = optional_object(folder / "tokenizer.json")
        name = stated.get("tokenizer_class") or model.get("tokenizer_class")
        name = str(name or _CLASSES.get(str(model.get("model_type")))).removesuffix("Fast")
        is_byte_level = "ByteLevel" in str(tokenizer_json.get("pre_tokenizer"))
        ignored = model.get("model_type") in GENERIC_TYPES + FIXED_TYPES
        if ignored or (name == "LlamaTokenizer" and is_byte_level):
            name = "TokenizersBackend"  # as AutoTokenizer reads such a folder
        names = stated.get("model_input_names")
        usual_side = "left" if name in _PAD_LEFT else "right"
        found: dict[str, Any] = {
            "padding_side": _direction(tokenizer_json, "padding", usual_side),
            "truncation_side": _direction(tokenizer_json, "truncation", "right"),
            "split_special_tokens": False,
            "token_types": _TYPES in names if isinstance(names, list) else name in _TYPED,
        }
        # Settings that the files state override the defaults of the class.
        found |= {key: stated[key] for key in found if stated.get(key) is not None}
        try:
            return cls(**found)
        except FieldError as error:
            raise DataError(f"{folder / CONFIG}: {error}") from None

    def fields(self) -> dict[str, object]:
        """Returns the fields of ``tokenizer_config.json`` that state the settings."""
        types = (_TYPES,) if self.token_types else ()
        return {
            "padding_side": self.padding_side,
            "truncation_side": self.truncation_side,
            "split_special_tokens": self.split_special_tokens,
            "model_input_names": ["input_ids", *types, "attention_mask"],
        }


def _direction(content: JsonObject, name: str, default: str) -> str:
    """Returns the side of ``padding`` or ``truncation``, or the default if the file lacks it."""
    found = content.get(name)
    direction = found.get("direction") if isinstance(found, dict) else None
    return str(direction or default).lower()
