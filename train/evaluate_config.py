"""The tasks of evaluations during training. The fields are options of the command line."""

import dataclasses

from ..data.common.fields import Checked, NonNegativeInt, PositiveInt, require, require_default

OPTIONS = ("tasks_every", "limit", "shots", "chat", "max_new_tokens", "stop")
"""The fields that have no effect if `tasks` is empty."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateConfig(Checked):
    """The tasks of a run's evaluations, in addition to the validation data.

    Raises:
        UserError: a number is out of range, or a name is empty.
    """

    tasks: tuple[str, ...] = ()
    """The tasks that evaluations run: the name or YAML file of a task in lm-evaluation-harness
    (such as hellaswag), beir:FOLDER (retrieval over an entire collection) or prompts:FILE.jsonl
    (prompts whose completions are compared with answers). The metrics of a task are named
    TASK/METRIC, such as hellaswag/acc; best_metric uses the same names."""
    tasks_every: NonNegativeInt = 0
    """Steps between two evaluations that run the tasks; 0: every evaluation runs them."""
    limit: PositiveInt | None = None
    """The number of questions of each task. Defaults to all questions. A task beir:FOLDER always
    uses all of its queries."""
    shots: NonNegativeInt | None = None
    """The number of solved examples in each prompt of a harness task. Defaults to the number that
    the task defines."""
    chat: bool = False
    """Whether the chat template formats the prompts of harness tasks as turns of a conversation."""
    max_new_tokens: PositiveInt = 256
    """The maximum number of tokens that the model generates for a prompt of prompts:FILE."""
    stop: tuple[str, ...] = ()
    r"""Strings, such as '\n', that end the completion of a prompt of prompts:FILE. The completion
    does not include them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("tasks", "stop"):
            values = getattr(self, name)
            require(
                all(values), f"{name} must not have an empty text, got {list(values)}: remove it"
            )
        if not self.tasks:
            require_default(self, OPTIONS, "requires tasks, got none")
        require(
            len(set(self.tasks)) == len(self.tasks),
            f"tasks must name each task once, got {' '.join(self.tasks)}: remove the repetition",
        )
