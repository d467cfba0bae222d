"""Initializes a run from another run's parameters: the body, and what the heads have in common."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path

import jax

from ...data.common.errors import RunError
from ...data.common.progress import LogFn
from ...models.config import TransformerConfig
from ...models.init import parameter_shapes
from ...models.loading import read_params
from ...models.nn.heads import HEADS
from ...models.nn.typing import Params, PyTree
from ...models.registry import create
from ..optim.parameters import map_named, named

HEAD = "head/"
"""Prefix of the parameters that belong to an objective; all others are the body."""

SHOWN = 3
"""Number of parameters that a message names; the others are counted."""
SIZES = ("vocab_size", "max_length", "num_layers", "d_model", "d_ff")
"""The fields of a model on which the shapes of its body most often depend."""


@dataclasses.dataclass(frozen=True)
class InitFromPlan:
    """Which parameters of which checkpoint initialize a run."""

    folder: Path
    step: int | None
    """None for a folder in Hugging Face's form."""
    source: TransformerConfig
    """The configuration of the model in the folder."""
    source_shapes: Params
    """Shapes of all parameters in the checkpoint."""
    copied: frozenset[str]
    """Names of the parameters that are copied."""

    def new(self, model: TransformerConfig) -> list[str]:
        """Returns the names of a model's parameters that are not copied."""
        shapes = parameter_shapes(create(model))
        return [name for name, _ in named(shapes) if name not in self.copied]


def plan_init_from(
    folder: Path, step: int | None, source: TransformerConfig, model: TransformerConfig
) -> InitFromPlan:
    """Plans which parameters a model copies from a run, and reads none of them yet.

    Args:
        folder: The folder to initialize from.
        step: One of its checkpoints; None for a folder in Hugging Face's form.
        source: The configuration of its model.
        model: The configuration of the model to initialize.

    Raises:
        RunError: A parameter of the body has another shape.
    """
    source_shapes = parameter_shapes(create(source))
    wanted = dict(named(parameter_shapes(create(model))))
    same = (source.head, source.labels) == (model.head, model.labels)
    own = tuple(f"{HEAD}{part}/" for part in HEADS[source.head].own_params)
    copied, other = set(), []
    for name, x in named(source_shapes):
        if name not in wanted or (name.startswith(own) and not same):
            continue
        if wanted[name].shape == x.shape:
            copied.add(name)
        elif not name.startswith(HEAD):
            other.append(f"{name} {x.shape} where this run has {wanted[name].shape}")
    if other:
        more = f" and {len(other) - SHOWN} more" if len(other) > SHOWN else ""
        raise RunError(
            f"{folder} has {', '.join(other[:SHOWN])}{more}: both need the same sizes and "
            f"vocabulary{_other_sizes(source, model)}"
        )
    return InitFromPlan(folder, step, source, source_shapes, frozenset(copied))


def head_parameters(model: TransformerConfig) -> list[str]:
    """Returns the names of the parameters that are of use only to the same head and labels."""
    own = tuple(f"{HEAD}{part}/" for part in HEADS[model.head].own_params)
    shapes = parameter_shapes(create(model)) if own else {}
    return [name for name, _ in named(shapes) if name.startswith(own)]


def _other_sizes(source: TransformerConfig, model: TransformerConfig) -> str:
    """Returns the fields that give two models parameters of different shapes, for a message."""
    theirs, ours = (dataclasses.asdict(config) for config in (source, model))
    wrong = [
        f"model.{field} is {theirs[field]} there and {ours[field]} here"
        for field in SIZES
        if field in theirs and field in ours and theirs[field] != ours[field]
    ]
    return f" ({', '.join(wrong)})" if wrong else ""


def init_from(plan: InitFromPlan, fresh: Params, shardings: PyTree, log: LogFn) -> Params:
    """Returns the parameters of another run, with fresh ones where nothing is copied.

    Args:
        plan: Which parameters to copy from where.
        fresh: The run's own initial parameters; of those that are copied, shapes are enough.
        shardings: The sharding of each parameter, a tree like `fresh`.
        log: Called with a line each for what was copied, what is new and what was left behind.
    """
    sharding_of, own = dict(named(shardings)), dict(named(fresh))
    first_device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

    def target(name: str, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        if name not in plan.copied:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=first_device)
        return jax.ShapeDtypeStruct(x.shape, own[name].dtype, sharding=sharding_of[name])

    shapes = map_named(target, plan.source_shapes)
    source = dict(named(read_params(plan.folder, plan.step, plan.source, shapes)))
    checkpoint = plan.folder if plan.step is None else f"step {plan.step} of {plan.folder}"
    log(f"from {checkpoint}: copied {_summary(plan.copied, own)}")
    for what, names, params in (
        ("new, with random values", own.keys() - plan.copied, own),
        ("left behind", source.keys() - plan.copied, source),
    ):
        if names:
            log(f"{what}: {_summary(names, params)}")
    merged = [source[name] if name in plan.copied else x for name, x in own.items()]
    return jax.tree.unflatten(jax.tree.structure(fresh), merged)


def _summary(names: Iterable[str], params: Params) -> str:
    """Returns the first parts of names (two for a head), and the number of their parameters."""
    names = list(names)
    parts = sorted({"/".join(n.split("/")[: 2 if n.startswith(HEAD) else 1]) for n in names})
    return f"{', '.join(parts)} ({sum(params[n].size for n in names):,} parameters)"
