"""Evaluates models on tasks of lm-evaluation-harness (Gao et al., EleutherAI).

The harness is the package `lm_eval` (the extra `eval`), which is imported on first use.
"""

import dataclasses
import importlib.util
import logging
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ....data.common.errors import UserError, similar_names
from ....data.common.fields import NonNegativeInt, PositiveInt, check_value, require
from ....data.common.json_text import JsonValue
from ....data.common.progress import LogFn, ignore
from ..text_model import Loaded

if TYPE_CHECKING:
    from .adapter import HarnessModel


def require_harness() -> None:
    """Raises UserError if the package `lm_eval` is missing."""
    require(
        importlib.util.find_spec("lm_eval") is not None,
        "lm-evaluation-harness is not installed: pip install 'flaxzoo[eval]', or evaluate local "
        "data with --shots and --data",
    )


def harness_model(
    folder: str | Path,
    *,
    step: int | None = None,
    log: LogFn = ignore,
    loaded: Loaded | None = None,
) -> "HarnessModel":
    """Opens a model for `lm_eval.simple_evaluate(model=…)`, without torch or transformers.

    Example::

        lm = models.harness_model("runs/quickstart")
        results = lm_eval.simple_evaluate(model=lm, tasks=["hellaswag"], bootstrap_iters=0)

    Args:
        folder: a run folder, a folder in the Hugging Face format, or a name on the hub.
        step: the checkpoint. Defaults to the newest checkpoint.
        log: called with a line if the tokenizer may belong to another model.
        loaded: the model in the folder and its parameters. If None, the folder is loaded.

    Raises:
        UserError: the package `lm_eval` is missing, or the model cannot generate text.
        FileNotFoundError: `folder` is not a run folder, or has no such checkpoint.
    """
    require_harness()
    from .adapter import HarnessModel

    return HarnessModel.of_run(folder, step=step, log=log, loaded=loaded)


@dataclasses.dataclass(frozen=True)
class HarnessTasks:
    """Tasks of the harness whose data is available."""

    given: list[str | dict[str, Any]]
    """The tasks, as names, YAML files or configurations."""
    manager: Any
    """The `TaskManager` of these tasks."""


def open_tasks(tasks: Sequence[str | Mapping[str, JsonValue]]) -> HarnessTasks:
    """Finds tasks of the harness, and loads their data.

    Args:
        tasks: names of tasks, groups or tags of the harness, its YAML files, or configurations.

    Raises:
        UserError: the package `lm_eval` is missing, a task does not exist, or its data is not
          available.
    """
    require_harness()
    from lm_eval.tasks import TaskManager

    require(tasks, "tasks is empty: name at least one task")
    for package in ("lm_eval", "huggingface_hub"):  # `huggingface_hub` logs each retry
        logging.getLogger(package).setLevel(logging.ERROR)
    # Check the names first, since the harness reports an unknown name with a traceback.
    names = [task for task in tasks if isinstance(task, str) and not Path(task).is_file()]
    manager = TaskManager(include_defaults=bool(names))
    for name in names:
        require(name in manager.task_index, _unknown(name, manager.all_tasks))
    # Load each task's data, so that an error names the task.
    given = [task if isinstance(task, str) else dict(task) for task in tasks]
    for task in given:
        try:
            manager.load([task])
        except (ImportError, OSError) as error:
            raise UserError(
                f"the data of task {_name(task)} cannot be loaded ({_reason(error)}): download it "
                "on a machine with a network, or evaluate local data with --shots and --data"
            ) from error
        except Exception as error:  # a task's file may be wrong in any way
            raise UserError(
                f"the task {_name(task)} cannot be read ({_reason(error)}): correct it"
            ) from error
    return HarnessTasks(given, manager)


def evaluate_tasks(
    lm: "HarnessModel",
    tasks: Sequence[str | Mapping[str, JsonValue]] | HarnessTasks,
    *,
    shots: int | None = None,
    limit: int | None = None,
    chat: bool = False,
) -> dict[str, dict[str, float | int]]:
    """Evaluates a model on tasks of the harness.

    Args:
        lm: a model from `harness_model`.
        tasks: names of tasks, groups or tags of the harness, its YAML files, or configurations; or
          the result of `open_tasks`.
        shots: the number of examples in each prompt. Defaults to the number that the task
          specifies.
        limit: the number of questions of each task. If None, all questions are used.
        chat: whether prompts are formatted as turns of a conversation with the chat template.

    Returns:
        The metrics, without their standard errors, keyed by the name of the task or group.

    Raises:
        UserError: a task does not exist, or its data is not available.
    """
    check_value("limit", limit, PositiveInt | None)
    check_value("shots", shots, NonNegativeInt | None)
    opened = tasks if isinstance(tasks, HarnessTasks) else open_tasks(tasks)
    from lm_eval.evaluator import evaluate

    lm.in_chats = chat
    try:
        results = evaluate(
            lm,
            _seeded(opened, shots),
            limit=limit,
            apply_chat_template=chat,
            fewshot_as_multiturn=True,
            bootstrap_iters=0,
            log_samples=False,
        )
    except UserError:
        raise
    except Exception as error:  # templates and metrics of tasks are programs
        raise UserError(
            f"the harness cannot evaluate {', '.join(map(_name, opened.given))} "
            f"({_reason(error)}): correct the task, or request fewer shots"
        ) from error
    assert results is not None  # of several processes, only the first returns results
    # Keep numbers only, and drop the standard errors.
    return {
        name: {
            key.removesuffix(",none"): value
            for key, value in metrics.items()
            if isinstance(value, int | float) and "_stderr" not in key
        }
        for name, metrics in results.get("results", {}).items()
    }


def _seeded(opened: HarnessTasks, shots: int | None) -> Any:
    """Loads the tasks with the seeds of `simple_evaluate`, so that the results are the same.

    `simple_evaluate` itself is not used, because it also starts git and nvidia-smi to describe the
    machine, and these programs print messages.
    """
    from lm_eval.evaluator import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED

    # Some tasks shuffle their questions or choices while they are loaded.
    random.seed(DEFAULT_RANDOM_SEED)
    np.random.seed(DEFAULT_OTHER_SEED)
    loaded = opened.manager.load([*opened.given])  # the harness changes the list
    for task in loaded["tasks"].values():
        defined = task.get_config("num_fewshot")
        # Do not add examples to a task that is defined without examples.
        keeps = shots is None or defined == 0
        task.set_config("num_fewshot", (defined or 0) if keeps else shots)
        task.set_fewshot_seed(DEFAULT_OTHER_SEED)
    return loaded


def _name(task: str | Mapping[str, Any]) -> str:
    """Returns the name of a task, given as a name, a file or a configuration."""
    return task if isinstance(task, str) else str(task.get("task"))


def _reason(error: Exception) -> str:
    """Returns the first line of an error's message, or the name of its class."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _unknown(name: str, known: Sequence[str]) -> str:
    """Returns the error message for a task that does not exist."""
    similar = [n for n in known if name.lower() in n.lower()][:3] or similar_names(name, known)
    remedy = f"did you mean {' or '.join(similar)}?" if similar else "see lm_eval ls tasks"
    return f"the task {name} is not one of the {len(known):,} tasks of the harness: {remedy}"
