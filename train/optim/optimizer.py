"""AdamW, LAMB, Adafactor and Muon with weight decay for matrices, layer-wise rates and freezing.

Optimizers are composed of optax's transformations. How a parameter is treated depends only on its
path (`parameters.py`).
"""

import difflib
import functools
import itertools
import re
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ...data.common.errors import UserError, suggest
from ...data.common.fields import require
from ...models.config import TransformerConfig
from ...models.nn.typing import PyTree
from ...models.registry import Family, families_of
from ..optimizer_config import OptimizerConfig
from . import adafactor, muon
from .ema import parameter_ema
from .moments import store_moments
from .parameters import (
    STACK,
    Leaf,
    decay_mask,
    is_decayed,
    is_stacked,
    map_named,
    named,
    own_names,
)
from .schedules import make_schedule


def make_optimizer(
    config: OptimizerConfig,
    steps: int,
    model: TransformerConfig | None = None,
    schedule_start: int = 0,
) -> optax.GradientTransformation:
    """Makes an optimizer from gradient clipping, update rule, weight decay and per-parameter rates.

    AdamW (Loshchilov & Hutter 2019, algorithm 2) corrects the initial bias of its moments. BERT's
    original optimizer did not correct the bias, which makes its first step (1 - beta1) / √(1 -
    beta2) times as long (3.2 times with BERT's betas). Mosbach et al. (2021) recommend the
    correction for fine-tuning.

    LAMB (You et al. 2020, algorithm 2) also corrects this bias. This implementation of LAMB differs
    from `optax.lamb` in two ways. Biases and norms have no weight decay and therefore no trust
    ratio, as in the published LAMB code for BERT. Each layer of a stack has its own trust ratio.

    Adafactor (`adafactor.py`) and Muon (`muon.py`) also treat each layer separately. All update
    rules multiply the weight decay by the learning rate.

    The gradient norm for clipping does not include frozen parameters. A frozen parameter gets no
    update and no weight decay. Its moments are stored but stay 0.

    Args:
        config: the hyperparameters.
        steps: the number of steps of the run, for the schedule.
        model: the configuration of the model. For `config.layer_decay`, the model's family
          determines which parameters are below and above the layers; if None, the names of all
          families apply.
        schedule_start: the number of steps that precede the schedule; see `make_schedule`.

    Returns:
        The optimizer. Its `init` raises UserError if a pattern of `config.frozen` matches no
        parameter, if all parameters are frozen, or if `config.layer_decay` is below 1 and the depth
        of a parameter is unknown.
    """
    clip = config.max_gradient_norm
    lamb, frozen = config.name == "lamb", bool(config.frozen)
    uneven = frozen or config.layer_decay != 1
    trained = functools.partial(trained_factors, patterns=config.frozen)
    rates = functools.partial(rate_factors, config=config, model=model)
    return optax.chain(
        # Set frozen gradients to zero first, so that the norm excludes them.
        *([scale_by_factors(trained)] if frozen else []),
        optax.identity() if clip is None else optax.clip_by_global_norm(clip),
        optax.chain(
            *_update_rule(config),
            optax.add_decayed_weights(config.weight_decay, decay_mask),
            # The trust ratio of LAMB includes the weight decay.
            *([scale_by_trust_ratio_per_layer()] if lamb else []),
            optax.scale_by_learning_rate(make_schedule(config, steps, schedule_start)),
        ),
        # Multiply by the parameters' rates last, so that the rates also scale the weight decay.
        *([scale_by_factors(rates)] if uneven else []),
        # The moving average needs the final update.
        *([] if config.ema_decay is None else [parameter_ema(config.ema_decay)]),
    )


def _update_rule(config: OptimizerConfig) -> list[optax.GradientTransformation]:
    """Returns the transformations of the update rule, without weight decay and learning rate."""
    # If `store_moments` rounds a moment, compute it in float32.
    mu_dtype = "bfloat16" if config.state_dtype == "bfloat16" else "float32"

    def stored(tx: optax.GradientTransformation) -> optax.GradientTransformation:
        return store_moments(tx, config.state_dtype)

    if config.name == "adafactor":
        momentum = optax.ema(config.beta1, debias=False, accumulator_dtype=mu_dtype)
        return [
            adafactor.scale_by_factored_rms(),
            adafactor.per_matrix(optax.clip_by_block_rms(1.0)),
            adafactor.per_matrix(optax.scale_by_param_block_rms()),
            *([stored(momentum)] if config.adafactor_momentum else []),
        ]
    adam = stored(
        optax.scale_by_adam(config.beta1, config.beta2, config.epsilon, mu_dtype=mu_dtype)
    )
    if config.name != "muon":
        return [adam]
    from optax.contrib import scale_by_muon  # slow to import, and seldom needed

    momentum = scale_by_muon(
        beta=config.muon_beta,
        mu_dtype=mu_dtype,
        weight_dimension_numbers=muon.dimension_numbers,
    )
    return [muon.scale_by_muon(stored(momentum), adam)]


def scale_by_trust_ratio_per_layer() -> optax.GradientTransformation:
    """Scales the update of each matrix to the norm of the matrix, separately for each layer."""
    ratio = optax.scale_by_trust_ratio()

    def scale(update: jax.Array, param: jax.Array) -> jax.Array:
        return ratio.update(update, optax.EmptyState(), param)[0]  # pyright: ignore[reportReturnType]

    def scale_named(name: str, update: jax.Array, param: jax.Array) -> jax.Array:
        if not is_decayed(name):
            return update
        return (jax.vmap(scale) if is_stacked(name) else scale)(update, param)

    return optax.stateless(lambda updates, params: map_named(scale_named, updates, params))


