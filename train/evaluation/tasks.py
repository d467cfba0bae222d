"""Tasks that evaluate a model, in `flaxzoo evaluate` and in the evaluations of a run.

A task is a task of lm-evaluation-harness, retrieval over a collection of texts, or a file of
prompts with answers. All tasks open the model from its folder. During training, they use the
current parameters of the run.
"""

import dataclasses
import functools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from ...data.chat.policy import PromptRecord, prompt_record
from ...data.chat.records import Dialogue
from ...data.common.errors import DataError
from ...data.common.fields import require
from ...data.common.files import file_lines, matching_files
from ...data.common.json_lines import parse_lines
from ...data.common.json_text import JsonObject
from ...data.common.progress import LogFn, Progress
from ...data.sources.retrieval.collection import RetrievalData, read_retrieval
from ...models.config import TransformerConfig
from ...models.heads.specs import CAUSAL_HEADS, require_head
from ...models.text.chat.conversation import answer_options
from ...models.text.completions import Prompt
from ...models.text.embed import TextEmbedder
from ...models.text.folder import open_folder
from ...models.text.generate import TextGenerator
from ...models.text.prompting.harness import (
    HarnessTasks,
    evaluate_tasks,
    harness_model,
    open_tasks,
)
from ...models.text.text_model import Loaded
from ...models.text.translate import TextTranslator
from ..evaluate_config import EvaluateConfig
from ..losses.metrics import text_scores
from .vectors.retrieval import bm25_scores, is_cross_encoder, model_scores

Results = dict[str, dict[str, float | int]]
"""Maps the name of each task to its metrics. The first metric is the main metric."""


@dataclasses.dataclass(frozen=True)
class Judged:
    """A model to evaluate.

    Attributes:
        folder: The folder of a run or a model.
        step: The checkpoint. Defaults to the newest checkpoint.
        loaded: The model and its parameters, if these are newer than the checkpoints in the folder.
        log: Called with lines about how many texts were truncated.
    """

    folder: str | Path
    step: int | None = None
    loaded: Loaded | None = None
    log: LogFn = print


class Task(ABC):
    """One or more opened tasks, which use the same questions in all evaluations."""

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """The names of the tasks, which prefix the metric names. Task groups add prefixes."""

    @abstractmethod
    def check(self, model: TransformerConfig) -> None:
        """Raises UserError if these tasks cannot evaluate a model of this kind."""

    @abstractmethod
    def __call__(self, judged: Judged) -> Results:
        """Evaluates a model and returns its metrics."""


@dataclasses.dataclass(frozen=True)
class Harness(Task):
    """Tasks of lm-evaluation-harness."""

    tasks: HarnessTasks
    settings: EvaluateConfig

    @property
    def names(self) -> tuple[str, ...]:
        """See `Task`."""
        return tuple(map(str, self.tasks.given))

    def check(self, model: TransformerConfig) -> None:
        """See `Task`."""
        _require_writer(model, self.names[0])

    def __call__(self, judged: Judged) -> Results:
        """See `Task`."""
        settings = self.settings
        lm = harness_model(judged.folder, step=judged.step, log=judged.log, loaded=judged.loaded)
        # During training, the run shows its own progress bar.
        lm.progress = Progress(quiet=judged.loaded is not None)
        return evaluate_tasks(
            lm, self.tasks, shots=settings.shots, limit=settings.limit, chat=settings.chat
        )


@dataclasses.dataclass(frozen=True)
class Search(Task):
    """Retrieval over an entire collection; see `evaluate_retrieval`."""

    prefix: ClassVar[str] = "beir:"
    name: str
    collection: RetrievalData

    @classmethod
    def open(cls, task: str, settings: EvaluateConfig) -> "Search":
        """Reads the collection of `beir:FOLDER`."""
        del settings
        return cls(Path(task.removeprefix(cls.prefix)).name, read_retrieval(task))

    @property
    def names(self) -> tuple[str, ...]:
        """See `Task`."""
        return (self.name,)

    def check(self, model: TransformerConfig) -> None:
        """See `Task`."""
        if not is_cross_encoder(model):
            require_head(model, TextEmbedder.heads, *_remedy("embeds no texts", self.name))

    @functools.cached_property
    def _lexical(self) -> dict[str, float]:
        return bm25_scores(self.collection)

    def __call__(self, judged: Judged) -> Results:
        """See `Task`."""
        scores = model_scores(
            judged.folder,
            self.collection,
            step=judged.step,
            loaded=judged.loaded,
            log=judged.log,
        )
        main = {"ndcg@10": scores["ndcg@10"]}
        return {self.name: {**main, **scores, **self._lexical}}


