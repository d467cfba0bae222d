"""Generation by a continuous batch."""

import collections
import dataclasses
from collections.abc import Mapping

from ...data.common.json_text import JsonValue
from ...data.common.progress import LogFn
from ...models.text.completions import Prompt
from ...models.text.generate import TextGenerator
from .app import Served
from .engine import Task

KIND = "generation"


@dataclasses.dataclass(frozen=True)
class Generation:
    """A text to generate."""

    prompt: Prompt
    options: Mapping[str, JsonValue]


class GenerationWorker:
    """Generates texts."""

    def __init__(self, generator: TextGenerator, log: LogFn) -> None:
        """Creates the worker of a model."""
        self._generator, self._log = generator, log
        self._waiting: collections.deque[Task] = collections.deque()

    @property
    def wait(self) -> float | None:
        """0 if there is a text."""
        return 0.0 if self._waiting else None

    def add(self, task: Task) -> None:
        """Adds a text."""
        self._waiting.append(task)

    def cancel(self, task: Task) -> None:
        """Removes a text."""
        if task in self._waiting:
            self._waiting.remove(task)

    def reset(self) -> None:
        """Removes all texts."""
        self._waiting.clear()

    def warm_up(self) -> None:
        """Compiles nothing yet."""

    def step(self) -> None:
        """Generates a text."""
        task = self._waiting.popleft()
        work = task.work
        (done,) = self._generator.complete([work.prompt], **work.options)
        task.send(done.completions[0], last=True)


def open_generation(name: str, folder: str, log: LogFn) -> Served:
    """Opens a causal language model."""
    generator = TextGenerator.of_run(folder, log=log)
    return Served(name, folder, generator, {KIND: GenerationWorker(generator, log)})
