"""Tasks of lm-evaluation-harness (Gao et al., EleutherAI) for a model of the zoo.

The harness is another package, `lm_eval` (the extra `eval`), and is imported on first use.
"""

import importlib.util
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ....data.common.errors import UserError, similar_names
from ....data.common.json_text import JsonValue
from ....data.common.progress import LogFn

if TYPE_CHECKING:
    from .adapter import HarnessModel


def harness_model(
    folder: str | Path, *, step: int | None = None, log: LogFn | None = None
) -> "HarnessModel":
    """Opens a model for `lm_eval.simple_evaluate(model=…)`, without torch or transformers.

    Example::

        lm = models.harness_model("runs/quickstart")
        results = lm_eval.simple_evaluate(model=lm, tasks=["hellaswag"], bootstrap_iters=0)

    Args:
        folder: a run folder, one in Hugging Face's form, or a name on the hub.
        step: which checkpoint; by default the newest.
        log: called with a line if the tokenizer may be another model's.

    Raises:
        UserError: the package `lm_eval` is missing, or the model writes no text.
        FileNotFoundError: the folder is not that of a run, or has no such checkpoint.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError(
            "lm-evaluation-harness is not installed: pip install 'flaxzoo[eval]', or evaluate "
            "local data with --shots and --data"
        )
    from .adapter import HarnessModel

    return HarnessModel.of_run(folder, step=step, log=log)


def evaluate_tasks(
    lm: "HarnessModel",
    tasks: Sequence[str | Mapping[str, JsonValue]],
    *,
    shots: int | None = None,
    limit: int | None = None,
    chat: bool = False,
) -> dict[str, dict[str, float | int]]:
    """Evaluates a model on tasks of the harness.

    Args:
        lm: from `harness_model`.
        tasks: names of tasks, groups or tags of the harness, its YAML files, or configurations.
        shots: the number of examples in each prompt; by default that of each task.
        limit: the number of questions of each task; by default all.
        chat: whether prompts are turns of a conversation, written by the chat template.

    Returns:
        The metrics of each task and group by name, without their standard errors.

    Raises:
        UserError: a task does not exist, or its data is not available.
    """
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    if not tasks:
        raise UserError("there is no task to evaluate: name at least one")
    for package in ("lm_eval", "huggingface_hub"):  # the latter tells each of its retries
        logging.getLogger(package).setLevel(logging.ERROR)
    names = [task for task in tasks if isinstance(task, str) and not Path(task).is_file()]
    manager = TaskManager(include_defaults=bool(names))
    for name in names:
        if name not in manager.task_index:
            raise UserError(_unknown(name, manager.all_tasks))
    if limit is not None and limit < 1:
        raise UserError(f"limit {limit} must be at least 1")
    if shots is not None and shots < 0:
        raise UserError(f"the number of shots is {shots}: it must not be negative")
    lm.in_chats = chat
    given = [task if isinstance(task, str) else dict(task) for task in tasks]
    for task in given:
        name = task if isinstance(task, str) else task.get("task")
        try:
            manager.load([task])
        except (ImportError, OSError) as error:
            raise UserError(
                f"the data of task {name} is not at hand ({_reason(error)}): fetch it on a machine "
                "with a network, or evaluate local data with --shots and --data"
            ) from error
        except Exception as error:  # a task's file may say anything
            raise UserError(
                f"the task {name} cannot be read ({_reason(error)}): correct it"
            ) from error
    try:
        results = simple_evaluate(
            model=lm,
            tasks=[*given],
            num_fewshot=shots,
            limit=limit,
            apply_chat_template=chat,
            bootstrap_iters=0,
            log_samples=False,
            task_manager=manager,
        )
    except UserError:
        raise
    except Exception as error:  # templates and metrics of tasks are programs
        raise UserError(
            f"the harness cannot evaluate {', '.join(map(str, names or tasks))} "
            f"({_reason(error)}): correct the task, or ask for fewer shots"
        ) from error
    assert results is not None  # only a process beside the first has none
    return {
        name: {
            key.removesuffix(",none"): value
            for key, value in metrics.items()
            if isinstance(value, int | float) and "_stderr" not in key
        }
        for name, metrics in results.get("results", {}).items()
    }


def _reason(error: Exception) -> str:
    """Returns the first line of an error's message, or the name of its class."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _unknown(name: str, known: Sequence[str]) -> str:
    """Returns the message about a task that does not exist."""
    similar = [n for n in known if name.lower() in n.lower()][:3] or similar_names(name, known)
    remedy = f"did you mean {' or '.join(similar)}?" if similar else "see lm_eval ls tasks"
    return f"the task {name} is not one of the harness's {len(known):,}: {remedy}"
