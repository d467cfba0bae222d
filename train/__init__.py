"""What turns models and data into trained models.

Example::

    config = train.recipe("quickstart")
    result = train.train(config, "runs/quickstart")
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .averaging import average_checkpoints
    from .config import MeshConfig, TrainConfig
    from .embedding import TextEmbedder
    from .errors import NonFiniteLoss, RunError
    from .exporting import export_model
    from .filling import MaskFiller
    from .importing import import_model
    from .loop import Result, train
    from .objectives import (
        CAUSAL,
        CLASSIFICATION,
        MASKED,
        MULTI_LABEL,
        PRETRAINING,
        REGRESSION,
        SPAN,
        TAGGING,
        Objective,
        translation,
    )
    from .opening import open_run
    from .optimizer import make_optimizer
    from .optimizer_config import OptimizerConfig
    from .plan import make_plan
    from .prediction import predict
    from .recipes import recipe
    from .sampling import Sample, TextGenerator
    from .schedules import make_schedule
    from .score import score_run
    from .sharding import make_mesh, parameter_shardings, shard_batch, state_shardings
    from .state import TrainState, count_parameters, init_state
    from .step import make_train_step
    from .topologies import parse_topology
    from .translating import TextTranslator, Translation

# Everything is imported when first asked for: `flaxzoo --help` needs none of it.
_HOME = {
    "averaging": ("average_checkpoints",),
    "config": ("MeshConfig", "TrainConfig"),
    "embedding": ("TextEmbedder",),
    "errors": ("NonFiniteLoss", "RunError"),
    "exporting": ("export_model",),
    "filling": ("MaskFiller",),
    "importing": ("import_model",),
    "loop": ("Result", "train"),
    "objectives": (
        "CAUSAL",
        "CLASSIFICATION",
        "MASKED",
        "MULTI_LABEL",
        "PRETRAINING",
        "REGRESSION",
        "SPAN",
        "TAGGING",
        "Objective",
        "translation",
    ),
    "opening": ("open_run",),
    "optimizer": ("make_optimizer",),
    "optimizer_config": ("OptimizerConfig",),
    "plan": ("make_plan",),
    "prediction": ("predict",),
    "recipes": ("recipe",),
    "sampling": ("Sample", "TextGenerator"),
    "schedules": ("make_schedule",),
    "score": ("score_run",),
    "sharding": ("make_mesh", "parameter_shardings", "shard_batch", "state_shardings"),
    "state": ("TrainState", "count_parameters", "init_state"),
    "step": ("make_train_step",),
    "topologies": ("parse_topology",),
    "translating": ("TextTranslator", "Translation"),
}
_FILE_OF = {name: file for file, names in _HOME.items() for name in names}

__all__ = [
    "CAUSAL",
    "CLASSIFICATION",
    "MASKED",
    "MULTI_LABEL",
    "PRETRAINING",
    "REGRESSION",
    "SPAN",
    "TAGGING",
    "MaskFiller",
    "MeshConfig",
    "NonFiniteLoss",
    "Objective",
    "OptimizerConfig",
    "Result",
    "RunError",
    "Sample",
    "TextEmbedder",
    "TextGenerator",
    "TextTranslator",
    "TrainConfig",
    "TrainState",
    "Translation",
    "average_checkpoints",
    "count_parameters",
    "export_model",
    "import_model",
    "init_state",
    "make_mesh",
    "make_optimizer",
    "make_plan",
    "make_schedule",
    "make_train_step",
    "open_run",
    "parameter_shardings",
    "parse_topology",
    "predict",
    "recipe",
    "score_run",
    "shard_batch",
    "state_shardings",
    "train",
    "translation",
]


def __getattr__(name: str) -> Any:
    if name in _FILE_OF:
        return getattr(import_module(f".{_FILE_OF[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
