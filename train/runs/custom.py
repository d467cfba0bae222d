"""Custom objectives, examples, rewards and callbacks, which are passed to `train.train`."""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np

from ...data.common.errors import RunError, UserError, counted
from ...data.common.fields import require
from ...data.common.json_text import JsonObject
from ...data.dataset import DataSplit, ExampleSource
from ...data.tokenizers.base import Tokenizer
from ...models.model import Model
from ...models.nn.typing import Params
from ...models.run_files import read_config
from ..losses.objective import Objective
from ..rewards.functions import RewardFunction, function_name

MakeExamples = Callable[[Tokenizer], tuple[ExampleSource, ExampleSource]]
"""Makes the training and the validation examples, in this order, from the run's tokenizer."""

CUSTOM = "custom"
"""The key in a run's `config.json` for the names of its custom objective, examples and rewards."""
HASHED = 64
"""The number of examples that the fingerprint of custom examples covers."""


@dataclasses.dataclass(frozen=True)
class RunningModel:
    """The model of a run during training, which callbacks receive.

    Attributes:
        model: The Flax module, which is called as `model.apply({"params": params}, input_ids=…)`.
        tokenizer: The tokenizer of the run.
    """

    model: Model
    tokenizer: Tokenizer
    read: Callable[[bool], tuple[int, Params]]
    """`read(ema)` returns the step number, and the parameters or their moving average, both still
    sharded."""

    def params(self, *, ema: bool = False) -> tuple[int, Params]:
        """Copies the current parameters to the host, with adapters merged into their base model.

        Args:
            ema: Whether to copy the moving average of the parameters instead. A run keeps this
              average if `optimizer.ema_decay` is set.

        Returns:
            The number of steps taken so far, and the parameters as a nested dict of numpy arrays.
            When `on_step` is called, the next step has already begun, so the parameters are the
            result of this next step.

        Raises:
            UserError: The run has several processes, or it keeps no moving average.
        """
        step, params = self.read(ema)
        return step, jax.device_get(params)


class Callback:
    """Gets called at events of a run. Subclasses override the methods for the events they need.

    Callbacks run only on the primary process, in the thread of the training loop, which waits for
    them. Callbacks get numbers, files and copies of the parameters, so they cannot change the run.
    The same run without callbacks has bitwise identical results. If a callback raises an exception,
    the run finishes the current step, saves a checkpoint, and raises the exception. The same call
    resumes from this checkpoint.

    Example::

        class Print(train.Callback):
            def on_evaluation(self, step, metrics):
                print(step, metrics["loss"])

        train.train(config, "runs/mine", callbacks=[Print()])
    """

    def on_start(self, running: RunningModel) -> None:
        """Receives the model before the first step. Its parameters can also be read later."""

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Receives the metrics of a step: `loss`, its terms, and `gradient_norm`.

        The next step may already be running. Steps that are skipped because of a non-finite loss
        are not reported.
        """

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Receives the evaluation after step `step`: `loss` and the metrics, by name."""

    def on_checkpoint(self, step: int, folder: Path) -> None:
        """Receives the folder of a checkpoint after the checkpoint is complete on disk."""


def check_custom(objective: object, examples: object, callbacks: object, rewards: object) -> None:
    """Checks the types of the Python objects that `train.train` takes.

    Raises:
        UserError: An object has another type.
    """
    _check_all(
        "objective",
        [objective],
        lambda x: x is None or isinstance(x, Objective),
        expected="a train.Objective",
        remedy="use dataclasses.replace(train.CAUSAL, terms=…)",
    )
    _check_all(
        "examples",
        [examples],
        lambda x: x is None or callable(x),
        expected="a function of the tokenizer",
        remedy="give a function that returns the training and the validation examples",
    )
    _check_all(
        "callbacks",
        callbacks,
        lambda x: isinstance(x, Callback),
        expected="a list of train.Callback objects",
        remedy="give callbacks=[MyCallback()]",
    )
    _check_all(
        "rewards",
        rewards,
        callable,
        expected="a list of functions",
        remedy="give rewards=[my_reward]",
    )


