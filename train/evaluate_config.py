"""The tasks that judge a model during training; the fields are the command line's flags."""

import dataclasses

from ..data.common.fields import Checked, NonNegativeInt, PositiveInt, require, require_default

OPTIONS = ("tasks_every", "limit", "shots", "chat", "max_new_tokens", "stop")
"""The fields that have no effect without tasks."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateConfig(Checked):
    """The tasks of a run's evaluations, in addition to the validation data.

    Raises:
        UserError: a number is out of range, or a name is empty.
    """

    tasks: tuple[str, ...] = ()
    """Tasks that judge the model in evaluations: the names and YAML files of lm-evaluation-harness
    (hellaswag), beir:FOLDER (a search in a whole collection) and prompts:FILE.jsonl (texts that the
    model writes after prompts, compared with answers). A metric is named TASK/METRIC, such as
    hellaswag/acc, also in best_metric."""
    tasks_every: NonNegativeInt = 0
    """Steps between two evaluations on tasks; 0: every evaluation."""
    limit: PositiveInt | None = None
    """The number of questions of each task. Defaults to all; a search has all of its queries."""
    shots: NonNegativeInt | None = None
    """The number of examples in each prompt of the harness. Defaults to the task's number."""
    chat: bool = False
    """Whether prompts of the harness are turns of a conversation, with the chat template."""
    max_new_tokens: PositiveInt = 256
    """The number of tokens of a text of prompts:FILE."""
    stop: tuple[str, ...] = ()
    r"""Strings that end a text of prompts:FILE and are not part of it, such as '\n'."""

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
