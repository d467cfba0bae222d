"""The base class of all objectives: its fields are hyperparameters; its methods define the loss."""

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, cast

import numpy as np

from ..data.common.fields import Checked
from ..data.dataset import BatchSpec, DataSplit
from ..data.tasks.base import DataConfig
from ..models.config import Execution, TransformerConfig
from .losses.eval_step import Evaluation, unigram_entropy
from .losses.objective import Objective

if TYPE_CHECKING:
    from ..models.hf.sparse_encoder import VectorSettings

Scores = Mapping[str, object]
"""Metrics by name. The values are numbers, except that the signatures of BLEU and chrF are
strings."""
D = TypeVar("D", bound=DataConfig)
OpenReference = Callable[[], Callable[[Any], np.ndarray]]
"""Opens the initial model of a run, and returns a function that computes the log-probabilities of
answers under this model."""


@dataclasses.dataclass(frozen=True)
class GenerationMetrics:
    """The metrics that compare generated texts with references."""

    scores: Callable[[Sequence[str], Sequence[str]], Scores]
    """`scores(references, texts)` computes the metrics."""
    missing: Callable[[], str | None] = lambda: None
    """Returns a line about a missing package that some metrics need, or None."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObjectiveConfig(Checked, ABC, Generic[D]):
    """The training objective of a run, with its hyperparameters.

    Each objective is a subclass in a file named after its `kind`. The fields are options of the
    command line: `--objective.beta 0.1`.
    """

    is_default: ClassVar[bool] = False  # `default_objective` sets it to True on its results
    kind: ClassVar[str]
    """The name of the objective in a run's config.json."""
    data_kinds: ClassVar[tuple[type[DataConfig], ...]]
    """The kinds of data that the objective supports. The first objective that lists a kind of data
    is the default for this kind."""
    progress_metrics: ClassVar[tuple[str, ...]]
    """The metrics that a progress line shows."""
    next_command: ClassVar[str]
    """A command to try with a finished run; {run} is replaced by the run folder."""
    head_names: ClassVar[tuple[str, ...]] = ()
    """The supported heads, as keys of `HEADS`; the first is the default. If empty, the only
    supported head has the same name as the kind of data."""
    needs_init_from: ClassVar[bool] = False
    """Whether the loss compares the trained model with the model of `init_from`."""
    compares_by_dot: ClassVar[bool] = False
    """Whether evaluations compare text vectors by their dot product instead of their cosine."""
    scores_pairs: ClassVar[bool] = False
    """Whether the model is a cross-encoder. A cross-encoder has a single label, which may have a
    different name in the model of `init_from`."""
    compares_with_start: ClassVar[bool] = False
    """Whether a run with `init_from` also evaluates the initial model. Its report then shows
    answers of both models."""
    generation: ClassVar[Mapping[str, GenerationMetrics]] = {}
    """The metrics of generated texts, for each kind of data."""

    @abstractmethod
    def build(self, data: D) -> Objective:
        """Returns the record of functions that define the loss."""

    def with_models(
        self, objective: Objective, model: TransformerConfig, execution: Execution
    ) -> Objective:
        """Adds the objective's auxiliary models, with sizes that depend on the run's model.

        Args:
            objective: the result of `build`.
            model: the configuration of the model of the run.
            execution: the settings for running the models, such as their dtype.
        """
        del model, execution
        return objective

    @abstractmethod
    def metrics(self, evaluation: Evaluation, split: DataSplit, data: D) -> Scores:
        """Returns the metrics of an evaluation, except the loss."""

    def score(self, evaluation: Evaluation, split: DataSplit, data: D) -> dict[str, Any]:
        """Returns `loss` and the metrics as plain Python numbers."""
        return {"loss": evaluation.loss, **self.metrics(evaluation, split, data)}

    def to_minimize(self, scores: Scores) -> float:
        """Returns the value that ranks checkpoints, by default the loss.

        The best checkpoint has the lowest value.
        """
        return cast(float, scores["loss"])

    def heads(self, data: D) -> tuple[str, ...]:
        """Returns the supported heads, as keys of `HEADS`; the first is the default."""
        return self.head_names or (data.kind,)

    def check(self, data: D) -> None:
        """Checks the hyperparameters against the data; raises UserError."""

    def loss_note(self, data: D) -> str | None:
        """Returns a line for the user about how the loss differs from the metrics, or None."""

    def baseline(self, split: DataSplit) -> tuple[str, str, float] | None:
        """Returns a token-frequency baseline (compared metric, name and value), or None."""

    def batch_spec(self, data: D, num_labels: int, num_choices: int) -> BatchSpec:
        """Describes the arrays of an example that a step reads; see `DataConfig.batch_spec`."""
        return data.batch_spec(num_labels, num_choices)

    def prepare(self, data: D, open_reference: OpenReference) -> D:
        """Returns the data with the additional arrays that the objective needs."""
        del open_reference
        return data

    def initialized_from(
        self, data: D, settings: "VectorSettings"
    ) -> "tuple[ObjectiveConfig[D], D]":
        """Returns the objective and the data, completed with the settings of the initial model.

        Args:
            data: The data.
            settings: The embedding settings of the initial model, or the defaults.
        """
        del settings
        return self, data

    @property
    def guide_model(self) -> str | None:
        """The folder of a frozen auxiliary model that reads the same texts, or None."""
        return None

    def of_data(self, data: D, *, is_default: bool) -> "ObjectiveConfig[D]":
        """Returns the objective to use for the data. Reads the data if the choice depends on them.

        Args:
            data: The data.
            is_default: Whether the user chose no objective, so that this one is the default for the
              kind of data.

        Raises:
            UserError: The objective does not support such data.
        """
        del data, is_default
        return self

    def vector_settings(
        self, data: D, settings: "VectorSettings | None"
    ) -> "VectorSettings | None":
        """Returns the embedding settings of the run's model, or None if it does not embed texts.

        Args:
            data: The data.
            settings: The embedding settings of the initial model, which the run keeps by default.
        """
        del data
        return settings

    def in_steps(self, steps: int) -> "ObjectiveConfig[D]":
        """Returns this configuration for a run of `steps` steps, with all durations in steps."""
        del steps
        return self

    def for_evaluation(self) -> "ObjectiveConfig[D]":
        """Returns this configuration for an evaluation, which has no frozen parameters."""
        return self


def perplexity(nats: float) -> float:
    """Returns exp(nats), capped at e⁷⁰⁰ to fit into float64."""
    return math.exp(min(nats, 700.0))


def entropy_baseline(metric: str, split: DataSplit) -> tuple[str, str, float]:
    """Returns the unigram entropy as the baseline of a language model's metric."""
    name = "unigram entropy of the training text"
    return metric, name, unigram_entropy(split.content.token_counts)