def _check_all(
    name: str, given: object, is_right: Callable[[object], bool], *, expected: str, remedy: str
) -> None:
    """Checks that `given` is a sequence, and that `is_right` holds for all of its elements."""
    wrong = [given]
    if isinstance(given, Sequence):
        wrong = [x for x in given if not is_right(x)]
    if wrong:
        got = type(wrong[0]).__name__
        raise UserError(f"{name} must be {expected}, got an object of type {got}: {remedy}")


@dataclasses.dataclass(frozen=True)
class Custom:
    """The custom objective, examples and rewards of a run, which are not in its configuration."""

    objective: Objective | None = None
    examples: MakeExamples | None = None
    rewards: tuple[RewardFunction, ...] = ()

    @property
    def names(self) -> dict[str, str]:
        """The names of the Python functions, as stored in `config.json`.

        The name of an objective is followed by its coefficients. The code of the functions is not
        compared.
        """
        names: dict[str, str] = {}
        if self.objective is not None:
            factors = ", ".join(f"{term} {x}" for term, x in self.objective.coefficients.items())
            names["objective"] = f"{function_name(self.objective.terms)} ({factors})"
        if self.examples is not None:
            names["examples"] = function_name(self.examples)
        if self.rewards:
            names["rewards"] = ", ".join(map(function_name, self.rewards))
        return names

    def check_same(self, folder: Path) -> None:
        """Checks that a run resumes with the same custom objective, examples and rewards.

        Args:
            folder: The run folder.

        Raises:
            RunError: The objective, the examples or the rewards are missing, or are different.
        """
        previous = custom_names(read_config(folder))
        for what in ("objective", "examples", "rewards"):
            then, now = previous.get(what), self.names.get(what)
            got = f"got {now}" if now is not None else "which the command line cannot load"
            require(
                then == now,
                f"{folder} was started in Python with custom {what} {then}, {got}: resume it "
                f"with train.train(config, folder, {what}=…) and the same {what}, or give another "
                "folder",
                error=RunError,
            )

    def splits(self, tokenizer: Tokenizer) -> tuple[DataSplit, DataSplit] | None:
        """Returns the training and the validation split, or None without custom examples.

        Raises:
            RunError: The examples violate the contract of `ExampleSource`.
        """
        if self.examples is None:
            return None
        training, validation = self.examples(tokenizer)
        name = self.names["examples"]
        return _split(training, f"{name}, training"), _split(validation, f"{name}, validation")


def custom_names(fields: JsonObject) -> Mapping[str, object]:
    """Returns `Custom.names` of a run, given the fields of its `config.json`."""
    names = fields.get(CUSTOM)
    return names if isinstance(names, dict) else {}


def _split(examples: ExampleSource, name: str) -> DataSplit:
    number = examples.num_examples
    require(number > 0, f"{name}: num_examples must be at least 1, got {number}", error=RunError)
    first = examples.example(0, 0)
    arrays = {key: (np.shape(x), np.asarray(x).dtype) for key, x in first.items()}
    # When the run is resumed, the fingerprint shows whether the examples are the same.
    digest = hashlib.sha256(repr((number, sorted(arrays))).encode())
    # Check and hash some examples, spaced evenly over the source.
    for index in sorted({i * number // HASHED for i in range(HASHED)}):
        example, repeated = examples.example(0, index), examples.example(0, index)
        for key, (shape, dtype) in arrays.items():
            x = np.asarray(example.get(key))
            require(
                isinstance(example.get(key), np.ndarray | np.generic),
                f"{name}: {key} of example {index} is a {type(example.get(key)).__name__}: "
                "give numpy arrays",
                error=RunError,
            )
            require(
                example.keys() == arrays.keys() and (x.shape, x.dtype) == (shape, dtype),
                f"{name}: example {index} has other arrays than example 0 ({key} {dtype} "
                f"{shape}): give the same names, shapes and types in every example",
                error=RunError,
            )
            # Compare bytes, because NaN is not equal to itself.
            require(
                x.tobytes() == np.asarray(repeated[key]).tobytes(),
                f"{name}: {key} of example {index} differs between two calls: an example, "
                "including its random numbers, must depend only on the epoch and the index",
                error=RunError,
            )
            digest.update(np.ascontiguousarray(x).tobytes())
    return DataSplit(examples, None, digest.hexdigest(), f"{counted(number, 'example')} of {name}")
