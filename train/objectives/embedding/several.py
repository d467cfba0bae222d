"""The objective for several data sets, with a separate loss for each data set."""

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, cast

import jax.numpy as jnp

from ....data.common.fields import field_names, require, require_one_of
from ....data.dataset import ArraySpec, BatchSpec, Values
from ....data.embedding.embedding_data import EmbeddingData
from ....models.nn.typing import Array
from ...losses.embedding.text_rows import text_inputs
from ...losses.embedding.vectors import Vectors
from ...losses.objective import Batch, Objective, Terms
from ...objective_config import ObjectiveConfig
from .base import DEFAULTS, EmbeddingObjective, vector_predictions

LOSSES = (
    *("multiple_negatives", "gist", "cosent", "angle", "cosine", "contrastive", "triplet"),
    *("margin_mse", "distillation", "batch_all_triplet", "batch_hard_soft_margin"),
)
"""The objectives that a data set in `SeveralConfig.kinds` may have."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeveralConfig(EmbeddingObjective):
    """The settings for several data sets with separate losses (`--data.source "sets:A=… | B=…"`).

    All examples of a training batch come from one data set, and the loss of this data set is used
    for the batch. An evaluation batch may contain examples of two data sets, but these are never
    compared with each other.
    """

    kind = "several"
    score_forms = ("none", "pairs", "documents", "labels")
    num_documents = (0, math.inf)
    packs = False
    whole_batch = True
    measured = ()

    kinds: tuple[str, ...] = ()
    """The objective of each data set, with optional settings, such as
    qa=multiple_negatives,scale=30 sts=cosine. If a data set is not listed, its scores determine the
    objective, as for a run with a single data set. All objectives together may use at most one
    guide or teacher."""

    def losses(self, vectors: Vectors, batch: Batch) -> Array:
        """Raises NotImplementedError, because `build` uses the losses of the data sets instead."""
        raise NotImplementedError

    def build(self, data: EmbeddingData) -> Objective:
        """Returns the objective. It has one term for each data set, named after the data set."""
        chosen = [(name, made, made.build(data)) for name, made in self._chosen().items()]

        def parts(batch: Batch) -> Iterator[tuple[str, EmbeddingObjective, Objective, Batch]]:
            for number, (name, made, objective) in enumerate(chosen):
                yield name, made, objective, _of_set(batch, number, made)

        # Only the losses are reported, not the metrics of the data sets' objectives.
        def counts(batch: Batch) -> Terms:
            return {
                name: objective.counts(part)[made.kind]
                for name, made, objective, part in parts(batch)
            }

        def terms(vectors: Vectors, batch: Batch) -> Terms:
            return {
                name: objective.terms(_first(vectors, made), part)[made.kind]
                for name, made, objective, part in parts(batch)
            }

        # The guide runs on every batch, even if the objective of its data set needs no guide.
        return Objective(
            coefficients={name: 1.0 for name, _, _ in chosen},
            inputs=text_inputs,
            counts=counts,
            terms=terms,
            predictions=vector_predictions,
            forward=self.vectors(),
            whole_batch=True,
            models=self._models(),
        )

    @property
    def guide_model(self) -> str | None:
        """The folder of the guide or teacher, if the objective of a data set uses one."""
        named = (made.guide_model for made in self._chosen().values())
        folders = list(dict.fromkeys(filter(None, named)))
        require(
            len(folders) < 2,
            f"objective.kinds name the guides or teachers {', '.join(folders)}, but a run has at "
            "most one: choose one of them",
        )
        return next(iter(folders), None)

    def for_evaluation(self) -> "SeveralConfig":
        """Replaces objectives that use a guide, because an evaluation has no frozen parameters."""
        guided = [name for name, made in self._chosen().items() if made.guide_model is not None]
        kinds = dict(map(_named, self.kinds)) | dict.fromkeys(guided, DEFAULTS["none"])
        return dataclasses.replace(self, kinds=tuple(map("=".join, kinds.items())))

    def _chosen(self) -> Mapping[str, EmbeddingObjective]:
        """Returns the objective of each data set in `kinds`, by the data set's name."""
        shared = self.shared_settings
        return {name: _parsed(text, shared) for name, text in map(_named, self.kinds)}

    def of_data(self, data: EmbeddingData, *, is_default: bool) -> ObjectiveConfig[EmbeddingData]:
        """See `ObjectiveConfig`; data sets that are not in `kinds` get default objectives."""
        del is_default
        require(
            data.sets,
            f"objective several requires several data sets, got {data.source_name!r}: write "
            "--data.source 'sets:NAME=SOURCE | NAME=SOURCE'",
        )
        given = dict(map(_named, self.kinds))
        for name in given:
            require_one_of("the data set of objective.kinds", name, list(data.sets))
        # The objectives that the user lists override the defaults.
        kinds = {name: DEFAULTS[one.score_form()] for name, one in data.sets.items()} | given
        # The array `data_set` of a batch has the indices of data sets in this order.
        complete = dataclasses.replace(self, kinds=tuple(f"{n}={kinds[n]}" for n in data.sets))
        # Check that all objectives together use at most one guide, and that each objective accepts
        # the scores in its data set.
        _ = complete.guide_model
        for name, made in complete._chosen().items():
            made.of_data(data.sets[name], is_default=False)
        return complete

    def batch_spec(self, data: EmbeddingData, num_labels: int, num_choices: int) -> BatchSpec:
        """See `ObjectiveConfig`."""
        spec = super().batch_spec(data, num_labels, num_choices)
        return {**spec, "data_set": ArraySpec((), Values.INDEX)}


