"""Data for training embedding models: anchors with positives, negatives and scores.

The arrays of a batch are int32: ``anchor_ids`` and ``anchor_mask`` [B, Q] contain the first column,
and ``input_ids`` and ``attention_mask`` [B, C, T] contain the other columns, with the positive
first. If an example has fewer texts than other examples, the rows of the missing texts are all
zeros. Q and T are the lengths of the longest texts, rounded up to a multiple of 8, but at most
`query_length` and `length`. ``scores`` is float32 [B] for scored pairs, and [B, C] if each document
has a score. Labeled texts have only the first column and ``labels``, int32 [B]. If there are
several data sets, ``data_set``, int32 [B], contains the index of each example's data set. All
examples of a training batch come from the same data set.

If ``row_length`` is L, a training batch of R packed rows contains the arrays ``input_ids`` and
``segment_ids`` [R, L], and ``text_mask`` [R, S, 1 + C], because a row contains up to S complete
examples. Text c of example s in a row has the segment id s · (1 + C) + c + 1 if its mask is 1; text
0 is the anchor. ``scores`` has the shape [R, S] or [R, S, C].
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import numpy as np

from ..common.errors import DataError, counted
from ..common.fields import PositiveInt, require, without_none
from ..dataset import ArraySpec, BatchSpec, DataSplit, Values, too_long
from ..features.bert_inputs import BertInputs, Template, encode_texts
from ..orders.mixed import Mixing
from ..sources.documents import SourceLike, as_source
from ..sources.hash_split import Split
from ..tasks.labelled import LabelledLength
from ..tasks.labelled_examples import ExampleSet
from ..tokenizers.base import Tokenizer
from .columns import EmbeddingExample
from .columns_data import ColumnsData
from .embedding_examples import EmbeddingExamples, ScoreForm
from .packed_examples import PackedExamples
from .sets import sources_of
from .text_table import NumberedTexts, TextTable


@dataclass(frozen=True, kw_only=True)
class EmbeddingData(ColumnsData):
    """Pairs of similar texts, possibly with negatives or scores, or labeled texts."""

    kind: ClassVar[str] = "embedding"

    length: LabelledLength = 128
    """Maximum number of tokens in a document, T. Longer texts are truncated. With `init_from`,
    `flaxzoo train` defaults to the length in the model's folder, but at most 512.
    """
    query_length: LabelledLength | None = None
    """Maximum number of tokens in an anchor, Q, at most `length`. Defaults to `length`."""
    query_prompt: str | None = None
    """The text before each anchor. Defaults to the query prompt of `init_from`."""
    document_prompt: str | None = None
    """The text before each document. Defaults to the document prompt of `init_from`."""
    lowercase: bool | None = None
    """Whether texts are lowercased before tokenization. Defaults to the setting of `init_from`."""
    row_length: PositiveInt | None = None
    """Number of tokens in a packed row, at most the maximum input length of the model. A packed row
    contains all texts of several examples without padding between them, and the batch size then
    counts rows. If None, each text is in a separate padded row. Packed rows are not supported for
    labeled texts or several data sets.
    """
    mixing: Mixing = "proportional"
    """How to order the batches of several data sets (sets:A=SOURCE | B=SOURCE). proportional: use
    all batches in a random order. round_robin: use one batch of each data set in turn until the
    smallest data set is used up.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.anchor_length <= self.length,
            f"query_length {self.query_length} must be at most length {self.length}: raise length",
        )
        require(
            self.row_length is None or not self.sets,
            f"row_length {self.row_length} requires a single data set, got {self.source_name!r}: "
            "leave row_length out",
        )

    @property
    def anchor_length(self) -> int:
        """The padded length of an anchor in tokens, Q."""
        return self.query_length or self.length

    @property
    def lengths(self) -> tuple[int, int]:
        """The maximum number of tokens in a text or, if rows are packed, in a row."""
        longest = self.row_length or self.length
        return longest, longest

    @cached_property
    def sets(self) -> dict[str, "EmbeddingData"]:
        """The settings of each data set, by its name; empty if there is only one source."""
        sources, validation = sources_of(self.source_name), self._sources_of_sets(self.validation)
        return {
            name: replace(self, source=source, validation=validation.get(name))
            for name, source in sources.items()
        }

    def _sources_of_sets(self, source: SourceLike | None) -> dict[str, str]:
        """Returns the evaluation source of each training data set, by name."""
        if source is None:
            return {}
        names, sources = sources_of(self.source_name), sources_of(as_source(source))
        require(
            sources.keys() == names.keys(),
            f"the run has the data sets {', '.join(names)}, "
            f"but {source!r} does not name them: write sets:"
            + " | ".join(f"{name}=SOURCE" for name in names),
            error=DataError,
        )
        return sources

    def _part(self, split: Split) -> ExampleSet[EmbeddingExample]:
        if not self.sets:
            return super()._part(split)
        return _joined({name: data._part(split) for name, data in self.sets.items()})

    def whole_source(
        self, source: SourceLike, tokenizer: Tokenizer, labels: tuple[str, ...]
    ) -> DataSplit:
        """See ``DataConfig``. Several data sets must have the names of the training data sets."""
        if not self.sets:
            return super().whole_source(source, tokenizer, labels)
        sources = self._sources_of_sets(source)
        parts = {
            name: data._read(data.open(sources[name]), "validation")
            for name, data in self.sets.items()
        }
        return self._split(_joined(parts), tokenizer, labels)

    def score_form(self) -> ScoreForm:
        """Reads the training examples, and returns the type of their scores."""
        return self._part("train").examples[0].form

    def labels_in(self, example: EmbeddingExample) -> tuple[str, ...]:
        """See ``RecordData``."""
        return () if example.label is None else (example.label,)

    def batch_spec(self, num_labels: int, num_choices: int) -> BatchSpec:
        """See ``DataConfig`` and the module docstring. Excludes the scores."""
        del num_labels, num_choices
        num_documents = 1 + (self.num_negatives or 0)
        if self.row_length is not None:
            # Assume that the average length of a text is half of the maximum.
            most = self.anchor_length + num_documents * self.length
            slots = max(1, 2 * self.row_length // most)
            return {
                "input_ids": ArraySpec((self.row_length,), Values.SOURCE_TOKEN),
                "segment_ids": ArraySpec((self.row_length,), Values.SEGMENT),
                "text_mask": ArraySpec((slots, 1 + num_documents), Values.MASK),
            }
        anchor, documents = (self.anchor_length,), (num_documents, self.length)
        return {
            "anchor_ids": ArraySpec(anchor, Values.SOURCE_TOKEN),
            "anchor_mask": ArraySpec(anchor, Values.MASK),
            "input_ids": ArraySpec(documents, Values.SOURCE_TOKEN),
            "attention_mask": ArraySpec(documents, Values.MASK),
        }

    def encode(
        self,
        examples: Sequence[EmbeddingExample],
        tokenizer: Tokenizer,
        labels: tuple[str, ...],
        *,
        training: bool = False,
    ) -> EmbeddingExamples | PackedExamples:
        """See ``RecordData``. Tokenizes each text only once, and packs only training examples."""
        del labels
        texts = NumberedTexts.of(examples)
        rows, num_documents = texts.rows, texts.rows.shape[1] - 1
        queries_in, cut_queries = self._encoded(
            texts.queries, tokenizer, self.query_prompt, self.anchor_length, field="query_length"
        )
        documents_in, cut_documents = self._encoded(
            texts.documents, tokenizer, self.document_prompt, self.length, field="length"
        )
        # The arrays for the loss: scores, labels and the indices of data sets.
        targets = without_none(
            {"scores": _scores(examples, num_documents), "labels": _classes(examples)}
        )
        sets = np.array([example.data_set for example in examples], np.int32)
        order = np.arange(len(rows))
        # Sort the examples for evaluation by data set, and spread equal documents within each data
        # set.
        if not training:
            order = _spread(rows[:, min(num_documents, 1)])
            order = order[np.argsort(sets[order], kind="stable")]
        forms: dict[int, ScoreForm] = {x.data_set: x.form for x in examples}
        padded = EmbeddingExamples(
            queries=queries_in,
            documents=documents_in,
            rows=rows[order],
            targets={name: values[order] for name, values in targets.items()},
            text_keys=texts.keys[order],
            data_sets=sets[order],
            names=tuple(self.sets),
            forms=tuple(forms[data_set] for data_set in sorted(forms)),
            mixing=self.mixing,
            notes=(
                f"{counted(num_documents, 'document')} each, in rows of "
                f"{queries_in.template.length} and {documents_in.template.length} tokens "
                f"(data.length {self.length})",
                *cut_queries,
                *cut_documents,
            ),
        )
        if not training or self.row_length is None:
            return padded
        require(
            "labels" not in targets,
            f"row_length {self.row_length} requires anchors with documents, and "
            f"{self.source_name!r} has texts with labels: leave row_length out",
        )
        return PackedExamples.of(padded, self.row_length)

    def _encoded(
        self,
        texts: TextTable,
        tokenizer: Tokenizer,
        prompt: str | None,
        length: int,
        *,
        field: str,
    ) -> tuple[BertInputs, tuple[str, ...]]:
        """Tokenizes texts and counts the truncated ones. The setting `field` limits the length."""
        prompted = [(self._lowered(f"{prompt or ''}{text}"),) for text in texts.numbers]
        template = Template.of(tokenizer, length)
        tokens, num_truncated = encode_texts(prompted, tokenizer, template, texts.locations)
        limit = f"data.{field} {length}"
        cut = too_long(num_truncated, len(prompted), "text", limit, consequence="truncated")
        return tokens.fitted(), cut

    def _lowered(self, text: str) -> str:
        # Lowercase each character separately, as the tokenizers library does, so that a final Σ
        # becomes σ and not ς.
        return "".join(map(str.lower, text)) if self.lowercase else text


def _classes(examples: Sequence[EmbeddingExample]) -> np.ndarray | None:
    """Returns the label index of each example, int32 [n], or None without labels."""
    labels = [example.label or "" for example in examples]
    if not any(labels):
        return None
    return np.unique(labels, return_inverse=True)[1].astype(np.int32)


def _joined(parts: dict[str, ExampleSet[EmbeddingExample]]) -> ExampleSet[EmbeddingExample]:
    """Joins data sets, and numbers them in order."""
    examples = (
        replace(example, data_set=i)
        for i, part in enumerate(parts.values())
        for example in part.examples
    )
    sizes = ", ".join(f"{name} {len(part.examples):,}" for name, part in parts.items())
    lines = (f"{name}: {line}" for name, part in parts.items() for line in part.lines)
    return ExampleSet(tuple(examples), notes=(f"data sets {sizes}",), lines=tuple(lines))


def _spread(documents: np.ndarray) -> np.ndarray:
    """Returns an order in which all documents occur once before any document occurs twice.

    The batches for evaluation follow this order, so that equal documents are far apart.
    """
    by_document = np.argsort(documents, kind="stable")
    _, counts = np.unique(documents, return_counts=True)
    # The turn of an example is the number of earlier examples with the same document.
    turns = np.concatenate(list(map(np.arange, counts)))
    # Sort by turn, and then by the original index. `turns` has the order of `by_document`.
    return by_document[np.lexsort((by_document, turns))]


def _scores(examples: Sequence[EmbeddingExample], num_documents: int) -> np.ndarray | None:
    """Returns the scores of pairs, [n], or of documents, [n, C], with 0 for absent documents.

    If some data sets have scores of pairs and others have scores of documents, the score of a pair
    is in the first of the C columns.
    """
    # For each data set, count the examples with a list of scores and the examples with a single
    # score. A data set must not contain both.
    forms = Counter((x.data_set, x.form == "documents") for x in examples if x.scores)
    for data_set, _ in forms:
        lists, singles = forms[data_set, True], forms[data_set, False]
        require(
            not (lists and singles),
            f"{lists:,} of {lists + singles:,} records with scores have a list of scores: give a "
            "number in each record, or a list in each",
            error=DataError,
        )
    if not forms:
        return None
    # If some data set has scores of documents, pad all rows with zeros to C scores.
    has_lists = any(is_list for _, is_list in forms)
    scores = np.zeros((len(examples), num_documents if has_lists else 1), np.float32)
    for row, example in zip(scores, examples, strict=True):
        row[: len(example.scores)] = example.scores
    return scores if has_lists else scores[:, 0]
