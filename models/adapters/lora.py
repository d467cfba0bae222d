"""Low-rank adaptation of linear maps (Hu et al. 2021, "LoRA").

A frozen linear map x W + b becomes x W + b + s · dropout(x) A B, with A `[inputs, r]` and B
`[r, outputs]` for a small rank r. B starts at zero, so that an adapted model initially equals its
base. A and B, `lora_a` and `lora_b`, are siblings of the kernel W in the parameter tree, with a
leading layer axis if W has one. Training never forms W + s · A B or its gradient.
"""

import dataclasses
import functools
import math
import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.module import InterceptorContext
from flax.traverse_util import flatten_dict, unflatten_dict

from ...data.common.errors import UserError, suggest
from ...data.common.fields import Checked, Positive, PositiveInt, Rate, require
from ..init import parameter_shapes, trace_init
from ..model import Model
from ..nn.dropout import dropout, fold_in, row_keys
from ..nn.layers import Linear
from ..nn.typing import Array, Float, Key, Params, PyTree
from ..registry import create

A, B = "lora_a", "lora_b"
HEAD = "head/"
KEYS = "lora_keys"
"""The variable that contains the dropout keys of a linear map, one for each sequence."""
PEFT_TARGETS = {
    "all-linear": ".*",
    "q_proj": "query",
    "k_proj": "key",
    "v_proj": "value",
    "o_proj": "attention/output",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
}
"""Maps common names of linear maps in PEFT to the equivalent patterns of `LoRAConfig.targets`."""

Apply = Callable[..., Any]
Args = tuple[PyTree, ...]
Kwargs = dict[str, PyTree]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoRAConfig(Checked):
    """Settings of low-rank adapters: adapted maps, rank, and other trained parameters."""

    rank: PositiveInt = 8
    """The rank r: the number of columns of A and of rows of B."""
    alpha: Positive = 8.0
    """The product A B is multiplied by alpha / rank."""
    dropout_rate: Rate = 0.0
    """Dropout rate of an adapter's input."""
    targets: tuple[str, ...] = ("query", "value")
    """Linear maps to adapt: regular expressions that match one or more whole components of their
    paths, such as `attention`, `attention/query`, `feed_forward`, `encoder/.*`, or `.*` for all
    except the head."""
    also_trained: tuple[str, ...] = ()
    """Parameters that are trained directly, without an adapter, selected by patterns as in
    `targets`. A run also trains its classifier and the parameters that its base lacks."""
    use_rslora: bool = False
    """Whether A B is multiplied by alpha / √rank instead of alpha / rank (Kalajdzievski 2023)."""
    frozen_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the frozen parameters."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.targets, "lora.targets () must name linear maps, for example query and value")

    @property
    def scale(self) -> float:
        """The factor s that multiplies A B."""
        return self.alpha / scale_divisor(self.rank, self.use_rslora)


def scale_divisor(rank: int, use_rslora: bool) -> float:
    """Returns the divisor of alpha: the rank r, or √r for rank-stabilized LoRA."""
    return math.sqrt(rank) if use_rslora else float(rank)


@dataclasses.dataclass(frozen=True)
class LinearMap:
    """A linear map of a model, or the same map in all layers of a stack."""

    path: str
    """The path of its parameters, such as `layers/attention/query`."""
    layers: tuple[int, ...]
    """The size of the kernel's leading layer axis, `(L,)`; empty for a map outside a stack."""
    inputs: tuple[int, ...]
    """Sizes of the input axes, such as `(N, H)` for a map that reads heads."""
    outputs: tuple[int, ...]
    """Sizes of the output axes."""


@functools.lru_cache(maxsize=32)
def linear_maps(model: nn.Module) -> Mapping[str, LinearMap]:
    """Returns every linear map of a model by its path, found by tracing the model once."""
    input_axes: dict[str, int] = {}

    # The shape of a kernel does not show the number of its input axes, so trace the model.
    def note(method: Apply, args: Args, kwargs: Kwargs, context: InterceptorContext) -> object:
        if isinstance(context.module, Linear) and context.method_name == "__call__":
            input_axes["/".join(context.module.path)] = context.module.num_input_axes
        return method(*args, **kwargs)

    rng = jax.eval_shape(jax.random.key, 0)
    with nn.intercept_methods(note):
        shapes = by_path(jax.eval_shape(lambda rng: trace_init(model, rng), rng))
    # Kernels are [L, *inputs, *outputs] in a stack of layers, else [*inputs, *outputs].
    maps = {}
    for path, axes in input_axes.items():
        shape = shapes[f"{path}/kernel"].shape
        first = int("layers" in path.split("/"))
        end = first + axes
        maps[path] = LinearMap(path, shape[:first], shape[first:end], shape[end:])
    return maps