def _named(text: str) -> tuple[str, str]:
    """Splits NAME=OBJECTIVE into the name of a data set and its objective with options."""
    name, mark, kind = text.partition("=")
    problem = f"objective.kinds must have NAME=OBJECTIVE, got {text!r}"
    require(all((name, mark, kind)), problem)
    return name, kind


def _parsed(text: str, shared: Mapping[str, Any]) -> EmbeddingObjective:
    """Makes an objective from its kind and options, such as `triplet,margin=1,distance=cosine`."""
    from ..table import objective_class

    kind, *options = text.split(",")
    require_one_of("the objective of a data set in objective.kinds", kind, LOSSES)
    made = objective_class(kind)
    # Settings for how the model computes vectors, such as the pooling, apply to all data sets, so
    # they are not options of a single data set.
    known = sorted(field_names(made) - shared.keys())
    settings: dict[str, Any] = {}
    for option in options:
        name, _, value = option.partition("=")
        require_one_of(f"the option of {kind} in objective.kinds", name, known)
        settings[name] = _value(value)
    return cast(EmbeddingObjective, made(**shared, **settings))


def _value(text: str) -> Any:
    try:
        # All options that are numbers are floats.
        return json.loads(text, parse_int=float)
    except ValueError:
        # A word such as `cosine` is not JSON.
        return text


def _first(vectors: Vectors, objective: EmbeddingObjective) -> Vectors:
    """Returns the vectors without the documents that an objective does not use."""
    # All examples of a batch have the same number of documents, but an objective for pairs uses
    # only the first document of each example.
    most = objective.num_documents[1]
    number = int(min(most, vectors.documents.shape[1]))
    guide = None if vectors.guide is None else _first(vectors.guide, objective)
    return Vectors(vectors.anchors, vectors.documents[:, :number], guide)


def _of_set(batch: Batch, number: int, objective: EmbeddingObjective) -> Batch:
    """Returns the batch for one data set, where examples of other data sets become filler."""
    # An example is filler if its masks are 0.
    in_set = batch["data_set"] == number
    selected = {**batch, "anchor_mask": jnp.where(in_set[:, None], batch["anchor_mask"], 0)}
    most = objective.num_documents[1]
    for name in {"input_ids", "attention_mask"} & batch.keys():
        texts = jnp.where(in_set[:, None, None], batch[name], 0)
        selected[name] = texts[:, : int(min(most, texts.shape[1]))]
    if "scores" in batch and batch["scores"].ndim == 2 and "documents" not in objective.score_forms:
        # The first score of an example is the score of its pair.
        selected["scores"] = batch["scores"][:, 0]
    return selected
