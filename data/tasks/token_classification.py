"""Prepares data for token classification: a tag for each word (entities, parts of speech).

As in Devlin et al. 2018, section 5.3, the tag of a word is predicted at its first token. A sentence
that is too long for an example continues in the next example at a word boundary, so that every word
is predicted exactly once.

The arrays of a batch are int32 [B, T]: ``input_ids``, ``attention_mask``, ``token_type_ids`` and
``labels``, which are -100 at tokens that do not predict a tag.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import ClassVar

import numpy as np

from ..common.errors import DataError, counted
from ..common.fields import require
from ..common.files import input_lines
from ..common.numbering import numbered
from ..dataset import ArraySpec, BatchSpec, Values, too_long
from ..features.bert_inputs import BertInputs, Template, token_specs
from ..features.bio_tags import span_labels
from ..features.predictions import Prediction, label_id, output
from ..sources.conll import Sentence, read_sentences, read_words
from ..sources.hash_split import Split
from ..sources.in_memory import Examples
from ..sources.labelled_names import Record, forms_of_rows
from ..sources.labelled_records import are_json_lines, read_objects
from ..sources.published.records import OpenedRecords
from ..tokenizers.base import Tokenizer
from .base import SourceField
from .labelled import LabelledLength
from .labelled_examples import ExampleSet, LabelledExamples
from .labels.given_labels import NamedLabelData, id_of
from .tagging_examples import TaggingExample, from_columns, from_record, in_bio, words_of

NOT_PREDICTED = -100
"""The label of a token that does not predict a tag."""


@dataclass(frozen=True, kw_only=True)
class TokenClassificationData(NamedLabelData[TaggingExample]):
    """Sentences with a tag for each word."""

    kind: ClassVar[str] = "token_classification"
    forms: ClassVar[dict[str, str]] = {
        "conll": "",
        **forms_of_rows("tokens,tags"),
        "tfds": "tokens,ner",
        "hf": "tokens,ner_tags",
        "memory": "tokens,tags",
    }
    published_fields: ClassVar[dict[str, str]] = {"wikiann": "tokens,tags"}
    label_field: ClassVar[int] = 1
    noun: ClassVar[str] = "sentences"
    field_names: ClassVar[str] = "words,tags"

    source: SourceField
    """conll:GLOB[#COLUMN] (by default the last column), jsonl:GLOB#tokens,tags,
    parquet:GLOB#tokens,tags, tfds:conll2003 or hf:NAME#tokens,ner_tags."""
    length: LabelledLength = 128
    """The number of tokens in a sequence, T."""

    def read(self, records: OpenedRecords, split: Split) -> ExampleSet[TaggingExample]:
        """See ``LabelledData``; ``conll:GLOB`` has columns instead of fields."""
        if records.source.kind == "conll":
            sentences = list(map(self._renamed, read_sentences(records.source)))
            return in_bio(list(map(from_columns, sentences)), split == "train")
        return super().read(records, split)

    def _renamed(self, sentence: Sentence) -> Sentence:
        """Replaces the numbers of tags in a sentence with names, if the user gives names."""
        if not self.label_names:
            return sentence
        location = f"{sentence.file} line {sentence.first_line}"
        ids = [id_of(tag, self.label_names, location) for tag in sentence.tags]
        return replace(sentence, tags=tuple(self.label_names[id] for id in ids))

    def labelled(
        self, records: Sequence[Record], names: tuple[str, ...] | None, split: Split
    ) -> ExampleSet[TaggingExample]:
        """See ``LabelledData``; converts all schemes to BIO, so that they are scored in one way.

        In training data, an ``I-`` tag that does not continue a span is an error; in evaluation
        data, it is read as ``B-``.
        """
        return in_bio([from_record(record, names) for record in records], split == "train", names)

    def labels_in(self, example: TaggingExample) -> tuple[str, ...]:
        """See ``LabelledData``; each span is counted once, at its ``B-`` tag."""
        return tuple(x for x in example.known_tags if x != "O" and not x.startswith("I-"))

    def unlabelled(self, records: Iterable[Record]) -> list[TaggingExample]:
        """See ``LabelledData``; the only field contains the words."""
        return [
            TaggingExample(words_of(r.values[0], r.location), None, r.location) for r in records
        ]

    def examples_of_source(self, name: str, unread: set[str]) -> list[TaggingExample]:
        """See ``LabelledData``; for ``conll:GLOB``, reads only the first column."""
        kind, _, location = name.partition(":")
        if kind == "conll":
            return _first_columns(location)
        return super().examples_of_source(name, unread)

    def examples_to_predict(self, path: str, unread: set[str]) -> list[TaggingExample]:
        """Reads one sentence per line, with words separated by blanks. A line may be empty.

        In a file ``*.conll``, each line has one word in its first column. In a file ``*.jsonl``,
        the field that contains the words is read.
        """
        if path.removesuffix(".gz").endswith(".conll"):
            return _first_columns(path)
        if are_json_lines(path):
            fields = self.fields_to_predict(("tokens",))
            return self.unlabelled(read_objects(input_lines(path), fields, unread=unread))
        return [
            TaggingExample(tuple(line.split()), None, f"{file} line {number}")
            for file, number, line in input_lines(path)
        ]

    def examples_in_memory(self, name: Examples, unread: set[str]) -> list[TaggingExample]:
        """Reads dicts of fields or texts; the words of a text are separated by blanks."""
        texts = [row for row in name.rows if isinstance(row, str)]
        if len(texts) < len(name.rows):
            return super().examples_in_memory(name, unread)
        return [
            TaggingExample(tuple(text.split()), None, f"examples[{i}]")
            for i, text in enumerate(texts)
        ]

    def labels(self) -> tuple[str, ...]:
        """Returns the tags of the source: ``O``, then ``B-`` and ``I-`` for every type of span.

        For a published data set, these are the declared tags, even if no training example has them.
        """
        whole = self._whole()
        found = chain.from_iterable(example.known_tags for example in whole.examples)
        return span_labels(found if whole.class_names is None else whole.class_names)

    def assumed_labels(self) -> tuple[str, ...]:
        """See ``DataConfig``."""
        return ("a", "b")

    def batch_spec(self, num_labels: int, num_choices: int) -> BatchSpec:
        """See ``DataConfig`` and ``TokenClassificationExamples.example``."""
        labels = ArraySpec((self.length,), Values.LABEL, num_classes=num_labels)
        return {**token_specs(self.length), "labels": labels}

    def encode(
        self,
        examples: Sequence[TaggingExample],
        tokenizer: Tokenizer,
        labels: tuple[str, ...],
        *,
        training: bool = False,
    ) -> "TokenClassificationExamples":
        """See ``LabelledData``; the arrays are the same for training and evaluation."""
        return tagged_examples(examples, tokenizer, labels, self.length)


def _first_columns(path: str) -> list[TaggingExample]:
    sentences = read_words(input_lines(path))
    return [TaggingExample(s.words, None, s.file, s.first_line) for s in sentences]


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenClassificationExamples(LabelledExamples[TaggingExample]):
    """Sentences as rows of tokens; see ``dataset.ExampleSource``.

    The R rows contain the W words of all sentences in order. The values are the label ids of the
    words, int32 [W].

    Attributes:
      first_words: The index of the first word in each row, followed by W, int64 [R + 1].
      positions: For each word, the position in its row of the token that predicts the word's tag,
        or -1 if there is none, int32 [W].
      labels: The names of the L labels.
    """

    first_words: np.ndarray
    positions: np.ndarray
    labels: tuple[str, ...]

    def labels_of(self, index: int, values: np.ndarray) -> dict[str, np.ndarray]:
        """Returns ``labels``, int32 [T], with -100 at tokens that do not predict a tag."""
        words = slice(self.first_words[index], self.first_words[index + 1])
        # A word that has no token has the position -1 and gets no label.
        positions = self.positions[words]
        labels = np.full(self.tokens.template.length, NOT_PREDICTED, np.int32)
        labels[positions[positions >= 0]] = values[words][positions >= 0]
        return {"labels": labels}

    def gold(self) -> list[list[str]]:
        """Returns the tags of each sentence."""
        return [list(example.known_tags) for example in self.examples]

    def decode(self, predictions: dict[str, np.ndarray]) -> list[Prediction]:
        """Converts label ids to tags; a word that has no token gets ``O``.

        Args:
          predictions: ``label_ids``, int [R, T], and optionally their ``probabilities``, float
            [R, T].

        Returns:
          For each sentence, ``{"words": [...], "tags": [...], "probabilities": [...]}``. The
          probability of a word that has no token is 0.
        """
        # The index of the row that contains each word, [W].
        rows = np.repeat(np.arange(len(self.tokens)), np.diff(self.first_words))
        # The model does not predict a tag for a word that has no token.
        nothing = self.labels.index("O") if "O" in self.labels else 0
        predicted = self.positions >= 0  # [W]
        ids = output(predictions, "label_ids", len(self.tokens))[rows, self.positions]  # [W]
        columns = {"tags": [self.labels[i] for i in np.where(predicted, ids, nothing)]}
        if "probabilities" in predictions:
            chances = output(predictions, "probabilities", len(self.tokens))[rows, self.positions]
            columns["probabilities"] = np.where(predicted, chances, 0.0).tolist()
        # The words of all rows are in one list, so divide the list into sentences again.
        ends = list(accumulate(len(example.words) for example in self.examples))
        return [
            {
                "words": list(example.words),
                **{name: items[end - len(example.words) : end] for name, items in columns.items()},
            }
            for example, end in zip(self.examples, ends, strict=True)
        ]


def tagged_examples(
    examples: Sequence[TaggingExample],
    tokenizer: Tokenizer,
    labels: tuple[str, ...],
    length: int,
) -> TokenClassificationExamples:
    """Tokenizes the words of sentences, and fills rows with the tokens.

    Args:
      examples: The sentences.
      tokenizer: The tokenizer.
      labels: The names of the labels.
      length: The length of a row, T.

    Raises:
      DataError: A tag is not a known label (the message names file and line), or a sentence has no
        tokens and the tokenizer's frame has no special tokens.
    """
    template = Template.of(tokenizer, length)
    # Positions in a row include the special tokens before the text.
    first = len(template.frame.before)
    rows: list[tuple[list[int]]] = []  # tokens of each row, without special tokens
    first_words, positions, num_cut = [0], [], 0
    for example in examples:
        pieces = word_pieces(example.words, tokenizer)
        num_cut += sum(len(ids) > template.room(1) for ids, _ in pieces)
        # Each sentence starts a new row, and a long sentence fills several rows.
        for words in fill_rows(pieces, template.room(1)):
            row: list[int] = []
            for ids, mark in words:
                positions.append(first + len(row) + mark if ids else -1)
                row += ids
            require(
                row or template.frame.single.num_added,
                f"{example.location_of(0)} has no token, and this {tokenizer.kind} tokenizer adds "
                "no special token that a model could read instead: leave it out",
                error=DataError,
            )
            rows.append((row,))
            first_words.append(len(positions))
    # The summary states the number of words, because a sentence may fill several rows.
    limit = f"data.length {length}"
    notes = [counted(len(positions), "word")]
    if len(rows) > len(examples):
        notes.append(f"{len(rows):,} rows of {length} tokens")
    notes += too_long(num_cut, len(positions), "word", limit, consequence="truncated")
    if lost := positions.count(-1):
        notes.append(f"{counted(lost, 'word')} without a token")
    return TokenClassificationExamples(
        tokens=BertInputs.of(template, rows),
        examples=tuple(examples),
        values=_label_ids(examples, labels),
        notes=tuple(notes),
        first_words=np.array(first_words, np.int64),
        positions=np.array(positions, np.int32),
        labels=labels,
    )


def word_pieces(words: Sequence[str], tokenizer: Tokenizer) -> list[tuple[list[int], int]]:
    """Returns the tokens of each word; works with any tokenizer.

    The words are tokenized as one text. A token belongs to the word that contains the token's last
    character. A token that is only a space belongs to the next word.

    Args:
      words: The words of one sentence.
      tokenizer: A tokenizer of any kind.

    Returns:
      For each word, its token ids, and the index of the first of these tokens that contains a
      character of the word. The list of ids is empty if no token belongs to the word.
    """
    ids, offsets = tokenizer.encode_with_offsets(" ".join(words), add_special_tokens=False)
    # The index of the first character of each word in the text, then the end, [num_words + 1].
    starts = np.array([0, *accumulate(len(word) + 1 for word in words)])
    pieces: list[tuple[list[int], int]] = [([], 0) for _ in words]
    # Collects tokens that are only a space, and gives them to the next word.
    blanks: list[int] = []
    last = [max(start, end - 1) for start, end in offsets]  # last character of each token
    of_word = np.searchsorted(starts, last, "right") - 1  # the word of each token
    behind = (starts[of_word + 1] - 1 == last).tolist()  # the character after a word is a space
    for id, word, blank in zip(ids, of_word.tolist(), behind, strict=True):
        blanks.append(id)
        if not blank:
            ids_of_word, mark = pieces[word]
            pieces[word] = ids_of_word, mark if ids_of_word else len(blanks) - 1
            ids_of_word += blanks
            blanks = []
    return pieces


def fill_rows(
    pieces: Sequence[tuple[list[int], int]], room: int
) -> list[list[tuple[list[int], int]]]:
    """Fills rows with words in order, and truncates any word that is longer than a row."""
    rows: list[list[tuple[list[int], int]]] = [[]]
    used = 0
    for ids, mark in pieces:
        if len(ids) > room:
            # Keep the token that predicts the word's tag, and as many tokens around it as fit.
            first = max(0, min(mark, len(ids) - room))
            ids, mark = ids[first : first + room], mark - first
        if used + len(ids) > room:
            rows.append([])
            used = 0
        rows[-1].append((ids, mark))
        used += len(ids)
    return rows


def _label_ids(examples: Sequence[TaggingExample], labels: tuple[str, ...]) -> np.ndarray | None:
    # In prediction, no example has tags.
    if examples[0].tags is None:
        return None
    ids = numbered(labels)
    return np.array(
        [
            label_id(tag, ids, example.location_of(word))
            for example in examples
            for word, tag in enumerate(example.known_tags)
        ],
        np.int32,
    )