def scale_by_factors(factors_of: Callable[[PyTree], PyTree]) -> optax.GradientTransformation:
    """Multiplies the update of each parameter by a factor.

    Args:
        factors_of: maps the parameters (or their shapes) to a tree of numpy arrays that can be
          broadcast to the parameters.
    """

    def init(params: PyTree) -> optax.EmptyState:
        # Also compute the factors here, so that errors are raised before the first step. optax also
        # calls `init` with a single leaf, which has no path, to find the parameters in the state.
        if not jax.tree_util.treedef_is_leaf(jax.tree.structure(params)):
            factors_of(params)
        return optax.EmptyState()

    def scale(update: jax.Array, factor: np.ndarray) -> jax.Array:
        # Do not multiply by 0: 0 · NaN and 0 · infinity are NaN, not 0.
        return jnp.where(factor == 0, 0, update * factor) if np.any(factor != 1) else update

    def update(
        updates: PyTree, state: optax.OptState, params: PyTree | None = None
    ) -> tuple[PyTree, optax.OptState]:
        del params
        return jax.tree.map(scale, updates, factors_of(updates)), state

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def trained_factors(params: PyTree, patterns: Sequence[str]) -> PyTree:
    """Returns factors: 1 for trained, 0 for frozen parameters; `[L, 1, …]` for stacked layers.

    Args:
        params: parameters or their shapes.
        patterns: regular expressions, which must match the whole path of a parameter or of a
          subtree. A single layer of the stack has the path `layers/3/…`; a parameter of all layers
          has the path under which it is stored, `layers/attention/…`.

    Raises:
        UserError: a pattern matches nothing, or all parameters are frozen.
    """
    for pattern in patterns:
        _check_matches(pattern, params)

    def factor(name: str, param: Leaf) -> np.ndarray:
        # A pattern may match a parameter of one layer, or the parameter of all layers.
        is_frozen = [
            any(_matches(pattern, path) for pattern in patterns for path in (name, own))
            for own in own_names(name, param)
        ]
        return _along_leading_axis(1.0 - np.asarray(is_frozen), name, param)

    factors = map_named(factor, params)
    require(
        any(map(np.any, jax.tree.leaves(factors))),
        f"optimizer.frozen {' '.join(patterns)} freezes every parameter: leave some "
        f"parameters unfrozen",
    )
    return factors


def rate_factors(
    params: PyTree, config: OptimizerConfig, model: TransformerConfig | None = None
) -> PyTree:
    """Returns a learning-rate factor for each parameter: 0 if frozen, else based on its depth.

    The factor is 1 for the head and all other parameters above the stack, `layer_decay` for the top
    layer, `layer_decay`² for the layer below it, …, and `layer_decay`^(L + 1) for the embeddings.
    (ELECTRA and BEiT also start the decay at the head; Sun et al. 2019 start at the top layer.)

    Args:
        params: parameters or their shapes.
        config: the hyperparameters.
        model: the model's configuration; see `make_optimizer`.

    Raises:
        UserError: as in `trained_factors`, or the depth of a parameter is unknown.
    """
    known = families_of(model)
    layers = max((x.shape[0] for name, x in named(params) if is_stacked(name)), default=0)

    def factor(name: str, param: Leaf, trained: np.ndarray) -> np.ndarray:
        if config.layer_decay == 1:
            return trained
        decayed = [config.layer_decay**n for n in _steps_below_head(name, layers, known)]
        return np.asarray(trained * _along_leading_axis(decayed, name, param))

    return map_named(factor, params, trained_factors(params, config.frozen))


def _steps_below_head(name: str, layers: int, known: Sequence[Family]) -> list[int]:
    """Returns a parameter's exponents of `layer_decay`: one per layer of a stack, otherwise one."""
    part = name.split("/", 1)[0]
    if part == STACK:
        # Layer 0 is the lowest.
        return list(range(layers, 0, -1))
    below = any(re.fullmatch(family.below_layers, part) for family in known)
    above = any(re.fullmatch(family.above_layers, part) for family in known)
    require(
        below or above,
        f"optimizer.layer_decay must be 1 for this model: its parameter {name} is neither below "
        "nor above the layers",
    )
    return [layers + 1 if below else 0]


def _along_leading_axis(values: Sequence[float] | np.ndarray, name: str, param: Leaf) -> np.ndarray:
    """Reshapes one value per layer to `[L, 1, …]`, or a single value to `[]`."""
    shape = (-1, *(1,) * (len(param.shape) - 1)) if is_stacked(name) else ()
    return np.asarray(values, np.float32).reshape(shape)


def _with_parents(name: str) -> list[str]:
    """Returns `a`, `a/b` and `a/b/c` for `a/b/c`."""
    return list(itertools.accumulate(name.split("/"), "{}/{}".format))


def _matches(pattern: str, name: str) -> bool:
    return any(re.fullmatch(pattern, path) for path in _with_parents(name))


def _check_matches(pattern: str, params: PyTree) -> None:
    """Raises UserError, with the most similar paths, if a pattern matches no parameter."""
    # A pattern may match the path of a stored parameter, or of a parameter of one layer.
    names = [n for name, x in named(params) for n in (name, *own_names(name, x))]
    if any(_matches(pattern, name) for name in names):
        return
    paths = list(dict.fromkeys(itertools.chain(*map(_with_parents, names))))
    # If no path is similar, suggest the modules at the top of the model.
    similar = difflib.get_close_matches(pattern, paths, n=3, cutoff=0.4)
    parts = list(dict.fromkeys(name.partition("/")[0] for name in names))
    raise UserError(
        f"optimizer.frozen {pattern!r} matches no parameter: {suggest(pattern, similar or parts)}"
    )
