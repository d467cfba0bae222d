"""Converts records of a source to sentences that have a BIO tag for each word.

``token_classification`` tokenizes these sentences.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from ..common.errors import DataError
from ..common.fields import require
from ..features.bio_tags import faulty_tags, find_scheme, first_tags, to_bio
from ..sources.conll import Sentence
from ..sources.labelled_names import Record
from .labelled_examples import ExampleSet


@dataclass(frozen=True)
class TaggingExample:
    """A sentence with a tag for each word.

    Attributes:
      words: The words of the sentence.
      tags: The tag of each word, or None if unknown (in prediction).
      location: The location of the example, for messages, such as `train.tsv line 7`.
      first_line: The line number of the first word, if each word is on a separate line.
      document: The document that contains the sentence, if the source marks documents.
    """

    words: tuple[str, ...]
    tags: tuple[str, ...] | None
    location: str = field(repr=False)
    first_line: int | None = field(default=None, repr=False)
    document: str = field(default="", repr=False)

    @property
    def known_tags(self) -> tuple[str, ...]:
        """The tags of the words; empty if they are unknown."""
        return self.tags or ()

    @property
    def texts(self) -> tuple[str, ...]:
        """The text of the sentence."""
        return (" ".join(self.words),)

    @property
    def group(self) -> str:
        """See ``Example``; sentences of the same document, or equal sentences, share a split."""
        return self.document or self.texts[0]

    def location_of(self, word: int) -> str:
        """Returns the location of a word, for messages."""
        if self.first_line is None:
            return f"{self.location} word {word + 1}"
        return f"{self.location} line {self.first_line + word}"


def from_columns(sentence: Sentence) -> TaggingExample:
    """Makes an example from a sentence in columns.

    Raises:
      DataError: A word has no tag (the message names file and line).
    """
    example = TaggingExample(
        sentence.words, sentence.tags, sentence.file, sentence.first_line, sentence.document
    )
    # A separator at the end of a line results in an empty last column.
    if "" in sentence.tags:
        raise DataError(f"{example.location_of(sentence.tags.index(''))} has a word without a tag")
    return example


def from_record(record: Record, names: tuple[str, ...] | None) -> TaggingExample:
    """Makes an example from a list of words and a list of tags.

    Args:
      record: The record that contains the two lists.
      names: The names of the tags, if the tags are numbers as in published data sets.

    Raises:
      DataError: A value is not a list, the lists differ in length, an item of the first list is not
        a word, or an item of the second list is not a tag.
    """
    words, tags = record.values
    words = words_of(words, record.location)
    _check_list(tags, "tags", record.location)
    require(
        len(words) == len(tags),
        f"{record.location} has {len(words)} words and {len(tags)} tags: give each word one tag",
        error=DataError,
    )
    return TaggingExample(
        words, tuple(_tag(t, names, record.location) for t in tags), record.location
    )


def _tag(value: object, names: tuple[str, ...] | None, location: str) -> str:
    if names is not None and isinstance(value, int) and 0 <= value < len(names):
        return names[value]
    # Without names, a tag is a text or a whole number. Exclude bool, which is an int in Python.
    is_name = type(value) in (str, int) and str(value).strip()
    require(
        names is None and is_name,
        f"{location} has {value!r} among its tags: give each word one tag, O outside of all spans",
        error=DataError,
    )
    return str(value)


def _check_list(values: object, noun: str, location: str) -> None:
    problem = f"{location} has no list of {noun}: name the fields #words,tags"
    require(isinstance(values, list), problem, error=DataError)


def words_of(values: Any, location: str) -> tuple[str, ...]:
    """Checks that a value is a list of words, and returns the words.

    Raises:
      DataError: The value is not a list, or an item is not a word.
    """
    _check_list(values, "words", location)
    for value in values:
        require(
            type(value) in (str, int, float),
            f"{location} has {value!r} among its words: a word is a text or a number",
            error=DataError,
        )
    return tuple(map(str, values))


def in_bio(
    examples: list[TaggingExample], strict: bool, names: tuple[str, ...] | None = None
) -> ExampleSet[TaggingExample]:
    """Infers the tagging scheme of all sentences, and converts the tags to BIO.

    Args:
      examples: The sentences.
      strict: Whether to reject an ``I-`` tag that does not continue a span. If False, such a tag is
        read as ``B-``.
      names: The tags that a published data set declares.

    Raises:
      DataError: A tag does not follow the scheme of the other tags (the message names file and
        line).
    """
    sentences = [example.known_tags for example in examples]
    scheme = find_scheme(sentences)
    # In the scheme BIO, an I- tag must continue a span.
    stray = first_tags(sentences, "I") if scheme == "BIO" else []
    faulty = [*faulty_tags(sentences, scheme), *(stray if strict else ())]
    for (sentence, word), tag in faulty[:1]:
        raise DataError(
            f"{examples[sentence].location_of(word)} has the tag {tag!r}, which does not fit the "
            f"tags around it in the scheme {scheme}: correct it"
        )
    notes = [] if scheme in ("BIO", "plain") else [f"{scheme} tags converted to BIO"]
    for (sentence, word), _ in stray[:1]:
        location = examples[sentence].location_of(word)
        notes.append(
            f"{len(stray):,} tags I- do not continue a span and are read as B- ({location})"
        )
    converted = tuple(
        replace(example, tags=to_bio(tags, scheme))
        for example, tags in zip(examples, sentences, strict=True)
    )
    # Convert the declared tags to BIO in the same way as the tags of the examples.
    declared = tuple(to_bio([name], scheme)[0] for name in names) if names is not None else None
    return ExampleSet(converted, declared, tuple(notes))
