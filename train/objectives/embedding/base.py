"""The base class of objectives that train embedding models.

The model runs on the anchors and on the documents, and its outputs are pooled and normalized to
vectors. The loss depends only on these vectors.
"""

import dataclasses
import functools
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import jax.numpy as jnp

from ....data.common.fields import NonNegative, PositiveInt, field_names, require
from ....data.dataset import ArraySpec, BatchSpec, DataSplit, Values
from ....data.embedding.embedding_data import EmbeddingData
from ....data.embedding.embedding_examples import ScoreForm
from ....models.nn.pooling import PoolingMode
from ....models.nn.typing import Array, Bool, Float
from ...losses.embedding.matryoshka import matryoshka
from ...losses.embedding.text_rows import TextRows, of_examples, text_inputs, vectors_of
from ...losses.embedding.vectors import Real, Vectors, unit
from ...losses.eval_step import Evaluation
from ...losses.objective import AuxiliaryModel, Batch, Objective, RunModel, Terms
from ...objective_config import ObjectiveConfig, Scores
from .guide import frozen_embedder

if TYPE_CHECKING:
    from ....models.hf.sentence_embedding import EmbeddingSettings
    from ....models.hf.sparse_encoder import VectorSettings

S = TypeVar("S", bound="EmbeddingObjective")
GUIDE = "guide"
"""The name of the guide or teacher in an objective's `models`."""
DEFAULTS: dict[ScoreForm, str] = {
    "none": "multiple_negatives",
    "pairs": "cosent",
    "documents": "distillation",
    "labels": "batch_all_triplet",
}
"""The default objective for each form of scores. The form is what the scores refer to; data of the
form `none` have no scores."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbeddingObjective(ObjectiveConfig[EmbeddingData]):
    """The settings of all embedding objectives: how a model computes and compares vectors.

    A subclass declares what the scores refer to (pairs, documents, labels or none), and computes
    the loss of each item.
    """

    data_kinds = (EmbeddingData,)
    head_names = ("none", "causal_lm")
    progress_metrics = ("accuracy", "ndcg@10", "spearman", "label_accuracy")
    next_command = "embed {run} --input FILE --output vectors.npy"
    compares_with_start = True
    score_forms: ClassVar[tuple[ScoreForm, ...]] = ("none",)
    """The forms of scores that the objective can learn from; the first is the default."""
    num_documents: ClassVar[tuple[int, float]] = (1, math.inf)
    """The smallest and the largest number of documents that an example may have."""
    packs: ClassVar[bool] = True
    """Whether the objective accepts packed rows (`data.row_length`)."""
    whole_batch: ClassVar[bool] = False
    """Whether the loss compares the examples of a batch with each other."""
    measured: ClassVar[tuple[str, ...]] = ("accuracy",)
    """The names of the metrics that `measures` returns."""

    pooling: tuple[PoolingMode, ...] | None = None
    """How the hidden states of a text are pooled into a vector; see `flaxzoo embed`. Defaults to
    the setting of `init_from`, else mean."""
    normalize: bool | None = None
    """Whether vectors are scaled to norm 1. Defaults to the setting of `init_from`, else False."""
    matryoshka_dims: tuple[PositiveInt, ...] = ()
    """Numbers of dimensions. For each number d, the first d dimensions of each vector are also
    trained as a vector (Matryoshka). The list should include the full number of dimensions.
    """
    matryoshka_weights: tuple[NonNegative, ...] = ()
    """The weight of the loss for each entry of matryoshka_dims. Each weight defaults to 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        num_dims, num_weights = len(self.matryoshka_dims), len(self.matryoshka_weights)
        require(
            num_weights in (0, num_dims),
            f"matryoshka_weights must have {num_dims} numbers, as many as matryoshka_dims, "
            f"got {num_weights}",
        )

    @abstractmethod
    def losses(self, vectors: Vectors, batch: Batch) -> Array:
        """Returns the loss of each item, as an array with the shape of `items`."""

    def items(self, real: Real) -> Bool[Array, "..."]:
        """Returns a mask of the items that are not filler; by default each pair is an item."""
        return real.pairs

    def measures(self, vectors: Vectors, real: Real) -> dict[str, Array]:
        """Returns the metrics of each pair, `[B]`, which are reported but not trained."""
        del vectors, real
        return {}

    def check(self, data: EmbeddingData) -> None:
        """See `ObjectiveConfig`; some objectives do not accept packed rows."""
        require(
            self.packs or data.row_length is None,
            f"objective {self.kind} does not accept data.row_length {data.row_length}: leave it "
            "out",
        )

    def build(self, data: EmbeddingData) -> Objective:
        """Returns the objective. Its only term with a coefficient has the name `kind`."""
        del data

        def counts(batch: Batch) -> Terms:
            real = Real.of(batch)
            # Labeled texts form no pairs, so they have no such metrics either.
            measured = {x: jnp.sum(real.pairs, dtype=jnp.float32) for x in self.measured}
            return {self.kind: jnp.sum(self.items(real), dtype=jnp.float32), **measured}

        def terms(vectors: Vectors, batch: Batch) -> Terms:
            vectors, batch = of_examples(vectors, batch)
            self._check_batch(batch)
            real = Real.of(batch)
            loss = self._nested(lambda vectors: self.losses(vectors, batch))
            measured = self.measures(vectors, real).items()
            return {
                self.kind: jnp.sum(jnp.where(self.items(real), loss(vectors), 0.0)),
                **{name: jnp.sum(jnp.where(real.pairs, x, 0.0)) for name, x in measured},
            }

        return Objective(
            coefficients={self.kind: 1.0},
            inputs=text_inputs,
            counts=counts,
            terms=terms,
            predictions=vector_predictions,
            forward=self.vectors(),
            whole_batch=self.whole_batch,
            models=self._models(),
        )

    def _models(self) -> dict[str, AuxiliaryModel]:
        """Returns the guide or teacher, if the loss needs one, as a frozen model."""
        return {} if self.guide_model is None else {GUIDE: frozen_embedder(self.guide_model)}

    def _check_batch(self, batch: Batch) -> None:
        """Checks the shapes of a batch; called when a step is traced."""
        num_documents = Real.of(batch).documents.shape[1]
        least, most = self.accepted_documents
        fewer = "leave out negatives with --data.num-negatives 0"
        remedy = "give negatives" if num_documents < least else fewer
        require(
            least <= num_documents <= most,
            f"objective {self.kind} learns from anchors with "
            f"{least} {'document' if most == 1 else 'or more documents'} each, but the data "
            f"have {num_documents}: {remedy}, or choose another --objective.kind",
        )
        needed = "labels" if "labels" in self.accepted_scores else "scores"
        problem = f"objective {self.kind} requires {needed}, but the batch has none"
        require("none" in self.accepted_scores or needed in batch, problem)

    @property
    def accepted_scores(self) -> tuple[ScoreForm, ...]:
        """The forms of scores in data that the objective accepts with these settings."""
        return self.score_forms

    @property
    def accepted_documents(self) -> tuple[int, int | float]:
        """The smallest and the largest number of documents that an example may have."""
        return self.num_documents

    @property
    def shared_settings(self) -> dict[str, Any]:
        """The settings that all embedding objectives have, by name."""
        return {name: getattr(self, name) for name in field_names(EmbeddingObjective)}

    def remedy(self, form: ScoreForm) -> str:
        """Returns the command-line option that selects an objective for this form of scores."""
        return f"--objective.kind {DEFAULTS[form]}"

    def _nested(self, loss: Callable[[Vectors], Array]) -> Callable[[Vectors], Array]:
        dims, weights = self.matryoshka_dims, self.matryoshka_weights
        return matryoshka(loss, dims, weights) if dims else loss

    @property
    def _compares_by_dot(self) -> bool:
        """Whether the loss compares unnormalized vectors by their dot product."""
        # With Matryoshka, vectors are normalized in any case.
        is_normal = self.normalize or self.matryoshka_dims
        return getattr(self, "similarity", None) == "dot" and not is_normal

    def loss_note(self, data: EmbeddingData) -> str | None:
        """Returns a message if evaluations and the loss compare vectors in different ways."""
        del data
        if not self._compares_by_dot:
            return None
        return (
            "the loss compares vectors by their dot product, but validation by their cosine: with "
            "--objective.normalize or --objective.similarity cosine both use the cosine"
        )

    def batch_spec(self, data: EmbeddingData, num_labels: int, num_choices: int) -> BatchSpec:
        """Describes the arrays of an example, including scores if the objective uses them."""
        spec = data.batch_spec(num_labels, num_choices)
        if self.accepted_scores[0] == "labels":
            anchors = {name: spec[name] for name in ("anchor_ids", "anchor_mask")}
            return {**anchors, "labels": ArraySpec((), Values.LABEL)}
        if self.accepted_scores[0] != "none":
            # The axes of examples and documents: [C], or [S, C] in packed rows.
            axes = spec["input_ids"].shape[:1]
            if "text_mask" in spec:
                slots, columns = spec["text_mask"].shape
                axes = slots, columns - 1
            shape = axes if self.accepted_scores[0] == "documents" else axes[:-1]
            spec["scores"] = ArraySpec(shape, Values.LABEL, "float32")
        return spec

    def of_data(self, data: EmbeddingData, *, is_default: bool) -> "ObjectiveConfig[EmbeddingData]":
        """See `ObjectiveConfig`; the scores of the data determine the objective."""
        # Several data sets need the objective `several`, which has a loss for each data set.
        if is_default and data.sets:
            return self._as("several").of_data(data, is_default=True)
        names = list(data.sets)
        require(
            not names,
            f"objective {self.kind} learns from one data set, but {data.source_name!r} has "
            f"{len(names)}: give --objective.kind several --objective.kinds "
            + " ".join(f"{name}={self.kind}" for name in names),
        )
        # The form of the scores determines the default objective of a single data set.
        form = data.score_form()
        if is_default and form not in self.accepted_scores:
            return self._as(DEFAULTS[form])
        require(
            form in self.accepted_scores,
            f"objective {self.kind} learns from {_SCORES[self.accepted_scores[0]]}, and "
            f"{data.source_name!r} has {_SCORES[form]}: choose {self.remedy(form)}",
        )
        return self

    def _as(self, kind: str) -> "ObjectiveConfig[EmbeddingData]":
        """Returns an objective of a different kind that computes vectors in the same way."""
        from ..table import objective_class

        return objective_class(kind)(**self.shared_settings)

    def initialized_from(
        self: S, data: EmbeddingData, settings: "VectorSettings"
    ) -> tuple[S, EmbeddingData]:
        """See `ObjectiveConfig`."""
        settings = settings.texts
        kinds = [type(layer).__name__ for layer in settings.layers]
        require(
            "Dense" not in kinds,
            "the model of init_from has a Dense layer after its pooling, which training "
            "does not support: choose a model without a Dense layer",
        )
        normalize = "Normalize" in kinds if self.normalize is None else self.normalize
        pooling = self.pooling or settings.pooling
        data = self._with_prompts(data, settings)
        return dataclasses.replace(self, pooling=pooling, normalize=normalize), data

    @staticmethod
    def _with_prompts(data: EmbeddingData, settings: "EmbeddingSettings") -> EmbeddingData:
        """Returns the data with unset prompts and lowercasing copied from the initial model."""
        prompts = {
            "query_prompt": settings.prompt(settings.query_prompt),
            "document_prompt": settings.prompt(settings.document_prompt),
            "lowercase": settings.lowercase,
        }
        unset = {name: x for name, x in prompts.items() if getattr(data, name) is None}
        data = dataclasses.replace(data, **unset)
        require(
            settings.pool_prompt or not (data.query_prompt or data.document_prompt),
            "the model of init_from does not pool the tokens of its prompts (include_prompt), "
            "which training does not support: choose another model, or give empty prompts "
            "(--data.query-prompt '' --data.document-prompt '')",
        )
        return data

    def vector_settings(
        self, data: EmbeddingData, settings: "VectorSettings | None"
    ) -> "VectorSettings":
        """See `ObjectiveConfig`; the prompts are stored under the names `query` and `document`."""
        from ....models.hf.sentence_embedding import DOCUMENT_PROMPTS, EmbeddingSettings

        settings = EmbeddingSettings() if settings is None else settings.texts
        prompts = dict(settings.prompts)
        for name, text, aliases in (
            ("query", data.query_prompt, ("query",)),
            ("document", data.document_prompt, DOCUMENT_PROMPTS),
        ):
            if text:
                prompts[name] = text
            elif text is not None:
                # Clear prompts of the initial model that training did not use, so that retrieval
                # does not use them either.
                prompts |= dict.fromkeys(prompts.keys() & aliases, "")
        return dataclasses.replace(
            settings.normalized(bool(self.normalize)),
            pooling=self.pooling or settings.pooling,
            lowercase=bool(data.lowercase),
            prompts=prompts,
            similarity="dot" if self._compares_by_dot else None,
        )

    def embed(self, run: RunModel, rows: TextRows) -> Float[Array, "N D"]:
        """Computes the vectors of texts with the model of the run."""
        hidden = run(**rows.inputs).last_hidden_state
        x = rows.pool(hidden, self.pooling or ("mean",))
        return unit(x) if self.normalize else x

    def vectors(self) -> Callable[[Mapping[str, RunModel], Batch], Vectors]:
        """Returns the `forward` of the objective, which computes the vectors of a batch."""

        def forward(run: Mapping[str, RunModel], batch: Batch) -> Vectors:
            guide = None
            if GUIDE in run:  # the guide returns vectors, not hidden states
                guide = vectors_of(lambda rows: run[GUIDE](rows=rows), batch)
            vectors = vectors_of(functools.partial(self.embed, run["model"]), batch)
            return Vectors(vectors.anchors, vectors.documents, guide)

        return forward

    def to_minimize(self, scores: Scores) -> float:
        """Returns -nDCG@10, or else the negative rank correlation or label accuracy."""
        for name in ("ndcg@10", "spearman", "label_accuracy"):
            if name in scores:
                return -float(cast(float, scores[name]))
        return super().to_minimize(scores)

    def metrics(self, evaluation: Evaluation, split: DataSplit, data: EmbeddingData) -> Scores:
        """Returns the means of the metrics, and the number of examples."""
        del data
        return {**evaluation.means, "examples": split.examples.num_examples}


def vector_predictions(outputs: Vectors) -> dict[str, Array]:
    """Returns the vectors as the predictions that an evaluation stores."""
    return {"anchors": outputs.anchors, "documents": outputs.documents}


_SCORES: dict[ScoreForm, str] = {
    "none": "examples without scores",
    "pairs": "a score for each pair",
    "documents": "a score for each document",
    "labels": "a label for each text",
}
