r"""Instructions from labeled data: templates turn the examples into conversations.

A TOML file lists the tasks. Each task has a source and several wordings (``forms``) of an
instruction (Wei et al. 2021, section 2.1)::

    seed = 0

    [[tasks]]
    name = "acceptability"
    source = "tsv:cola.tsv#2,4"          # a label and a text
    labels = { 0 = "no", 1 = "yes" }     # words in place of labels, if wanted
    forms = [
      "Is this sentence acceptable?\n{text}\n{label}",
      "\"{text}\" Would a linguist accept that? {label}",
    ]

A form is a pattern (``data.PromptPattern``); its last field is the assistant's answer. The seed,
the task and the index of an example determine which form the example gets.
"""

import hashlib
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..common.errors import DataError, UserError
from ..common.fields import Checked, make_record, require
from ..prompts.examples import prompt_examples
from ..prompts.pattern import PromptPattern
from ..sources.hash_split import Split

KIND = "instructions"
"""The prefix of a source that names a file of tasks, such as ``instructions:tasks.toml``."""


@dataclass(frozen=True)
class InstructionTask(Checked):
    """A labeled source, and the patterns that turn its examples into instructions.

    Attributes:
      name: The name of the task, as used in ``hold_out``.
      source: The source; see ``data.prompt_examples``.
      forms: At least one pattern; see ``data.PromptPattern``.
      labels: The words that replace the answers. An answer that is not a key stays unchanged.
    """

    name: str
    source: str
    forms: tuple[str, ...]
    labels: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.forms, f"forms of the task {self.name} must have at least one pattern")

    def rows(self, seed: int, split: Split) -> Iterator[tuple[str, Mapping[str, object]]]:
        """Yields each example's location, for error messages, and its record.

        Raises:
          DataError: The source cannot be read, or an example lacks a field of a form.
        """
        # Parse the forms and the labels only once for all examples.
        patterns = tuple(map(PromptPattern, self.forms))
        words = {name: str(word) for name, word in self.labels.items()}
        for number, example in enumerate(prompt_examples(self.source, split)):
            location = f"{self.source} example {number + 1}"
            # Choose the form by a hash, so that the form does not depend on earlier examples.
            drawn = hashlib.blake2b(f"{seed} {self.name} {number}".encode(), digest_size=8)
            form = patterns[int.from_bytes(drawn.digest(), "big") % len(patterns)]
            missing = sorted({*form.fields} - example.fields.keys())
            require(
                not missing,
                f"{location} has the fields {', '.join(example.fields)}, and a form of the task "
                f"{self.name} needs {', '.join(missing)}: correct the form",
                error=DataError,
            )
            answer = example.fields[form.answer_field]
            messages = [
                {"role": "user", "content": form.query(example.fields).strip()},
                {"role": "assistant", "content": words.get(answer, answer)},
            ]
            yield location, {"task": self.name, "messages": messages}


@dataclass(frozen=True)
class _TaskFile(Checked):
    tasks: tuple[Mapping[str, object], ...]
    seed: int = 0

    def parsed(self) -> list[InstructionTask]:
        tasks = [make_record(InstructionTask, table, "tasks.") for table in self.tasks]
        names = [task.name for task in tasks]
        differ = len({*names}) == len(names) > 0
        require(differ, f"the names of [[tasks]] must differ, got {names}")
        return tasks


def read_instructions(path: str, split: Split) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Yields the location and the record of each example, for all tasks in a file.

    Args:
      path: The TOML file.
      split: The split, for sources that have splits.

    Raises:
      DataError: The file is missing or malformed, or a source cannot be read.
    """
    file = Path(path).expanduser()
    problem = f"{path} is not a file: name a TOML file with [[tasks]]"
    require(file.is_file(), problem, error=DataError)
    try:
        content = make_record(_TaskFile, tomllib.loads(file.read_text(encoding="utf-8")))
        tasks = content.parsed()
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, UserError) as error:
        raise DataError(f"{path} must have [[tasks]] of name, source and forms: {error}") from None
    for task in tasks:
        yield from task.rows(content.seed, split)
