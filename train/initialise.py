"""Beginning with another run's parameters: its body, and of its head what this run has too."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from ..models.config import create
from ..models.loading import newest_step, restore_params
from ..models.shapes import parameter_shapes
from .errors import RunError
from .optimizer import path_name
from .run import open_run

HEAD = "head"
"""Below this name stands what belongs to an objective; everything else is the body."""


def begin_from(folder: str | Path, fresh: Any, shardings: Any, say: Callable[[str], None]) -> Any:
    """Parameters of a run, and fresh ones where it has none of the same path and shape.

    Args:
      folder: the run folder to begin with; its newest checkpoint is taken.
      fresh: this run's own initial parameters.
      shardings: a tree like `fresh`: where each is to lie.
      say: told what was copied and what is new, a line each.

    Raises:
      FileNotFoundError: it is not a run folder, or has no checkpoint.
      RunError: part of the body is of another shape, or nothing is alike.
    """
    config, _ = open_run(folder)
    step = newest_step(folder)
    shapes = parameter_shapes(create(config.model))
    wanted = _by_name(fresh)
    lies = _by_name(shardings)
    nowhere = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

    def target(path: Any, x: Any) -> jax.ShapeDtypeStruct:
        sharding = lies[name] if _fits(name := path_name(path), x, wanted) else nowhere
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    theirs = _by_name(
        restore_params(folder, step, jax.tree_util.tree_map_with_path(target, shapes))
    )
    copied = {name for name, x in theirs.items() if _fits(name, x, wanted)}
    _check_body(folder, theirs, wanted, copied)
    say(f"from step {step} of {folder}: copied {_listed(copied, wanted)}")
    new = wanted.keys() - copied
    say(f"new, with random values: {_listed(new, wanted)}" if new else "nothing is new")
    return jax.tree_util.tree_map_with_path(
        lambda path, x: theirs[name] if (name := path_name(path)) in copied else x, fresh
    )


def _by_name(tree: Any) -> dict[str, Any]:
    return {path_name(path): x for path, x in jax.tree.leaves_with_path(tree)}


def _fits(name: str, x: Any, wanted: dict[str, Any]) -> bool:
    return name in wanted and wanted[name].shape == x.shape


def _check_body(folder: Any, theirs: Any, wanted: Any, copied: set[str]) -> None:
    for name, x in theirs.items():
        if not name.startswith(f"{HEAD}/") and name in wanted and name not in copied:
            raise RunError(
                f"{folder} has {name} {x.shape} where this run has {wanted[name].shape}: both "
                "need the same sizes and vocabulary"
            )
    if not copied:
        raise RunError(f"{folder} holds no parameter that this model has: begin with another run")


def _listed(names: Any, params: dict[str, Any]) -> str:
    """Names down to their first part (of a head, the second), and how many numbers they hold."""
    parts = sorted({"/".join(n.split("/")[: 2 if n.startswith(HEAD) else 1]) for n in names})
    return f"{', '.join(parts)} ({sum(params[n].size for n in names):,} parameters)"
