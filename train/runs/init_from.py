"""Beginning with another run's parameters: its body, and of its head what this run has too."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from ...models.config import TransformerConfig
from ...models.load import read_params
from ...models.init import parameter_shapes
from ...models.registry import create
from ..errors import RunError
from ..tree import path_name

HEAD = "head/"
"""Below this name stands what belongs to an objective; everything else is the body."""
OWN_LABELS = ("head/classifier/", "head/span/")
"""What is of use only to the same head with the same labels."""


@dataclasses.dataclass(frozen=True)
class Beginning:
    """Which parameters of which checkpoint a run begins with."""

    folder: Path
    step: int | None
    """None: a folder in Hugging Face's form."""
    source: TransformerConfig
    """The model there."""
    theirs: Any
    """Shapes of all parameters there."""
    copied: frozenset[str]
    """Names of those that are taken."""


def plan_beginning(
    folder: Path, step: int | None, source: TransformerConfig, model: TransformerConfig
) -> Beginning:
    """What a model takes of a run's parameters; reads none of them yet.

    Args:
      folder: the folder to begin with.
      step: one of its checkpoints; None: it has but one.
      source: its model.
      model: the model that begins with it.

    Raises:
      RunError: part of the body is of another shape.
    """
    theirs, ours = (parameter_shapes(create(config)) for config in (source, model))
    wanted = _by_name(ours)
    same_head = [getattr(c, "head", None) for c in (source, model)]
    same_labels = [getattr(c, "labels", ()) for c in (source, model)]
    same = same_head[0] == same_head[1] and same_labels[0] == same_labels[1]
    copied = set()
    for name, x in _by_name(theirs).items():
        if name not in wanted or (name.startswith(OWN_LABELS) and not same):
            continue
        if wanted[name].shape == x.shape:
            copied.add(name)
        elif not name.startswith(HEAD):
            raise RunError(
                f"{folder} has {name} {x.shape} where this run has {wanted[name].shape}: both "
                "need the same sizes and vocabulary"
            )
    return Beginning(folder, step, source, theirs, frozenset(copied))


def begin(beginning: Beginning, fresh: Any, shardings: Any, say: Callable[[str], None]) -> Any:
    """Parameters of a run, and fresh ones for what is not taken from it.

    Args:
      beginning: the plan.
      fresh: this run's own initial parameters.
      shardings: a tree like `fresh`: where each is to lie.
      say: told what was copied, what is new and what was left, a line each.
    """
    lies = _by_name(shardings)
    nowhere = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

    def target(path: Any, x: Any) -> jax.ShapeDtypeStruct:
        name = path_name(path)
        sharding = lies[name] if name in beginning.copied else nowhere
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    shapes = jax.tree_util.tree_map_with_path(target, beginning.theirs)
    folder, step = beginning.folder, beginning.step
    theirs = _by_name(read_params(folder, step, beginning.source, shapes))
    ours = _by_name(fresh)
    copied = _listed(beginning.copied, ours)
    say(f"from {folder if step is None else f'step {step} of {folder}'}: copied {copied}")
    for what, names, params in (
        ("new, with random values", ours.keys() - beginning.copied, ours),
        ("left behind", theirs.keys() - beginning.copied, theirs),
    ):
        if names:
            say(f"{what}: {_listed(names, params)}")
    return jax.tree_util.tree_map_with_path(
        lambda path, x: theirs[name] if (name := path_name(path)) in beginning.copied else x, fresh
    )


def _by_name(tree: Any) -> dict[str, Any]:
    return {path_name(path): x for path, x in jax.tree.leaves_with_path(tree)}


def _listed(names: Any, params: dict[str, Any]) -> str:
    """Names down to their first part (of a head, the second), and how many numbers they hold."""
    parts = sorted({"/".join(n.split("/")[: 2 if n.startswith(HEAD) else 1]) for n in names})
    return f"{', '.join(parts)} ({sum(params[n].size for n in names):,} parameters)"
