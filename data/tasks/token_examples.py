"""Sentences with a tag for each word as their sources have them, and their tags as BIO."""

from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import DataError
from ..features.bio_tags import InconsistentTagError, find_scheme, misplaced_inside, to_bio
from ..sources.conll import Sentence
from ..sources.labelled_records import Record
from .labelled import ExampleSet


@dataclass(frozen=True)
class TaggingExample:
    """A sentence.

    Attributes:
        words: Its words.
        tags: A tag for each; None if they are to be predicted.
        location: Where the example was read, for messages: `train.tsv line 7`.
        first_line: The line of its first word, if each word has a line.
        document: The document that it is of, where its source marks them.
    """

    words: tuple[str, ...]
    tags: tuple[str, ...] | None
    location: str = field(repr=False)
    first_line: int | None = field(default=None, repr=False)
    document: str = field(default="", repr=False)

    @property
    def texts(self) -> tuple[str, ...]:
        """The sentence."""
        return (" ".join(self.words),)

    @property
    def group(self) -> str:
        """The sentences of a document stay together; where none are marked, equal ones."""
        return self.document or self.texts[0]

    def location_of(self, word: int) -> str:
        """Where a word stands."""
        if self.first_line is None:
            return f"{self.location} word {word + 1}"
        return f"{self.location} line {self.first_line + word}"


def from_columns(sentence: Sentence) -> TaggingExample:
    """Makes an example of a sentence in columns.

    Raises:
        DataError: A word has no tag (with file and line).
    """
    example = TaggingExample(
        sentence.words, sentence.tags, sentence.file, sentence.first_line, sentence.document
    )
    if "" in sentence.tags:
        raise DataError(f"{example.location_of(sentence.tags.index(''))} has a word without a tag")
    return example


def from_record(record: Record, names: tuple[str, ...] | None) -> TaggingExample:
    """Makes an example of a list of words and one of their tags.

    Args:
        record: The two lists.
        names: Of the tags where these are numbers, as in published data sets.

    Raises:
        DataError: One is no list, they are not equally long, or an item is no word or tag.
    """
    words, tags = record.values
    words = words_of(words, record.location)
    if not isinstance(tags, list):
        raise DataError(f"{record.location} has no list of tags: name the fields #words,tags")
    if len(words) != len(tags):
        raise DataError(
            f"{record.location} has {len(words)} words and {len(tags)} tags: give each word one"
        )
    return TaggingExample(
        words, tuple(_tag(t, names, record.location) for t in tags), record.location
    )


def _tag(value: Any, names: tuple[str, ...] | None, location: str) -> str:
    if names is not None and isinstance(value, int) and 0 <= value < len(names):
        return names[value]
    is_name = isinstance(value, str | int) and not isinstance(value, bool) and str(value).strip()
    if names is None and is_name:
        return str(value)
    raise DataError(
        f"{location} has {value!r} among its tags: give each word one, O outside of all spans"
    )


def words_of(values: Any, location: str) -> tuple[str, ...]:
    """Takes a list of words.

    Raises:
        DataError: It is no list, or an item is no word.
    """
    if not isinstance(values, list):
        raise DataError(f"{location} has no list of words: name the fields #words,tags")
    for value in values:
        if isinstance(value, bool | list | dict) or value is None:
            raise DataError(
                f"{location} has {value!r} among its words: a word is a text or a number"
            )
    return tuple(map(str, values))


def in_bio(
    examples: list[TaggingExample], strict: bool, names: tuple[str, ...] | None = None
) -> ExampleSet[TaggingExample]:
    """Converts the tags of all sentences, which have one scheme, to BIO.

    Args:
        examples: The sentences.
        strict: Whether an ``I-`` that continues nothing is a fault; else it is read as ``B-``.
        names: The tags that a published data set declares.

    Raises:
        DataError: A tag does not follow the scheme of the others (with file and line).
    """
    sentences = [example.tags or () for example in examples]
    try:
        scheme = find_scheme(sentences, strict)
    except InconsistentTagError as error:
        raise error.at(examples[error.sentence].location_of(error.word)) from None
    notes = [] if scheme in ("BIO", "plain") else [f"{scheme} tags converted to BIO"]
    stray = misplaced_inside(sentences) if scheme == "BIO" else []
    if stray:
        sentence, word = stray[0]
        location = examples[sentence].location_of(word)
        notes.append(f"{len(stray):,} tags I- that continue nothing read as B- ({location})")
    converted = tuple(
        replace(example, tags=to_bio(tags, "IOB1" if stray else scheme))
        for example, tags in zip(examples, sentences, strict=True)
    )
    declared = tuple(to_bio([name], scheme)[0] for name in names) if names is not None else None
    return ExampleSet(converted, declared, tuple(notes))
