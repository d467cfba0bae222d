"""Initializes a run from another run's parameters: the body, and what the heads have in common."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path

import jax
from jax.tree_util import KeyPath

from ...models.config import TransformerConfig
from ...models.init import parameter_shapes
from ...models.load import read_params
from ...models.nn.heads import HEADS
from ...models.nn.typing import Params, PyTree
from ...models.registry import create
from ..errors import RunError
from ..progress import LogFn
from ..tree import path_name

HEAD = "head/"
"""Prefix of the parameters that belong to an objective; all others are the body."""


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
    wanted = _by_name(parameter_shapes(create(model)))
    same = (source.head, source.labels) == (model.head, model.labels)
    own = tuple(f"{HEAD}{part}/" for part in HEADS[source.head].own_params)
    copied = set()
    for name, x in _by_name(source_shapes).items():
        if name not in wanted or (name.startswith(own) and not same):
            continue
        if wanted[name].shape == x.shape:
            copied.add(name)
        elif not name.startswith(HEAD):
            raise RunError(
                f"{folder} has {name} {x.shape} where this run has {wanted[name].shape}: both "
                "need the same sizes and vocabulary"
            )
    return InitFromPlan(folder, step, source, source_shapes, frozenset(copied))


def init_from(plan: InitFromPlan, fresh: Params, shardings: PyTree, log: LogFn) -> Params:
    """Returns the parameters of another run, with fresh ones where nothing is copied.

    Args:
        plan: Which parameters to copy from where.
        fresh: The run's own initial parameters.
        shardings: The sharding of each parameter, a tree like `fresh`.
        log: Called with a line each for what was copied, what is new and what was left behind.
    """
    sharding_of = _by_name(shardings)
    first_device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

    def target(path: KeyPath, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        name = path_name(path)
        sharding = sharding_of[name] if name in plan.copied else first_device
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    shapes = jax.tree_util.tree_map_with_path(target, plan.source_shapes)
    source = _by_name(read_params(plan.folder, plan.step, plan.source, shapes))
    own = _by_name(fresh)
    checkpoint = plan.folder if plan.step is None else f"step {plan.step} of {plan.folder}"
    log(f"from {checkpoint}: copied {_summary(plan.copied, own)}")
    for what, names, params in (
        ("new, with random values", own.keys() - plan.copied, own),
        ("left behind", source.keys() - plan.copied, source),
    ):
        if names:
            log(f"{what}: {_summary(names, params)}")
    return jax.tree_util.tree_map_with_path(
        lambda path, x: source[name] if (name := path_name(path)) in plan.copied else x, fresh
    )


def _by_name(tree: PyTree) -> Params:
    """Returns the leaves of a tree (arrays, shapes or shardings) by their paths."""
    return {path_name(path): x for path, x in jax.tree.leaves_with_path(tree)}


def _summary(names: Iterable[str], params: Params) -> str:
    """Returns the first parts of names (two for a head), and the number of their parameters."""
    names = list(names)
    parts = sorted({"/".join(n.split("/")[: 2 if n.startswith(HEAD) else 1]) for n in names})
    return f"{', '.join(parts)} ({sum(params[n].size for n in names):,} parameters)"
