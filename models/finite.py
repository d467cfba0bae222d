"""Rejects parameters and outputs that are NaN or infinite."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..data.common.errors import RunError
from ..data.common.fields import require
from .loading import load
from .nn.typing import Params, PyTree
from .registry import create


def load_finite(
    folder: str | Path, *, step: int | None = None, max_length: int | None = None, ema: bool = False
) -> tuple[Any, Params]:
    """Loads a model like `models.load`, and checks its parameters.

    Args:
        folder: A run folder, a folder in the Hugging Face format, or a name on the hub.
        step: The checkpoint. Defaults to the newest checkpoint.
        max_length: The maximum input length, in tokens. Defaults to the maximum of the model.
        ema: Whether to load the moving average of the parameters.

    Raises:
        RunError: A parameter is NaN or infinite.
        UserError: The length of the model's position table differs from `max_length`.
    """
    model, params = load(folder, step=step, ema=ema)
    check_finite(params, folder)
    if max_length is not None:
        model = create(model.config.with_max_length(max_length), model.execution)
    return model, params


def check_finite(
    params: Params, owner: str | Path, remedy: str = "give another --step or another model"
) -> None:
    """Raises RunError if a parameter is NaN or infinite, and names the first such parameter.

    Args:
        params: Parameters.
        owner: The folder of the parameters, or a description of their source, for the message.
        remedy: The clause of the message that says what the user can do.
    """
    # Check all parameters in one program, so that only one boolean per parameter is transferred.
    finite = jax.device_get(_all_finite(params))
    bad = [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, good in jax.tree.leaves_with_path(finite)
        if not good
    ]
    if bad:
        share = f"{len(bad)} of {len(jax.tree.leaves(finite))} parameters"
        raise RunError(f"{owner} has NaN or infinity in {share}, first in {bad[0]}: {remedy}")


@jax.jit
def _all_finite(params: PyTree) -> PyTree:
    """Returns, for each array, whether all of its elements are finite."""
    return jax.tree.map(lambda x: jnp.isfinite(x).all(), params)


def check_outputs(outputs: Mapping[str, object]) -> None:
    """Raises RunError if an output is NaN or infinite, and names the first such output.

    Args:
        outputs: Arrays, numbers or texts (which are ignored), by name.
    """
    for name, x in outputs.items():
        array = np.asarray(x)
        # NumPy does not classify bfloat16 as a floating type, so use JAX.
        is_float = jnp.issubdtype(array.dtype, jnp.floating)
        require(
            not is_float or np.isfinite(array.astype(np.float32)).all(),
            f"the model gives NaN or infinity as {name}: its parameters are too large; give "
            "another --step or another model",
            RunError,
        )
