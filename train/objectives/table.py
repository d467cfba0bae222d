"""The table of objectives.

To add an objective, add a file to this folder and an entry to this table.
"""

from collections.abc import Iterator
from importlib import import_module
from typing import Any

from ...data.common.errors import UserError
from ...data.common.fields import require, require_one_of
from ...data.tasks.base import DataConfig
from ..objective_config import ObjectiveConfig

OBJECTIVES = {
    "causal_lm": "causal_lm.CausalLMConfig",
    "sft": "sft.SFTConfig",
    "reward": "reward.RewardConfig",
    "dpo": "dpo.DPOConfig",
    "grpo": "grpo.GRPOConfig",
    "rloo": "rloo.RLOOConfig",
    "ppo": "ppo.PPOConfig",
    "masked_lm": "masked_lm.MaskedLMConfig",
    "replaced_token_detection": "replaced_token_detection.ReplacedTokenConfig",
    "classification": "classification.ClassificationConfig",
    "token_classification": "token_classification.TokenClassificationConfig",
    "question_answering": "question_answering.QuestionAnsweringConfig",
    "multiple_choice": "classification.MultipleChoiceConfig",
    "seq2seq": "seq2seq.Seq2SeqConfig",
    "rerank": "embedding.rerank.RerankConfig",
    "multiple_negatives": "embedding.in_batch.MultipleNegativesConfig",
    "gist": "embedding.in_batch.GISTConfig",
    "splade": "embedding.sparse.SpladeConfig",
    "cosent": "embedding.scored.CoSENTConfig",
    "angle": "embedding.scored.AngleConfig",
    "cosine": "embedding.scored.CosineConfig",
    "contrastive": "embedding.scored.ContrastiveConfig",
    "triplet": "embedding.ranked.TripletConfig",
    "batch_all_triplet": "embedding.labelled.BatchAllTripletConfig",
    "batch_hard_soft_margin": "embedding.labelled.BatchHardSoftMarginConfig",
    "several": "embedding.several.SeveralConfig",
    "margin_mse": "embedding.ranked.MarginMSEConfig",
    "distillation": "embedding.ranked.DistillationConfig",
}
"""Maps the name of each objective to its file and class. The files are imported on demand, so that
`--help` is fast."""


def objective_class(kind: str) -> type[ObjectiveConfig[Any]]:
    """Returns the class of an objective.

    Raises:
        KeyError: The objective is unknown.
    """
    # "dpo.DPOConfig": the class DPOConfig in dpo.py.
    file, _, name = OBJECTIVES[kind].rpartition(".")
    return getattr(import_module(f".{file}", __package__), name)


def _of_data(kind: str) -> Iterator[tuple[type[ObjectiveConfig[Any]], type[DataConfig]]]:
    """Yields each objective that supports a kind of data, with the class of the data."""
    # The order of the table determines the default.
    for name in OBJECTIVES:
        objective = objective_class(name)
        yield from ((objective, data) for data in objective.data_kinds if data.kind == kind)


def data_class(kind: str) -> type[DataConfig]:
    """Returns the class of a kind of data.

    Raises:
        KeyError: The kind is unknown.
    """
    for _, data in _of_data(kind):
        return data
    raise KeyError(kind)


def default_objective(data: DataConfig) -> ObjectiveConfig[Any]:
    """Returns the first objective in the table that supports the data.

    The objective is marked as a default, so that `dataclasses.replace(config, data=…)` chooses a
    different objective for different data.

    Raises:
        UserError: No objective supports the data.
    """
    for objective, _ in _of_data(data.kind):
        chosen = objective()
        # The dataclass is frozen, and the mark must not become a field or an option.
        object.__setattr__(chosen, "is_default", True)
        return chosen
    raise UserError(
        f"data.kind {data.kind!r} has no objective: add an objective to objectives/table.py"
    )


def objectives_of(data: DataConfig) -> list[str]:
    """Returns the names of the objectives for a kind of data; the first is the default."""
    return [objective.kind for objective, _ in _of_data(data.kind)]


def objective_for(data: DataConfig, kind: str) -> ObjectiveConfig[Any]:
    """Returns an objective that supports the data, with its default hyperparameters.

    Raises:
        UserError: `kind` is not the name of an objective that supports the data.
    """
    require_one_of("objective.kind", kind, objectives_of(data))
    return objective_class(kind)()


def check_learns_from(objective: ObjectiveConfig[Any], data: DataConfig) -> None:
    """Checks that an objective suits the data of a run.

    Raises:
        UserError: The objective does not support the data, or a hyperparameter does not suit them.
    """
    kinds = [kind.kind for kind in objective.data_kinds]
    require(
        data.kind in kinds,
        f"objective {objective.kind} learns from {' or '.join(kinds)} data, not from {data.kind} "
        "data: choose an objective for these data, or None for the default",
    )
    objective.check(data)
