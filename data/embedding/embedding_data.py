"""Anchors with their positives, negatives and scores, for models that compute sentence vectors.

The arrays of a batch are int32: ``anchor_ids`` and ``anchor_mask`` [B, Q] of the first column, and
``input_ids`` and ``attention_mask`` [B, C, T] of the other columns, the positive first. If an
example has fewer texts than others, the rows of the missing texts are all zeros. Q and T are the
lengths of the longest texts, rounded up to a multiple of 8, or the limits of the settings.
``scores`` are float32 [B] for scored pairs, and [B, C] if each document has a score. Labeled texts
have only the first column, and ``labels`` int32 [B]. With several data sets, ``data_set`` int32 [B]
has the index of the data set that each example is from. A training batch has examples of one data
set.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import numpy as np

from ..common.errors import DataError, counted
from ..common.fields import require
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
from .sets import sources_of
from .text_table import NumberedTexts, TextTable


@dataclass(frozen=True, kw_only=True)
class EmbeddingData(ColumnsData):
    """Pairs of texts with similar meaning, with negatives or with scores; or texts with labels."""

    kind: ClassVar[str] = "embedding"

    length: LabelledLength = 128
    """Maximum number of tokens of a document, T. Longer texts are truncated. With `init_from`,
    `flaxzoo train` takes the length that the folder of the model states, up to 512."""
    query_length: LabelledLength | None = None
    """Maximum number of tokens of an anchor, Q, at most `length`. Defaults to `length`."""
    query_prompt: str | None = None
    """The text that precedes each anchor. Defaults to the prompt of `init_from` for queries."""
    document_prompt: str | None = None
    """The text that precedes each document. Defaults to the prompt of `init_from` for documents."""
    lowercase: bool | None = None
    """Whether texts are lowercased before tokenization. Defaults to the setting of `init_from`."""
    mixing: Mixing = "proportional"
    """The batches of several data sets (sets:A=SOURCE | B=SOURCE). proportional: all batches, in a
    random order. round_robin: one batch of each data set in turn, until the smallest data set
    ends."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.anchor_length <= self.length,
            f"query_length {self.query_length} must be at most length {self.length}: raise length",
        )

    @property
    def anchor_length(self) -> int:
        """The padded length of an anchor, in tokens, Q."""
        return self.query_length or self.length

    @cached_property
    def sets(self) -> dict[str, "EmbeddingData"]:
        """The settings of each data set by its name; empty for a single source."""
        sources, validation = sources_of(self.source_name), self._sources_of_sets(self.validation)
        return {
            name: replace(self, source=source, validation=validation.get(name))
            for name, source in sources.items()
        }

    def _sources_of_sets(self, given: SourceLike | None) -> dict[str, str]:
        """Returns the sources of an evaluation by name, which must be the data sets of training."""
        names = sources_of(self.source_name)
        found = {} if given is None else sources_of(as_source(given))
        require(
            given is None or found.keys() == names.keys(),
            f"the run has the data sets {', '.join(names)}, "
            f"but {given!r} does not name them: write sets:"
            + " | ".join(f"{name}=SOURCE" for name in names),
            error=DataError,
        )
        return found

    def _part(self, split: Split) -> ExampleSet[EmbeddingExample]:
        if not self.sets:
            return super()._part(split)
        return _joined({name: data._part(split) for name, data in self.sets.items()})

    def whole_source(
        self, source: SourceLike, tokenizer: Tokenizer, labels: tuple[str, ...]
    ) -> DataSplit:
        """See ``DataConfig``; several data sets must have the names of the training data sets."""
        if not self.sets:
            return super().whole_source(source, tokenizer, labels)
        sources = self._sources_of_sets(source)
        parts = {
            name: data._read(*data._open(sources[name]), "validation")
            for name, data in self.sets.items()
        }
        return self._split(_joined(parts), tokenizer, labels)

    def score_form(self) -> ScoreForm:
        """Reads the training examples, and returns which kind of scores they have."""
        return form_of(self._part("train").examples[0])

    def labels_in(self, example: EmbeddingExample) -> tuple[str, ...]:
        """See ``RecordData``."""
        return () if example.label is None else (example.label,)

    def batch_spec(self, num_labels: int, num_choices: int) -> BatchSpec:
        """See ``DataConfig`` and the top of this file; the scores are not included."""
        del num_labels, num_choices
        anchor, documents = (self.anchor_length,), (1 + (self.num_negatives or 0), self.length)
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
    ) -> "EmbeddingExamples":
        """See ``RecordData``; each text is tokenized once."""
        del labels
        texts = NumberedTexts.of(examples)
        rows, number = texts.rows, texts.rows.shape[1] - 1
        queries_in, cut_queries = self._encoded(
            texts.queries, tokenizer, "anchor", self.query_prompt, self.anchor_length
        )
        documents_in, cut_documents = self._encoded(
            texts.documents, tokenizer, "document", self.document_prompt, self.length
        )
        # Arrays for the loss: scores, labels and data sets.
        scores, classes = _scores(examples, number), _classes(examples)
        sets = np.array([example.data_set for example in examples], np.int32)
        order = np.arange(len(rows))
        # An evaluation reads the data sets in turn, and spreads equal documents within each.
        if not training:
            order = _spread(rows[:, min(number, 1)])
            order = order[np.argsort(sets[order], kind="stable")]
        forms: dict[int, ScoreForm] = {x.data_set: form_of(x) for x in examples}
        return EmbeddingExamples(
            queries=queries_in,
            documents=documents_in,
            rows=rows[order],
            scores=None if scores is None else scores[order],
            labels=None if classes is None else classes[order],
            text_keys=texts.keys[order],
            data_sets=sets[order],
            names=tuple(self.sets),
            forms=tuple(forms[number] for number in sorted(forms)),
            mixing=self.mixing,
            notes=(
                f"{counted(number, 'document')} each, in rows of {queries_in.template.length} and "
                f"{documents_in.template.length} tokens (data.length {self.length})",
                *cut_queries,
                *cut_documents,
            ),
        )

    def _encoded(
        self, texts: TextTable, tokenizer: Tokenizer, noun: str, prompt: str | None, length: int
    ) -> tuple[BertInputs, tuple[str, ...]]:
        """Tokenizes different texts, and counts truncated texts."""
        made = [(self._lowered(f"{prompt or ''}{text}"),) for text in texts.numbers]
        template = Template.of(tokenizer, length)
        tokens, num_truncated = encode_texts(made, tokenizer, template, texts.locations)
        setting = "length" if noun == "document" else "query_length"
        limit = f"data.{setting} {length}"
        cut = too_long(num_truncated, len(made), noun, limit, consequence="truncated")
        return tokens.fitted(), cut

    def _lowered(self, text: str) -> str:
        # Lowercase character by character, as the tokenizers library does: a final Σ becomes σ, not
        # ς.
        return "".join(map(str.lower, text)) if self.lowercase else text


