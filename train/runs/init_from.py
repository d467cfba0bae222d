"""Initializes a run from another run's parameters: the body, and the head layers that both have."""

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path

import jax

from ...data.common.errors import RunError
from ...data.common.fields import require
from ...data.common.progress import LogFn
from ...models.config import TransformerConfig
from ...models.heads.specs import HEADS
from ...models.init import parameter_shapes
from ...models.loading import read_params
from ...models.nn.typing import Params, PyTree
from ...models.registry import create
from ..optim.parameters import map_named, named

HEAD = "head/"
"""The prefix of the head's parameters. All other parameters belong to the body."""

SHOWN = 3
"""The number of parameters or fields that an error message lists. The message only states the
number of the others."""
SIZES = ("vocab_size", "max_length", "num_layers", "d_model", "d_ff")
"""The configuration fields that most often explain different shapes in two bodies."""


@dataclasses.dataclass(frozen=True)
class InitFromPlan:
    """The checkpoint that initializes a run, and the parameters to copy from it."""

    folder: Path
    step: int | None
    """The step of the checkpoint; None if the folder is in the Hugging Face format."""
    source: TransformerConfig
    """The configuration of the model in the folder."""
    source_shapes: Params
    """The shapes of all parameters in the checkpoint."""
    copied: frozenset[str]
    """The names of the parameters to copy."""

    def new(self, model: TransformerConfig) -> list[str]:
        """Returns the names of a model's parameters that the checkpoint does not supply."""
        shapes = parameter_shapes(create(model))
        return [name for name, _ in named(shapes) if name not in self.copied]


def plan_init_from(
    folder: Path, step: int | None, source: TransformerConfig, model: TransformerConfig
) -> InitFromPlan:
    """Determines which parameters a model copies from a run, without reading the parameters.

    Args:
        folder: The folder to initialize from.
        step: The step of a checkpoint of the run, or None for a folder in the Hugging Face format.
        source: The configuration of the model in the folder.
        model: The configuration of the model to initialize.

    Raises:
        RunError: A parameter of the body has different shapes in the two models.
    """
    source_shapes = parameter_shapes(create(source))
    wanted = dict(named(parameter_shapes(create(model))))
    # Parameters of the head that depend on the labels are copied only if both runs have the same
    # head and labels.
    same = (source.head, source.labels) == (model.head, model.labels)
    of_labels = _prefixes_of_labels(source)
    copied, other = set(), []
    for name, x in named(source_shapes):
        if name not in wanted or (name.startswith(of_labels) and not same):
            continue
        if wanted[name].shape == x.shape:
            copied.add(name)
        # Head parameters with a different shape stay random, but the shapes of the body must match.
        elif not name.startswith(HEAD):
            other.append(f"{name} {x.shape}, but this run has {wanted[name].shape}")
    require(
        not other,
        f"{folder} has {first_few(other)}: both models need the same sizes and "
        f"vocabulary{_other_sizes(source, model)}",
        RunError,
    )
    return InitFromPlan(folder, step, source, source_shapes, frozenset(copied))


def head_parameters(model: TransformerConfig) -> list[str]:
    """Returns the names of head parameters that fit only a model with the same head and labels."""
    prefixes = _prefixes_of_labels(model)
    return [name for name, _ in named(parameter_shapes(create(model))) if name.startswith(prefixes)]


def _prefixes_of_labels(model: TransformerConfig) -> tuple[str, ...]:
    """Returns prefixes of head parameters that fit only a model with the same head and labels."""
    return tuple(f"{HEAD}{part}/" for part in HEADS[model.head].own_params)


def first_few(items: Sequence[str]) -> str:
    """Lists the first `SHOWN` items for an error message, and states the number of the others."""
    more = f" and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    return f"{', '.join(items[:SHOWN])}{more}"


def _other_sizes(source: TransformerConfig, model: TransformerConfig) -> str:
    """Lists, for an error message, the different fields that explain the different shapes."""
    theirs, ours = map(dataclasses.asdict, (source, model))
    wrong = [
        f"model.{field} is {theirs[field]} in its configuration and {ours[field]} in this run"
        for field in SIZES
        if theirs[field] != ours[field]
    ]
    return f" ({', '.join(wrong)})" if wrong else ""


def init_from(plan: InitFromPlan, initial: Params, shardings: PyTree, log: LogFn) -> Params:
    """Returns the initial parameters: those in `plan` are copied, and the others are random.

    Args:
        plan: The parameters to copy, and the checkpoint to copy them from.
        initial: The run's random initial parameters. Parameters that are copied may be shapes
          instead of arrays.
        shardings: The sharding of each parameter, a tree like `initial`.
        log: Called with up to three lines, about copied, new and unused parameters.
    """
    sharding_of, random = dict(named(shardings)), dict(named(initial))
    first_device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

    def target(name: str, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        # The whole checkpoint is read, including unused parameters. Put these on a single device.
        if name not in plan.copied:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=first_device)
        return jax.ShapeDtypeStruct(x.shape, random[name].dtype, sharding=sharding_of[name])

    shapes = map_named(target, plan.source_shapes)
    source = dict(named(read_params(plan.folder, plan.step, plan.source, shapes)))
    checkpoint = plan.folder if plan.step is None else f"step {plan.step} of {plan.folder}"
    log(f"from {checkpoint}: copied {_summary(plan.copied, random)}")
    for what, names, params in (
        ("new, with random values", random.keys() - plan.copied, random),
        ("left behind", source.keys() - plan.copied, source),
    ):
        if names:
            log(f"{what}: {_summary(names, params)}")
    # Keep the order of `initial`, so that the result has its structure.
    merged = random | {name: source[name] for name in plan.copied}
    return jax.tree.unflatten(jax.tree.structure(initial), merged.values())


def _summary(names: Iterable[str], params: Params) -> str:
    """Lists the modules of the named parameters, and counts the scalar parameters."""
    names = list(names)
    parts = sorted({"/".join(n.split("/")[: 2 if n.startswith(HEAD) else 1]) for n in names})
    return f"{', '.join(parts)} ({sum(params[n].size for n in names):,} parameters)"
