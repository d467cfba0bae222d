r"""Labeled data as instructions: templates that turn examples into conversations.

A TOML file lists the tasks, each with a source and several forms of an instruction (Wei et al.
2021, section 2.1)::

    seed = 0

    [[tasks]]
    name = "acceptability"
    source = "tsv:cola.tsv#2,4"          # a label and a text
    labels = { 0 = "no", 1 = "yes" }     # words in place of labels, if wanted
    forms = [
      "Is this sentence acceptable?\n{text}\n{label}",
      "\"{text}\" Would a linguist accept that? {label}",
    ]

A form is a pattern (``data.PromptPattern``), whose last field is the assistant's answer. Which form
an example gets depends on the seed, the task and the number of the example.
"""

import hashlib
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..common.errors import DataError
from ..prompts.examples import prompt_examples
from ..prompts.pattern import PromptPattern
from ..sources.hash_split import Split

KIND = "instructions"
"""The kind of source that names such a file: ``instructions:tasks.toml``."""
_KEYS = {"name", "source", "forms", "labels"}


@dataclass(frozen=True)
class InstructionTask:
    """A labeled source and the patterns that turn its examples into instructions.

    Attributes:
      name: The name of the task, as in ``hold_out``.
      source: The source; see ``data.prompt_examples``.
      forms: The patterns, at least one.
      labels: Words to replace answers; an answer that is not a key stays.
    """

    name: str
    source: str
    forms: tuple[PromptPattern, ...]
    labels: Mapping[str, str]

    def rows(self, seed: int, split: Split) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yields the location of each example, and its conversation with the name of the task.

        Raises:
          DataError: The source cannot be read, or an example lacks a field of a form.
        """
        for number, example in enumerate(prompt_examples(self.source, split)):
            location = f"{self.source} example {number + 1}"
            # A hash draws the form, so that it does not depend on the examples before.
            drawn = hashlib.blake2b(f"{seed} {self.name} {number}".encode(), digest_size=8)
            form = self.forms[int.from_bytes(drawn.digest(), "big") % len(self.forms)]
            missing = [name for name in form.fields if name not in example.fields]
            if missing:
                raise DataError(
                    f"{location} has the fields {', '.join(example.fields)}, and a form of the "
                    f"task {self.name} needs {missing[0]}: correct the form"
                )
            answer = example.fields[form.answer_field]
            yield (
                location,
                {
                    "task": self.name,
                    "messages": [
                        {"role": "user", "content": form.query(example.fields).strip()},
                        {"role": "assistant", "content": self.labels.get(answer, answer)},
                    ],
                },
            )


def read_instructions(path: str, split: Split) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the conversations of all tasks of a file with their locations.

    Args:
      path: The TOML file.
      split: The split, for sources that have splits.

    Raises:
      DataError: The file is missing or malformed, or a source cannot be read.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise DataError(f"{path} is not a file: name a file of TOML with [[tasks]]")
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is not valid TOML: {error}") from None
    tasks, seed = content.get("tasks"), content.get("seed", 0)
    unknown = sorted(content.keys() - {"tasks", "seed"})
    if unknown or not isinstance(tasks, list) or not tasks or not isinstance(seed, int):
        raise DataError(
            f"{path} has {', '.join(content) or 'nothing'}: it should have [[tasks]], and perhaps "
            "an integer seed"
        )
    parsed = [_task(table, path) for table in tasks]
    names = [task.name for task in parsed]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise DataError(f"{path} has the task {twice!r} twice: give each a name of its own")
    for task in parsed:
        yield from task.rows(seed, split)


def _task(table: object, path: str) -> InstructionTask:
    if not isinstance(table, Mapping) or not {"name", "source", "forms"} <= table.keys() <= _KEYS:
        has = ", ".join(table) if isinstance(table, Mapping) else table
        raise DataError(
            f"{path}: a task has {has}: it needs name, source and forms; labels if wanted"
        )
    forms, labels = table["forms"], table.get("labels", {})
    if not isinstance(forms, list) or not forms or not all(isinstance(x, str) for x in forms):
        raise DataError(f"{path}: forms of the task {table['name']} must be a list of patterns")
    if not isinstance(labels, Mapping):
        raise DataError(f"{path}: labels of the task {table['name']} must be a table of words")
    words = {str(label): str(word) for label, word in labels.items()}
    patterns = tuple(PromptPattern(form) for form in forms)
    return InstructionTask(str(table["name"]), str(table["source"]), patterns, words)
