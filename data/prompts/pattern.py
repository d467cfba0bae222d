"""Defines the pattern of a prompt: instance, label, instance, label, …, instance.

A few-shot prompt repeats one pattern (Brown et al. 2020, section 2 and appendix G). The choice of
the pattern hardly matters, as long as all examples follow the same pattern.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from string import Formatter

from ..common.errors import UserError, reported
from ..common.fields import require, require_one_of
from ..sources.builtin.patterns import TEMPLATE

_NAME = re.compile(r"[^\W\d]\w*")
_SPACES = " \t"


Part = tuple[str, str]
"""A text and the name of the field that follows the text."""


@dataclass(frozen=True)
class PromptPattern:
    r"""A template for the text of an example, with fields in braces; the last field is the answer.

    Example::

        pattern = data.PromptPattern("Q: {question}\nA: {answer}\n")
        shot = pattern.example({"question": "What is 48 plus 76?", "answer": "124."})
        prompt = shot + pattern.query({"question": "What is 2 plus 3?"})  # ends with "A:"

    Attributes:
      template: The text with at least one field, such as ``{answer}``. Write ``{{`` and ``}}`` for
        literal braces. If no text follows the last field, a line feed ends the example.

    Raises:
      UserError: The template has no field, repeats a field, or has braces that enclose no name.
    """

    template: str
    _parts: list[Part] = field(init=False, repr=False, compare=False)
    _end: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        parts, end = _parts_of(self.template)
        names = [name for _, name in parts]
        require(
            names,
            f"the pattern {self.template!r} has no field: write names in braces, the answer last, "
            "as 'Q: {question} A: {answer}'",
        )
        require(
            len({*names}) == len(names),
            f"the pattern {self.template!r} must have each field once, got {', '.join(names)}",
        )
        # End the example with a line feed if nothing follows the answer. Because the class is
        # frozen, use `object.__setattr__`.
        if not end:
            end = "\n"
            object.__setattr__(self, "template", f"{self.template}\n")
        object.__setattr__(self, "_parts", parts)
        object.__setattr__(self, "_end", end)

    @classmethod
    def of_labels(cls, labels: Sequence[str], fields: Sequence[str]) -> "PromptPattern":
        """Returns a pattern with one line for each field; the line starts with the field's label.

        For example, ``of_labels(["Poor English input: ", "Good English output: "], ["input",
        "output"])`` returns the pattern ``grammar``.

        Raises:
          UserError: The numbers of labels and fields differ.
        """
        require(
            len(labels) == len(fields),
            f"{len(labels)} labels ({', '.join(map(repr, labels))}) are given for {len(fields)} "
            f"fields ({', '.join(fields)}): give one label for each",
        )
        # Labels are plain text, so braces in a label do not enclose a field.
        escaped = [label.replace("{", "{{").replace("}", "}}") for label in labels]
        lines = [f"{label}{{{name}}}\n" for label, name in zip(escaped, fields, strict=True)]
        return cls("".join(lines))

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of the fields in order; the last is the answer."""
        return tuple(name for _, name in self._parts)

    @property
    def answer_field(self) -> str:
        """The name of the field that the model writes."""
        return self.fields[-1]

    def example(self, fields: Mapping[str, str]) -> str:
        """Returns the text of a complete example, including its answer.

        Raises:
          UserError: A field of the pattern is missing.
        """
        return self._filled(self._parts, fields) + self._end

    def query(self, fields: Mapping[str, str]) -> str:
        """Returns an example up to its answer, for the model to complete.

        Spaces and tabs before the answer are removed, but not line feeds. In most vocabularies a
        space belongs to the token that follows it, so after a prompt that ends with a space the
        model would have to continue with an unusual token.

        Args:
          fields: The fields of the query; the answer may be missing and is ignored.

        Raises:
          UserError: A field of the pattern is missing.
        """
        *before, (last, _) = self._parts
        return (self._filled(before, fields) + last).rstrip(_SPACES)

    def answer(self, fields: Mapping[str, str]) -> str:
        """Returns the answer, preceded by the spaces that ``query`` removed.

        Raises:
          UserError: The answer is missing.
        """
        before, name = self._parts[-1]
        return self._filled([(before[len(before.rstrip(_SPACES)) :], name)], fields)

    @property
    def stop(self) -> str:
        """The text that ends an answer: the text after the last field, or a line feed if blank."""
        return self._end if self._end.strip() else "\n"

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts that end an answer: ``stop``, and a new line that starts another example."""
        label = self._parts[0][0].strip()
        return (self.stop, f"\n{label}") if label and self.stop != "\n" else (self.stop,)

    def _filled(self, parts: Sequence[Part], fields: Mapping[str, str]) -> str:
        """Returns the text of some parts of an example."""
        for _, name in parts:
            require_one_of(f"the field of the pattern {self.template!r}", name, fields)
        return "".join(text + fields[name] for text, name in parts)


def _parts_of(template: str) -> tuple[list[Part], str]:
    """Divides a template with the syntax of ``str.format``; fields can only be plain names.

    Returns the parts, and the text after the last field.
    """
    parts: list[Part] = []
    before = ""
    problem = f"the pattern {template!r} has faulty braces"
    remedy = "write {{ and }} for braces that enclose no field"
    with reported(problem, remedy, ValueError, error=UserError):
        for text, name, form, conversion in Formatter().parse(template):
            before += text
            # The formatter also ends a text after an escaped brace, so join it with the next text.
            if name is None:
                continue
            if not _NAME.fullmatch(name) or form or conversion:
                raise ValueError(f"{{{name}}} in place of the name of a field, as {{answer}}")
            parts.append((before, name))
            before = ""
    return parts, before


PATTERNS = {
    "grammar": PromptPattern("Poor English input: {input}\nGood English output: {output}\n"),
    "words": PromptPattern(
        "{definition} An example of a sentence that uses the word {word} is:\n{sentence}\n"
    ),
    "news": PromptPattern("Title: {title}\nSubtitle: {subtitle}\nArticle: {article}\n"),
    "question": PromptPattern("Q: {question}\nA: {answer}\n"),
    "arithmetic": PromptPattern("Q: {question} A: {answer}\n"),
    "passage": PromptPattern("{context}\nQ: {question}\nA: {answer}\n"),
    "review": PromptPattern("Text: {text}\nLabel: {label}\n"),
    "pair": PromptPattern("Text: {text}\nSecond text: {text_b}\nLabel: {label}\n"),
    "translation": PromptPattern("{source} = {target}\n"),
    "patterns": PromptPattern(TEMPLATE),
}
"""The patterns that have a name. ``grammar``, ``words``, ``news`` and ``arithmetic`` are from
Brown et al. (figures 3.17, 3.16, 3.14 and section 3.9.1)."""


def prompt_pattern(name: str) -> PromptPattern:
    r"""Returns the pattern with a given name, or creates a pattern from a template.

    Args:
      name: A key of ``PATTERNS``, or a template with fields in braces, where ``\n`` and ``\t``
        mean a line feed and a tab.

    Raises:
      UserError: The name is neither a pattern nor a template.
    """
    if "{" not in name:
        require_one_of("the pattern, without a field in braces,", name, PATTERNS)
        return PATTERNS[name]
    # A shell does not interpret these backslashes, so replace the two escapes here.
    return PromptPattern(name.replace("\\n", "\n").replace("\\t", "\t"))


def pattern_for(fields: Sequence[str]) -> PromptPattern:
    """Returns the first named pattern that has exactly these fields, in any order.

    Raises:
      UserError: No pattern has these fields.
    """
    patterns = [one for one in PATTERNS.values() if set(one.fields) == set(fields)]
    require(
        patterns,
        f"no pattern has the fields {', '.join(fields)}: write one with these names in braces, the "
        "answer last",
    )
    return patterns[0]
