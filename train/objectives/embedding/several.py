"""The objective of several data sets, which has a loss for each data set."""

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp

from ....data.common.fields import field_names, require, require_one_of
from ....data.dataset import ArraySpec, BatchSpec, Values
from ....data.embedding.embedding_data import EmbeddingData
from ....models.nn.typing import Array
from ...losses.embedding.vectors import Vectors
from ...losses.objective import Batch, Objective, Terms
from ...objective_config import ObjectiveConfig
from .base import DEFAULTS, EmbeddingObjective, embedding_inputs, vector_predictions

LOSSES = (
    *("multiple_negatives", "gist", "cosent", "angle", "cosine", "contrastive", "triplet"),
    *("margin_mse", "distillation", "batch_all_triplet", "batch_hard_soft_margin"),
)
"""The objectives that a data set in `SeveralConfig.kinds` may have."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeveralConfig(EmbeddingObjective):
    """The losses of several data sets (`--data.source "sets:A=… | B=…"`).

    A batch comes from one data set, and its loss is the loss of this data set. In an evaluation a
    batch may have examples of two data sets, which are never compared with each other.
    """

    kind = "several"
    score_forms = ("none", "pairs", "documents", "labels")
    num_documents = (0, math.inf)
    whole_batch = True
    measured = ()

    kinds: tuple[str, ...] = ()
    """The objective of each data set, with any options: qa=multiple_negatives,scale=30 sts=cosine.
    By default, the scores of a data set determine its loss, as for a single data set. A run has at
    most one guide or teacher."""

    def losses(self, vectors: Vectors, batch: Batch) -> Array:
        """Raises NotImplementedError, because `build` uses the losses of the data sets instead."""
        raise NotImplementedError

    def build(self, data: EmbeddingData) -> Objective:
        """Returns the objective. The terms have the names of the data sets."""
        chosen = [(name, made, made.build(data)) for name, made in self._chosen().items()]

        def parts(batch: Batch) -> Iterator[tuple[str, EmbeddingObjective, Objective, Batch]]:
            for number, (name, made, objective) in enumerate(chosen):
                yield name, made, objective, _of_set(batch, number, made)

        # The measures of the single objectives are left out.
        def counts(batch: Batch) -> Terms:
            return {
                name: objective.counts(own)[made.kind]
                for name, made, objective, own in parts(batch)
            }

        def terms(vectors: Vectors, batch: Batch) -> Terms:
            return {
                name: objective.terms(_first(vectors, made), own)[made.kind]
                for name, made, objective, own in parts(batch)
            }

        # The guide reads every batch, even if its data set needs none.
        return Objective(
            coefficients={name: 1.0 for name, _, _ in chosen},
            inputs=embedding_inputs,
            counts=counts,
            terms=terms,
            predictions=vector_predictions,
            forward=self.vectors(),
            whole_batch=True,
            models=self._models(),
        )

    @property
    def second_model(self) -> str | None:
        """The folder of the guide or teacher, if a data set has a guide or teacher."""
        named = (made.second_model for made in self._chosen().values())
        folders = [*dict.fromkeys(folder for folder in named if folder is not None)]
        require(
            len(folders) < 2,
            f"objective.kinds name the guides or teachers {', '.join(folders)}, but a run has at "
            "most one: choose one of them",
        )
        return folders[0] if folders else None

    def for_evaluation(self) -> "SeveralConfig":
        """Returns losses without a guide, because an evaluation has no frozen parameters."""
        guided = {name for name, made in self._chosen().items() if made.second_model is not None}
        usual = DEFAULTS["none"]
        named = ((text, _named(text)[0]) for text in self.kinds)
        kinds = tuple(f"{name}={usual}" if name in guided else text for text, name in named)
        return dataclasses.replace(self, kinds=kinds)

    def _chosen(self) -> Mapping[str, EmbeddingObjective]:
        """Returns the objective of each named data set."""
        shared = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(EmbeddingObjective)
        }
        return {name: _parsed(text, shared) for name, text in map(_named, self.kinds)}

    def of_data(self, data: EmbeddingData, *, is_default: bool) -> ObjectiveConfig[EmbeddingData]:
        """See `ObjectiveConfig`; each data set gets a loss that learns from it."""
        del is_default
        require(
            data.sets,
            f"objective several requires several data sets, got {data.source_name!r}: write "
            "--data.source 'sets:NAME=SOURCE | NAME=SOURCE'",
        )
        given = dict(map(_named, self.kinds))
        for name in given:
            require_one_of("the data set of objective.kinds", name, list(data.sets))
        # Objectives that the user names override the defaults.
        kinds = {name: DEFAULTS[own.score_form()] for name, own in data.sets.items()} | given
        # The index of a data set in this order is its number in a batch.
        complete = dataclasses.replace(self, kinds=tuple(f"{n}={kinds[n]}" for n in data.sets))
        # Check that the objectives name at most one guide, and that each learns from its data set.
        _ = complete.second_model
        for name, made in complete._chosen().items():
            made.of_data(data.sets[name], is_default=False)
        return complete

    def batch_spec(self, data: EmbeddingData, num_labels: int, num_choices: int) -> BatchSpec:
        """See `ObjectiveConfig`."""
        spec = super().batch_spec(data, num_labels, num_choices)
        return {**spec, "data_set": ArraySpec((), Values.INDEX)}


def _named(text: str) -> tuple[str, str]:
    """Returns the name of a data set, and its objective with options."""
    name, mark, kind = text.partition("=")
    require(name and mark and kind, f"objective.kinds must have NAME=OBJECTIVE, got {text!r}")
    return name, kind


def _parsed(text: str, shared: Mapping[str, Any]) -> EmbeddingObjective:
    """Returns an objective, given its kind with options: `triplet,margin=1,distance=cosine`."""
    from ..table import objective_class

    kind, *options = text.split(",")
    require_one_of("the objective of a data set in objective.kinds", kind, LOSSES)
    settings = {name: x for name, _, x in (option.partition("=") for option in options)}
    made = objective_class(kind)
    # Settings of vectors, such as the pooling, belong to the run and not to one data set.
    known = field_names(made) - shared.keys()
    for name in settings:
        require_one_of(f"the option of {kind} in objective.kinds", name, sorted(known))
    values = {name: _value(x) for name, x in settings.items()}
    # JSON reads `1` as an int, but the numbers among the options are floats.
    numbers = {n: float(x) if type(x) is int else x for n, x in values.items()}
    objective = made(**shared, **numbers)
    assert isinstance(objective, EmbeddingObjective)
    return objective


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        # A word such as `cosine` is not JSON.
        return text


def _first(vectors: Vectors, objective: EmbeddingObjective) -> Vectors:
    """Returns the vectors of the documents that an objective reads."""
    # All examples of a batch have the same number of documents. An objective of pairs reads one
    # document.
    most = objective.num_documents[1]
    number = vectors.documents.shape[1] if math.isinf(most) else int(most)
    guide = None if vectors.guide is None else _first(vectors.guide, objective)
    return Vectors(vectors.anchors, vectors.documents[:, :number], guide)


def _of_set(batch: Batch, number: int, objective: EmbeddingObjective) -> Batch:
    """Returns the batch, with the examples of other data sets masked out as filler."""
    # An example is filler if its masks are 0.
    own = batch["data_set"] == number
    found = {**batch, "anchor_mask": jnp.where(own[:, None], batch["anchor_mask"], 0)}
    most = objective.num_documents[1]
    for name in {"input_ids", "attention_mask"} & batch.keys():
        texts = jnp.where(own[:, None, None], batch[name], 0)
        found[name] = texts if math.isinf(most) else texts[:, : int(most)]
    if "scores" in batch and batch["scores"].ndim == 2 and "documents" not in objective.score_forms:
        # The score of a pair comes before the scores of further documents.
        found["scores"] = batch["scores"][:, 0]
    return found