def form_of(example: EmbeddingExample) -> ScoreForm:
    """Returns which kind of score an example has."""
    if example.label is not None:
        return "labels"
    if example.score is None:
        return "none"
    return "documents" if isinstance(example.score, tuple) else "pairs"


def _classes(examples: Sequence[EmbeddingExample]) -> np.ndarray | None:
    """Returns the index of each example's label, int32 [n], or None if the texts have no labels."""
    labels = [example.label or "" for example in examples]
    if not any(labels):
        return None
    return np.unique(labels, return_inverse=True)[1].astype(np.int32)


def _joined(parts: dict[str, ExampleSet[EmbeddingExample]]) -> ExampleSet[EmbeddingExample]:
    """Joins data sets, and numbers them in the given order."""
    examples = (
        replace(example, data_set=number)
        for number, part in enumerate(parts.values())
        for example in part.examples
    )
    sizes = ", ".join(f"{name} {len(part.examples):,}" for name, part in parts.items())
    lines = (f"{name}: {line}" for name, part in parts.items() for line in part.lines)
    return ExampleSet(tuple(examples), notes=(f"data sets {sizes}",), lines=tuple(lines))


def _spread(documents: np.ndarray) -> np.ndarray:
    """Returns an order of the examples: every document occurs once before any occurs twice.

    Equal documents are then far apart in an evaluation, whose batches follow the order.
    """
    by_document = np.argsort(documents, kind="stable")
    _, counts = np.unique(documents, return_counts=True)
    # The first example of a document has turn 0, the second has turn 1, and so on.
    turns = np.concatenate(list(map(np.arange, counts)))
    # `turns` belongs to the order by document; sort by it, then by the original index.
    return by_document[np.lexsort((by_document, turns))]


def _scores(examples: Sequence[EmbeddingExample], number: int) -> np.ndarray | None:
    """Returns the scores of pairs [n], or of documents [n, C] with 0 for absent documents.

    If data sets of both kinds are mixed, the score of a pair is in the first of the C columns.
    """
    # Count the lists of scores in each data set: either all of its scores are lists, or none is.
    forms = Counter((x.data_set, isinstance(x.score, tuple)) for x in examples if x.scores)
    for data_set, _ in forms:
        lists, numbers = forms[data_set, True], forms[data_set, False]
        require(
            not (lists and numbers),
            f"{lists:,} of {lists + numbers:,} records with scores have a list of scores: give a "
            "number in each record, or a list in each",
            error=DataError,
        )
    if not forms:
        return None
    # Pad every row with zeros to C scores if some data set has scores of documents.
    has_lists = any(is_list for _, is_list in forms)
    scores = np.zeros((len(examples), number if has_lists else 1), np.float32)
    for row, example in zip(scores, examples, strict=True):
        row[: len(example.scores)] = example.scores
    return scores if has_lists else scores[:, 0]