@dataclasses.dataclass(frozen=True)
class Answers(Task):
    """Compares the model's greedy continuations of prompts with the answers in a file."""

    prefix: ClassVar[str] = "prompts:"
    name: str
    records: Sequence[PromptRecord]
    references: Sequence[str]
    settings: EvaluateConfig

    @classmethod
    def open(cls, task: str, settings: EvaluateConfig) -> "Answers":
        """Reads the prompts and answers of `prompts:FILE.jsonl`.

        Raises:
            DataError: The file is missing or empty, or a record has no prompt or no answer.
        """
        glob = task.removeprefix(cls.prefix)
        records, references = [], []
        for path in matching_files(glob, task):
            for location, row in parse_lines(file_lines(path)):
                records.append(prompt_record(row, location))
                references.append(_reference(row, location))
        require(records, f"{task!r} is empty: give at least one record", error=DataError)
        limit = settings.limit
        return cls(Path(glob).stem, records[:limit], references[:limit], settings)

    @property
    def names(self) -> tuple[str, ...]:
        """See `Task`."""
        return (self.name,)

    def check(self, model: TransformerConfig) -> None:
        """See `Task`."""
        _require_writer(model, self.name)
        require(
            model.head != "seq2seq_lm" or not self.settings.stop,
            f"stop {' '.join(self.settings.stop)} requires a causal language model, but the task "
            f"{self.name} measures an encoder-decoder: leave stop out",
        )

    def __call__(self, judged: Judged) -> Results:
        """See `Task`."""
        model, _ = open_folder(judged.folder)
        write = self._translated if model.head == "seq2seq_lm" else self._continued
        texts = [text.strip() for text in write(judged)]
        scores = text_scores([text.strip() for text in self.references], texts)
        numbers = {name: x for name, x in scores.items() if not isinstance(x, str)}
        return {self.name: {"exact_match": numbers.pop("exact_match"), **numbers}}

    def _continued(self, judged: Judged) -> list[str]:
        """Returns a causal language model's continuations of the prompts."""
        writer = TextGenerator.of_run(
            judged.folder, step=judged.step, log=judged.log, loaded=judged.loaded
        )
        encoded = [record.encode(writer.tokenizer) for record in self.records]
        # In a conversation, the tokens that end a turn also end the answer.
        is_chat = any(isinstance(record.context, Dialogue) for record in self.records)
        stop = self.settings.stop
        ends: dict[str, Any] = answer_options(writer, stop) if is_chat else {"stop_strings": stop}
        completed = writer.complete(
            [Prompt(one.text, ids=one.ids) for one in encoded],
            log=judged.log,
            do_sample=False,
            max_new_tokens=self.settings.max_new_tokens,
            **ends,
        )
        return [each.completions[0].text for each in completed]

    def _translated(self, judged: Judged) -> list[str]:
        """Returns an encoder-decoder's output texts for the prompts."""
        translator = TextTranslator.of_run(
            judged.folder, step=judged.step, log=judged.log, loaded=judged.loaded
        )
        prompts = [record.context.opening for record in self.records]
        # Decode greedily, as for a causal language model.
        outputs = translator(
            prompts,
            truncate=True,
            log=judged.log,
            num_beams=1,
            num_return_sequences=1,
            max_new_tokens=self.settings.max_new_tokens,
        )
        return [translations[0].text for translations in outputs]


KINDS: Mapping[str, type[Search] | type[Answers]] = {
    Search.prefix: Search,
    Answers.prefix: Answers,
}
"""Maps the prefix of a task name to the kind of task. All names without such a prefix are tasks of
the harness."""


def open_all(settings: EvaluateConfig) -> tuple[Task, ...]:
    """Opens the tasks of a run or a command.

    Args:
        settings: The names and the settings of the tasks.

    Raises:
        UserError: A task is unknown, its data or a package is missing, or two tasks have the same
          name.
    """
    opened: list[Task] = []
    others: list[str] = []
    for name in settings.tasks:
        prefix, colon, _ = name.partition(":")
        kind = KINDS.get(prefix + colon)
        if kind is not None:
            opened.append(kind.open(name, settings))
        else:
            others.append(name)
    if others:
        opened.append(Harness(open_tasks(others), settings))
    counts = Counter(name for task in opened for name in task.names)
    twice = sorted(name for name, count in counts.items() if count > 1)
    problem = f"tasks has several tasks with the name {', '.join(twice)}: rename a file or a folder"
    require(not twice, problem)
    return tuple(opened)


def judge(tasks: Iterable[Task], judged: Judged) -> Results:
    """Evaluates a model on all tasks; returns `{"hellaswag": {"acc": 0.3, …}, …}`.

    Each line of the log begins with the names of its task.
    """
    results: Results = {}
    for task in tasks:
        title = ", ".join(task.names)
        log = functools.partial(_log_of_task, judged.log, title)
        results |= task(dataclasses.replace(judged, log=log))
    return results


def _log_of_task(log: LogFn, title: str, line: str) -> None:
    log(f"{title}: {line}")


def flat(results: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Flattens the metrics to `{"hellaswag/acc": 0.3, …}`, with the names used in evaluations."""
    return {
        f"{name}/{metric}": float(value)
        for name, metrics in results.items()
        for metric, value in metrics.items()
    }


def _remedy(cannot: str, name: str) -> tuple[str, str]:
    return cannot, f"leave out the task {name}"


def _require_writer(model: TransformerConfig, name: str) -> None:
    """Raises UserError if a model cannot generate text."""
    heads: Container[str] = (*CAUSAL_HEADS, "seq2seq_lm")
    require_head(model, heads, *_remedy("writes no text", name))


def _reference(row: JsonObject, location: str) -> str:
    """Returns the answer in a record: the field `answer`, or the text that follows the prompt."""
    match row:
        # The last message is an answer only if the assistant wrote it.
        case (
            {"answer": str() | int() | float() as answer}
            | {"completion": str() | int() | float() as answer}
            | {"messages": [*_, {"role": "assistant", "content": str(answer)}]}
        ):
            return str(answer)
        case _:
            raise DataError(
                f"{location} has no answer: give a field answer, with a text or a number"
            )
