"""Makes few-shot prompts: several examples of a task, followed by a query."""

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

from ..common.errors import UserError
from ..common.fields import Checked, NonNegativeInt, require
from .examples import PromptExample
from .pattern import PromptPattern


@dataclass(frozen=True)
class FewShot(Checked):
    r"""Makes prompts that consist of examples and a query.

    Example::

        shots = data.FewShot(data.PATTERNS["grammar"], data.prompt_examples("grammar.jsonl"), 3)
        prompt = shots.prompt({"input": "I eated the purple berries."})

    Attributes:
      pattern: The pattern that formats each example.
      examples: The examples to choose from. All queries of a task get the same examples in the
        same order, but never an example that equals the query.
      num_shots: The number of examples before the query.
      seed: If None, the first examples are chosen, in their order; otherwise the examples are
        shuffled first. In both cases, increasing the number of shots only adds examples.
      balanced: Whether all answers occur about equally often among the chosen examples, if there
        are enough examples.

    Raises:
      UserError: There are fewer examples than shots, or an example lacks a field of the pattern.
    """

    pattern: PromptPattern
    examples: Sequence[PromptExample]
    num_shots: NonNegativeInt
    seed: int | None = None
    balanced: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        available = len(self.examples)
        require(
            self.num_shots <= available,
            f"the number of shots must be at most {available}, the number of examples, got "
            f"{self.num_shots}",
        )
        for number, example in enumerate(self.examples if self.num_shots else (), start=1):
            try:
                self.pattern.example(example.fields)
            except UserError as error:  # a field is missing
                raise UserError(f"{error} (example {number} of {available})") from None

    @cached_property
    def _order(self) -> dict[str | None, list[int]]:
        """The indices of the examples of each task, in the order of selection."""
        of_task: defaultdict[str | None, list[int]] = defaultdict(list)
        seen = set()
        for index, example in enumerate(self.examples):
            key = (example.task, self._text_of(example.fields, self.pattern.fields))
            # Skip duplicates, because they add no information to a prompt.
            if key not in seen:
                of_task[example.task].append(index)
            seen.add(key)
        for task, indices in of_task.items():
            if self.seed is not None:
                # Seed by task, so that the order of a task does not depend on the other tasks.
                random.Random(f"{self.seed} {task}").shuffle(indices)
            if self.balanced:
                of_task[task] = self._balanced(indices)
        return of_task

    def _balanced(self, indices: Sequence[int]) -> list[int]:
        """Sorts examples into rounds. Each round has one example of every answer that is left."""
        seen: Counter[str] = Counter()
        rounds = {}
        for index in indices:
            answer = self.pattern.answer(self.examples[index].fields)
            rounds[index] = seen[answer]
            seen[answer] += 1
        # The sort is stable, so the order inside a round does not change.
        return sorted(indices, key=rounds.__getitem__)

    @staticmethod
    def _text_of(fields: Mapping[str, str], names: Sequence[str]) -> tuple[str, ...]:
        """Returns the values of some fields, without surrounding white space, for comparisons."""
        return tuple(fields.get(name, "").strip() for name in names)

    def shots(self, query: PromptExample | Mapping[str, str]) -> list[PromptExample]:
        """Returns the examples for a query.

        Without a seed, the result has the same order as ``examples``. With a seed, the example that
        was chosen first is the last, directly before the query.

        Raises:
          UserError: The task of the query has too few examples.
        """
        fields, task = _query(query)
        if not self.num_shots:
            return []
        # Exclude the answer from the comparison, because a query may lack it.
        compared = self.pattern.fields[:-1] or self.pattern.fields
        text = self._text_of(fields, compared)
        others = (
            index
            for index in self._order.get(task, ())
            if self._text_of(self.examples[index].fields, compared) != text
        )
        chosen = list(islice(others, self.num_shots))
        of = "" if task is None else f" of the task {task!r}"
        require(
            len(chosen) == self.num_shots,
            f"the number of shots must be at most {len(chosen)}, the number of examples{of} that "
            f"differ from the query, got {self.num_shots}",
        )
        # Reverse the order, so that `fitting` drops the examples that were chosen last.
        order = sorted(chosen) if self.seed is None else chosen[::-1]
        return [self.examples[index] for index in order]

    def parts(self, query: PromptExample | Mapping[str, str]) -> list[str]:
        """Returns the text of each example, followed by the text of the query.

        Raises:
          UserError: An example or the query lacks a field, or there are too few examples.
        """
        texts = [self.pattern.example(example.fields) for example in self.shots(query)]
        return [*texts, self.pattern.query(_query(query)[0])]

    def prompt(self, query: PromptExample | Mapping[str, str]) -> str:
        """Returns the prompt for a query; see ``parts``."""
        return "".join(self.parts(query))

    def fitting(
        self,
        query: PromptExample | Mapping[str, str],
        num_tokens: Callable[[str], int],
        limit: int,
        *,
        drop: bool = True,
    ) -> str:
        """Returns the prompt, without its first examples if it would be too long.

        Args:
          query: The fields of the query.
          num_tokens: A function that returns the number of tokens in a text.
          limit: The maximum number of tokens in the prompt.
          drop: Whether to drop the first examples of a prompt that is too long. If False, such a
            prompt raises an error.

        Raises:
          UserError: The query alone, or with ``drop=False`` the whole prompt, has more tokens than
            the limit.
        """
        # Count the tokens of the whole text, because a token may span two examples.
        parts, size = self.parts(query), 0
        # Try the prompt with all examples, then without the first example, and so on. The query is
        # never dropped.
        for first in range(len(parts) if drop else 1):
            text = "".join(parts[first:])
            size = num_tokens(text)
            if size <= limit:
                return text
        number = 0 if drop else len(parts) - 1
        raise UserError(
            f"the prompt of {number} examples and the query must have at most {limit} tokens, got "
            f"{size}: shorten the query, or request fewer examples"
        )


def _query(query: PromptExample | Mapping[str, str]) -> tuple[Mapping[str, str], str | None]:
    """Returns the fields and the task of a query."""
    if isinstance(query, PromptExample):
        return query.fields, query.task
    return query, query.get("task")