@dataclasses.dataclass(frozen=True)
class LoRA:
    """The adapters of a model: which maps are adapted, and which other parameters are trained.

    Example::

        lora = models.make_lora(models.LoRAConfig(rank=8, targets=("attention",)), model)
        trained, frozen = lora.init(jax.random.key(0), params)
        step = train.make_train_step(model.apply, train.CAUSAL, tx, adapter=lora)
        state, metrics = step(train.init_state(trained, tx, frozen), batch, jax.random.key(1))
        params = lora.merge(state.params, state.frozen)
    """

    config: LoRAConfig
    maps: tuple[LinearMap, ...]
    """The maps that have adapters."""
    whole: frozenset[str] = frozenset()
    """Paths of the model's parameters that are trained directly, without an adapter."""

    def init(
        self, rng: Key[Array, ""], params: Params, *, keep_initial: bool = False
    ) -> tuple[Params, Params]:
        """Returns the trained parameters, including the adapters, and the frozen parameters.

        A is uniform in ±1 / √inputs, as in PEFT (He et al. 2015 with a = √5), and B is 0.

        Args:
            rng: The key for A. The key of each map depends only on `rng` and the map's path.
            params: The parameters of the model.
            keep_initial: Whether the frozen parameters include copies of the initial values of
              fully trained parameters, for a reference model.
        """
        flat = {}
        for m in self.maps:
            limit = 1 / math.sqrt(math.prod(m.inputs))
            # The key depends on the path alone, so adding a target does not change other adapters.
            key = jax.random.fold_in(rng, zlib.crc32(m.path.encode()))
            shape = *m.layers, *m.inputs, self.config.rank
            flat[f"{m.path}/{A}"] = jax.random.uniform(key, shape, jnp.float32, -limit, limit)
            shape = *m.layers, self.config.rank, *m.outputs
            flat[f"{m.path}/{B}"] = jnp.zeros(shape, jnp.float32)
        # The trained parameters are the adapters and the fully trained parameters.
        trained, frozen = self.split(params, keep_initial=keep_initial)
        return join_params(trained, nested(flat)), frozen

    def split(self, params: Params, *, keep_initial: bool = False) -> tuple[Params, Params]:
        """Returns the fully trained parameters, and the others in the precision `frozen_dtype`."""
        flat = by_path(params)
        whole = {path: x for path, x in flat.items() if path in self.whole}
        dtype = jnp.dtype(self.config.frozen_dtype)
        frozen = {path: x.astype(dtype) for path, x in flat.items() if path not in self.whole}
        if keep_initial:  # copy them, because a training step donates the arrays of its state
            frozen |= {path: jnp.copy(x).astype(dtype) for path, x in whole.items()}
        return nested(whole), nested(frozen)

    def combine(self, trained: Params, frozen: Params | None) -> tuple[Params, Params]:
        """Returns the parameters of the adapted model and of the model without adapters.

        If there is a frozen copy of a parameter, the model without adapters uses this copy. Frozen
        parameters have no gradient.

        Raises:
            ValueError: `frozen` is None.
        """
        if frozen is None:
            raise ValueError(
                "the state must have the frozen parameters of the base: init_state(params, tx, "
                "frozen=…)"
            )
        frozen = jax.lax.stop_gradient(frozen)
        return join_params(frozen, trained), join_params(without_adapters(trained), frozen)

    def merge(self, trained: Params, frozen: Params) -> Params:
        """Merges the adapters into the kernels: replaces each adapted kernel W by W + s · A B.

        Args:
            trained: The trained parameters, `[L, …]` where layers are stacked.
            frozen: The frozen parameters.

        Returns:
            The parameters of the model, in float32.
        """
        flat = by_path(join_params(frozen, trained))
        params = {path: x.astype(jnp.float32) for path, x in _without_adapters(flat).items()}
        for m in self.maps:
            path = f"{m.path}/kernel"
            params[path] = self.merge_kernel(
                params[path], flat[f"{m.path}/{A}"], flat[f"{m.path}/{B}"], m
            )
        return nested(params)

    def merge_kernel(
        self,
        kernel: Float[Array, "..."],
        a: Float[Array, "... r"],
        b: Float[Array, "..."],
        linear: LinearMap,
    ) -> Float[Array, "..."]:
        """Returns W + s · A B for one map, or for the map of each layer."""
        product = functools.partial(jnp.tensordot, axes=1, precision="highest")
        # [*inputs, r] · [r, *outputs], vmapped over the layer axis if there is one.
        product = jax.vmap(product) if linear.layers else product
        return kernel + self.config.scale * product(a, b)

    def adapt(self, apply_fn: Apply) -> Apply:
        """Wraps a model's `apply` to add the adapters found in its parameters."""
        rate, scale = self.config.dropout_rate, self.config.scale

        def add(method: Apply, args: Args, kwargs: Kwargs, context: InterceptorContext) -> object:
            module = context.module
            adapted = isinstance(module, Linear) and context.method_name == "__call__"
            if not adapted or not module.has_variable("params", A):
                return method(*args, **kwargs)
            # Add the product of the two factors to the output of the map.
            y, (x,) = method(*args, **kwargs), args
            a, b = (module.get_variable("params", name).astype(y.dtype) for name in (A, B))
            if module.has_variable("params", KEYS):
                keys = module.get_variable("params", KEYS)
                # In multiple choice, the choices of a question are several rows that share one key.
                if (rows := x.shape[0] // keys.shape[0]) > 1:
                    keys = jax.vmap(functools.partial(row_keys, num_rows=rows))(keys).reshape(-1)
                x = dropout(x, rate, keys, "lora")
            # [..., *inputs] · [*inputs, r] = [..., r]
            low = jnp.tensordot(x.astype(y.dtype), a, axes=module.num_input_axes)
            return y + jnp.tensordot(low * scale, b, axes=1)

        def apply(variables: PyTree, *args: object, **kwargs: PyTree) -> object:
            params, rng = variables["params"], kwargs.get("rng")
            # Pass the dropout keys to the maps as variables, like the factors A and B.
            if rate and rng is not None:
                params = join_params(params, self._keys_of_maps(params, rng))
            with nn.intercept_methods(add):
                return apply_fn({**variables, "params": params}, *args, **kwargs)

        return apply

    def _keys_of_maps(self, params: Params, rng: Key[Array, " B"]) -> Params:
        """Returns the dropout keys, `[L, B]` or `[B]`, of each adapter in the parameters."""
        present, flat = by_path(params), {}
        for m in self.maps:
            if f"{m.path}/{A}" not in present:
                continue
            keys = fold_in(rng, zlib.crc32(m.path.encode()))
            if m.layers:
                # Each layer of a stack needs separate keys: [B] to [L, B].
                keys = jax.vmap(fold_in, in_axes=(None, 0))(keys, jnp.arange(m.layers[0]))
            flat[f"{m.path}/{KEYS}"] = keys
        return nested(flat)


def make_lora(config: LoRAConfig, model: Model) -> LoRA:
    """Returns the adapters that a configuration describes for a model.

    Maps that are fully trained and maps of the head get no adapter.

    Args:
        config: Rank, scale and targets.
        model: The model, from `models.create` or `models.load`.

    Raises:
        UserError: A pattern matches nothing or is not a regular expression.
    """
    # The model's execution may have unstacked layers, but paths refer to stacked layers.
    stacked = create(model.config)
    maps, paths = linear_maps(stacked), list(by_path(parameter_shapes(stacked)))
    whole = frozenset(_matching(config.also_trained, paths, "lora.also_trained", "parameter"))
    body = [path for path in maps if not path.startswith(HEAD)]
    targets = _matching(config.targets, body, "lora.targets", "linear map")
    adapted = tuple(maps[path] for path in targets if f"{path}/kernel" not in whole)
    require(
        adapted,
        f"lora.targets {' '.join(config.targets)} are all in lora.also_trained: name another "
        "linear map",
    )
    return LoRA(config, adapted, whole)


def lora_of(config: LoRAConfig | None, model: Model) -> LoRA | None:
    """Returns the result of `make_lora`, or None if `config` is None."""
    return None if config is None else make_lora(config, model)


def is_adapter(path: str) -> bool:
    """Returns whether a parameter is a factor of an adapter."""
    return path.rpartition("/")[2] in (A, B)


def without_adapters(params: Params) -> Params:
    """Returns the parameters without the factors of adapters."""
    return nested(_without_adapters(by_path(params)))


def _without_adapters(flat: Params) -> Params:
    """Returns a flat dict of parameters without the factors of adapters."""
    return {path: x for path, x in flat.items() if not is_adapter(path)}


def _matching(patterns: Iterable[str], paths: Iterable[str], field: str, what: str) -> list[str]:
    """Returns, in order, the paths that have whole components matching a pattern."""
    paths, matches = list(paths), set[str]()
    for pattern in patterns:
        try:
            # `query` matches `layers/attention/query`, but not `attention/query_norm`.
            parts = re.compile(rf"(.+/)?({pattern})(/.+)?")
        except re.error as error:
            raise UserError(f"{field} {pattern!r} is not a regular expression ({error})") from None
        fitting = list(filter(parts.fullmatch, paths))
        if not fitting:
            names = sorted({part for path in paths for part in path.split("/")})
            # Suggest only a map that this model has; for example, a GPT has no gate.
            ours = PEFT_TARGETS.get(pattern, "")
            has_map = ours.rpartition("/")[2] in {*names, ".*"}
            remedy = f"here it is {ours!r}" if has_map else suggest(pattern, names)
            raise UserError(f"{field} {pattern!r} matches no {what}: {remedy}")
        matches.update(fitting)
    return list(filter(matches.__contains__, paths))


def join_params(first: Params, second: Params) -> Params:
    """Merges two parameter trees; the second tree takes precedence."""
    flat = {**by_path(first), **by_path(second)}
    return nested(flat)


def by_path(params: Params) -> Params:
    """Returns a flat dict of parameters by path, such as `layers/attention/query/kernel`."""
    return flatten_dict(params, sep="/")  # pyright: ignore[reportReturnType]


def nested(flat: Params) -> Params:
    """Returns the nested parameter tree for a flat dict of parameters by path."""
    return unflatten_dict(flat, sep="/")
