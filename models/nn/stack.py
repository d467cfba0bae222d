"""Prepares the inputs of a model (checks, positions, masks) and runs its stack of layers."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jax.extend.core import Primitive

from ...data.common.errors import UserError
from ...data.common.fields import require
from ..config import Execution, TransformerConfig
from .attention import AttentionContext, MultiHeadAttention
from .cache import Cache, LayerCache, LayerCaches
from .dropout import DROPOUT_MASK, RowKeys, dropout, fold_in
from .experts import RouterStatistics
from .fused_attention import LIMITS, AttentionCall, refusal
from .kernels import KERNEL_RESIDUALS
from .masks import AnyArray, AttentionMask, is_per_query, select_mask
from .positions import Positions, default_positions, flag_of_layer
from .typing import Array, Bool, Float, Int, Params

Config = TypeVar("Config", bound=TransformerConfig)
RematPolicy = Callable[..., bool]
policies = jax.checkpoint_policies

CROSS = 1
"""The number that is folded into the dropout keys of cross-attention, so that they differ from the
keys of self-attention.
"""


def _is_cudnn_attention(primitive: Primitive, *_: object, **__: object) -> bool:
    """Returns whether an operation is cuDNN's attention, whose residuals are not named."""
    return primitive.name.startswith("dot_product_attention_fwd")


# "dots" also saves dropout masks and the results of attention kernels, which contain products.
REMAT_POLICIES: dict[str, RematPolicy | None] = {
    "dots": policies.save_from_both_policies(
        policies.dots_with_no_batch_dims_saveable,
        policies.save_from_both_policies(
            policies.save_only_these_names(DROPOUT_MASK, KERNEL_RESIDUALS), _is_cudnn_attention
        ),
    ),
    "full": None,
}
"""The rematerialization policy for each value of `Execution.remat`."""


class PreparedInputs(NamedTuple):
    """The position ids and the attention mask of a call."""

    position_ids: Int[AnyArray, "#B #T"]
    mask: AttentionMask


def check_one_sequence_per_row(
    head: str,
    attention_mask: Int[AnyArray, "B S"] | Bool[AnyArray, "B T S"] | None,
    segment_ids: Int[AnyArray, "B T"] | None,
    cache: Cache | None,
) -> None:
    """Checks that a classifier gets neither a cache nor packed sequences.

    Raises:
      UserError: there is a cache, `segment_ids`, or a mask `[B, T, S]`.
    """
    per_token = is_per_query(attention_mask)
    require(
        cache is None and segment_ids is None and not per_token,
        f"head {head!r} reads one sequence per row: leave cache and segment_ids out, and give "
        "attention_mask [B, T]",
    )


def prepare_inputs(
    config: TransformerConfig,
    input_ids: Int[AnyArray, "B T"],
    attention_mask: Int[AnyArray, "B S"] | Bool[AnyArray, "B T S"] | None,
    *,
    position_ids: Int[AnyArray, "#B #T"] | None,
    segment_ids: Int[AnyArray, "B T"] | None,
    cache: Cache | None,
    causal: bool,
    skip_padding: bool = True,
    prefix: str = "",
) -> PreparedInputs:
    """Checks the inputs that all models share; returns the positions and the mask.

    Args:
      config: sizes of the model.
      input_ids: token ids.
      attention_mask: 1 for the tokens (or slots of the cache) that may be attended to.
      position_ids: position of each token. If None, default positions are computed.
      segment_ids: the document id of each token of a packed sequence.
      cache: keys and values of earlier calls.
      causal: whether a token attends only to itself and earlier tokens.
      skip_padding: whether default positions count only real tokens.
      prefix: prefix of the argument names in error messages, such as "decoder_".

    Raises:
      UserError: the table of positions has fewer rows than there are tokens, `attention_mask` does
        not cover the tokens (or the slots of the cache), a cache is combined with packed sequences,
        a mask `[B, T, S]` is passed without positions, or the windows of the cache are too small
        for the T beams of a mask `[B, T, S]`.
    """
    length = input_ids.shape[1]
    per_query = is_per_query(attention_mask)
    longest = config.longest_input
    # With a mask per query, the query axis contains beams, so `max_length` does not apply.
    problem = f"input of {length} tokens exceeds max_length {longest}: shorten it"
    require(longest is None or length <= longest or per_query, problem)
    problem = f"a cache cannot continue packed sequences: leave {prefix}segment_ids out"
    require(cache is None or segment_ids is None, problem)
    # The keys are the tokens of this call, or all slots of the cache.
    num_keys = length if cache is None else cache.length
    if attention_mask is not None and attention_mask.shape[-1] != num_keys:
        raise UserError(
            f"{prefix}attention_mask has {attention_mask.shape[-1]} columns for {num_keys} "
            f"{'tokens' if cache is None else 'slots of the cache'}: give one column for each"
        )
    if cache is not None and per_query:
        _check_rings(cache, length, prefix)
    # The tokens of this call follow the slots of the cache that have been written.
    start = jnp.zeros((), jnp.int32) if cache is None else cache.index
    if position_ids is None:
        # With a mask per query, the tokens may belong to several beams.
        require(
            not per_query or not skip_padding,
            f"{prefix}attention_mask [B, T, S] does not determine positions: "
            f"give {prefix}position_ids",
        )
        counted = attention_mask if skip_padding else None
        position_ids = default_positions(start, length, counted, segment_ids)
    mask = AttentionMask(length, num_keys, attention_mask, segment_ids, causal=causal, start=start)
    return PreparedInputs(position_ids, mask)


def _check_rings(cache: Cache, num_beams: int, prefix: str) -> None:
    """Raises UserError if the rings of a cache are too small for several beams."""
    for ring in cache.rings:
        assert ring.window is not None
        require(
            ring.num_slots >= ring.window * num_beams,
            f"{prefix}attention_mask [B, T, S] with T = {num_beams} needs {num_beams} windows "
            f"of {ring.window}, and a layer of the cache has {ring.num_slots} slots: give "
            f"init_cache num_beams={num_beams}, or spare={cache.length} to keep all slots",
        )


@struct.dataclass
class LayerInputs:
    """Inputs that differ between layers, for one layer or (with a leading axis L) for all."""

    index: int | Int[Array, "*L"]
    cache: LayerCache | None
    cross: LayerCache | None = None
    """Keys and values of the encoder's output, if an earlier call projected them."""


@struct.dataclass
class LayerContext:
    """Inputs that all layers of a stack share."""

    mask: AttentionMask
    windowed_mask: AttentionMask | None
    """The mask of the layers with an attention window, if there are such layers."""
    cache_index: Int[Array, ""] | int
    """The next cache slot to write."""
    rng: RowKeys | None
    output_attentions: bool = struct.field(pytree_node=False)
    encoder_hidden_states: Float[Array, "B S D"] | None = None
    cross_mask: AttentionMask | None = None
    """The encoder positions that each token of a decoder may attend to."""
    head_mask: Float[Array, "L N"] | None = None
    """The factor that multiplies the attention weights of each head of self-attention."""
    cross_head_mask: Float[Array, "L N"] | None = None
    """The factor that multiplies the attention weights of each head of cross-attention."""
    positions: Positions = dataclasses.field(default_factory=Positions)
    """The positions of the tokens, for self-attention."""
    real: Float[Array, "B T"] | None = None
    """1 for real tokens, 0 for padding; used by mixtures of experts. If None, all tokens are real.
    """
    windowed_layers: tuple[bool, ...] = struct.field(pytree_node=False, default=())
    """Whether each layer has an attention window."""
    norm_scales: Float[Array, "L D"] | None = None
    """Scales of a norm that only some layers have (ModernBERT)."""
    norm_biases: Float[Array, "L D"] | None = None
    """Biases of this norm. If None, it has no biases."""

    def is_windowed(self, layer: int | Array) -> bool | Bool[Array, ""]:
        """Returns whether a layer has an attention window; the layer's index may be traced."""
        flags = self.windowed_layers
        # If all layers agree, return a static value, so that only one mask is compiled.
        if self.windowed_mask is None or len(set(flags)) == 1:
            return self.windowed_mask is not None and flags[0]
        return flag_of_layer(flags, layer)

    def self_attention(self, inputs: LayerInputs) -> AttentionContext:
        """Returns the inputs of a layer's self-attention, which uses the `rng` of the layer."""
        layer = inputs.index
        windowed = self.is_windowed(layer)
        mask = self.mask
        if self.windowed_mask is not None:
            mask = select_mask(windowed, self.windowed_mask, mask)
        return AttentionContext(
            mask=mask,
            positions=self.positions.of_layer(layer, windowed),
            layer=layer,
            cache=inputs.cache,
            cache_index=self.cache_index,
            rng=fold_in(self.rng, layer),
            head_mask=_of_layer(self.head_mask, layer),
            output_attentions=self.output_attentions,
        )

    def cross_attention(self, inputs: LayerInputs) -> AttentionContext:
        """Returns the inputs of a decoder layer's cross-attention."""
        layer = inputs.index
        assert self.cross_mask is not None
        return AttentionContext(
            mask=self.cross_mask,
            layer=layer,
            # With a cache, the first call stores the projection of the source. Later calls read
            # this projection and need no cache.
            cache=inputs.cache if inputs.cross is None else None,
            source=self.encoder_hidden_states if inputs.cross is None else inputs.cross,
            rng=fold_in(fold_in(self.rng, layer), CROSS),
            head_mask=_of_layer(self.cross_head_mask, layer),
            output_attentions=self.output_attentions,
        )


def _of_layer(
    factors: Float[Array, "L N"] | None, layer: int | Int[Array, ""]
) -> Float[Array, " N"] | None:
    """Returns the mask factors of a layer's heads, or None without a head mask."""
    return None if factors is None else factors[layer]


def make_layer_context(
    config: TransformerConfig,
    execution: Execution,
    mask: AttentionMask,
    *,
    cache: Cache | None,
    rng: RowKeys | None,
    output_attentions: bool,
    window: int | None = None,
    windowed_layers: tuple[bool, ...] = (),
    encoder_hidden_states: Float[Array, "B S D"] | None = None,
    cross_mask: AttentionMask | None = None,
    head_mask: Float[AnyArray, "*L N"] | None = None,
    cross_head_mask: Float[AnyArray, "*L N"] | None = None,
    positions: Positions = Positions(),
    real: Float[Array, "B T"] | None = None,
) -> LayerContext:
    """Builds the inputs that all layers share, with the masks that the attention backend needs.

    Args:
      config: sizes of the model.
      execution: the options of execution, which select the attention kernel.
      mask: the keys that each token may attend to.
      cache: keys and values of earlier calls.
      rng: dropout keys.
      output_attentions: whether to return the attention weights.
      window: the attention window of the layers in `windowed_layers`, or None.
      windowed_layers: whether each layer has the window.
      encoder_hidden_states: the output of the encoder, for the layers of a decoder.
      cross_mask: the encoder positions that the decoder may attend to.
      positions: the positions of the tokens. A stack may also set them later.
      real: 1 for real tokens. If None, all tokens are real.
      head_mask: factor that multiplies the attention weights of each head, for all layers or per
        layer.
      cross_head_mask: factor that multiplies the weights of each cross-attention head.

    Raises:
      UserError: the shape of a head mask is neither `[N]` nor `[L, N]`.
    """
    # Layers with a window use the same mask, but with the window added.
    windowed = None
    if window is not None and any(windowed_layers):
        windowed = dataclasses.replace(mask, window=window)

    def prepared(mask: AttentionMask) -> AttentionMask:
        """Computes the array of a mask, unless the kernel of `execution` supports the call."""
        if execution.attention not in LIMITS:
            return mask.materialized()
        # Only these static properties decide whether the kernel supports the call.
        call = AttentionCall(
            num_queries=mask.num_queries,
            num_keys=mask.num_keys,
            key_dim=config.key_dim,
            head_dim=config.value_dim,
            dtype=execution.dtype,
            dropout_rate=0.0 if rng is None else config.attention_dropout_rate,
            cached=cache is not None,
            weights=output_attentions,
            is_per_query=mask.is_per_query,
            biased=config.scores_by_distance,
            capped=config.score_cap is not None,
            # Scanned layers choose between the two masks at run time, so both or neither must be
            # arrays.
            two_sided=windowed is not None and windowed.is_two_sided,
        )
        return mask if refusal(execution.attention, call) is None else mask.materialized()

    return LayerContext(
        mask=prepared(mask),
        windowed_mask=None if windowed is None else prepared(windowed),
        windowed_layers=windowed_layers,
        cache_index=mask.start,
        rng=rng,
        output_attentions=output_attentions,
        encoder_hidden_states=encoder_hidden_states,
        cross_mask=None if cross_mask is None else prepared(cross_mask),
        head_mask=_of_all_layers(config, head_mask, "head_mask"),
        cross_head_mask=_of_all_layers(config, cross_head_mask, "cross_attn_head_mask"),
        positions=positions,
        real=real,
    )


def _of_all_layers(
    config: TransformerConfig, head_mask: Float[AnyArray, "*L N"] | None, name: str
) -> Float[Array, "L N"] | None:
    """Returns one factor for each head of each layer.

    Raises UserError if the shape is wrong.
    """
    if head_mask is None:
        return None
    # Each head of each layer has a factor; a mask [N] applies to all layers.
    shape = len(config.layer_order), config.num_heads
    require(
        head_mask.shape in (shape, shape[1:]),
        f"{name} has the shape {list(head_mask.shape)}: give one factor for each head, "
        f"{list(shape[1:])} or, for each layer, {list(shape)}",
    )
    return jnp.broadcast_to(jnp.asarray(head_mask, jnp.float32), shape)


@struct.dataclass
class LayerOutputs:
    """The outputs of a layer in addition to the residual stream.

    In the outputs of a stack, each field has a leading axis L or, with separate layers, is a tuple
    of L items.
    """

    cache: LayerCaches | None
    attentions: Array | tuple[Array, ...] | None
    """The attention weights `[B, N, T, S]`, if they were requested."""
    cross: LayerCaches | None = None
    """Keys and values of the encoder's output, if this call projected them for a cache."""
    cross_attentions: Array | tuple[Array, ...] | None = None
    router: RouterStatistics | tuple[RouterStatistics, ...] | None = None
    """The statistics of the router, in a mixture of experts."""


class Layer(nn.Module, Generic[Config]):
    """Base class of all layers. Each family's layer follows the order of its paper.

    Distributed training finds layers by this class, and keeps the residual stream sharded over the
    sequences of a batch before and after each layer.

    Attributes:
      config: sizes of the stack.
      execution: how the layer is run.
    """

    config: Config
    execution: Execution

    attention: ClassVar[type[MultiHeadAttention]] = MultiHeadAttention
    """The class of the layer's attention. A family whose attention has additional score terms sets
    a different class."""
    drops_sum: ClassVar[bool] = False
    """Whether a parallel layer applies dropout to the sum of both outputs (Falcon)."""

    def __call__(
        self, x: Float[Array, "B T D"], inputs: LayerInputs, context: LayerContext
    ) -> tuple[Float[Array, "B T D"], LayerOutputs]:
        """Returns the residual stream after the layer, and the layer's additional outputs."""
        raise NotImplementedError

    def add(
        self, x: Float[Array, "B T D"], y: Float[Array, "B T D"], name: str, rng: RowKeys | None
    ) -> Float[Array, "B T D"]:
        """Returns the sum of the residual stream and the output of a sublayer after dropout.

        Args:
          x: the residual stream.
          y: the output of the sublayer.
          name: the name of the sublayer, such as "attention".
          rng: the dropout keys of the layer.
        """
        return x + dropout(y, self.config.residual_dropout_rate(name), rng, name)

    def add_parallel(
        self,
        x: Float[Array, "B T D"],
        attended: Float[Array, "B T D"],
        fed: Float[Array, "B T D"],
        rng: RowKeys | None,
    ) -> Float[Array, "B T D"]:
        """Returns the residual stream plus the outputs of both sublayers, which read this stream.

        Args:
          x: the residual stream.
          attended: the output of attention.
          fed: the output of the feed-forward network.
          rng: the dropout keys of the layer.
        """
        if self.drops_sum:
            return self.add(x, attended + fed, "feed_forward", rng)
        return self.add(self.add(x, attended, "attention", rng), fed, "feed_forward", rng)


ReadLayer = Callable[[Params], Params]
"""A function from the stored variables of a layer, `{"params": …}`, to the variables that the layer
uses.
"""
_read_layer: ContextVar[ReadLayer | None] = ContextVar("read_layer", default=None)


@contextlib.contextmanager
def layers_read_by(function: ReadLayer) -> Iterator[None]:
    """Applies a function to the parameters of every layer traced in this context.

    The function is part of the layer, so rematerialization recomputes it in the backward pass.
    Training uses this function to all-gather the parameters of a layer.
    """
    token = _read_layer.set(function)
    try:
        yield
    finally:
        _read_layer.reset(token)


def run_layers(
    layer: type[Layer[Config]],
    config: Config,
    execution: Execution,
    x: Float[Array, "B T D"],
    *,
    cache: Cache | None,
    context: LayerContext,
    order: Sequence[int] | None = None,
) -> tuple[Float[Array, "B T D"], LayerOutputs]:
    """Runs the L layers of a stack. Call this function in the compact method of a module.

    The parameters are stored under `layers`, where each array has a leading axis L, or under
    `layers_0`, `layers_1` … if `execution.layers` is "separate". Layers that share their parameters
    are stored once.

    Args:
      layer: the class of one layer.
      config: the sizes of the model; `num_layers` is L.
      execution: whether layers are scanned, unrolled or separate, and which activations are
        rematerialized.
      x: the residual stream.
      cache: keys and values of earlier calls.
      context: the inputs that all layers share.
      order: for each layer that runs, the index of its stored parameters. If None, each layer has
        its own parameters.

    Returns:
      The residual stream, and the outputs of all layers.
    """
    order = range(config.num_layers) if order is None else order
    # A model without layers (a bag of words) returns its embeddings.
    if not order:
        return x, LayerOutputs(None, None)
    # Include the all-gather of the parameters in the function that is rematerialized.
    read = _read_layer.get()
    if read is not None:
        layer = nn.map_variables(layer, "params", read)
    if execution.remat != "none":
        policy = REMAT_POLICIES[execution.remat]
        # CSE can undo remat in unrolled layers, but not inside a scan: prevent CSE unless layers
        # are scanned.
        layer = nn.remat(layer, policy=policy, prevent_cse=execution.layers != "scan")
    caches, cross = (None, None) if cache is None else (cache.layers, cache.cross)
    # Separate layers run in a Python loop, and no array has a leading axis L.
    if execution.layers == "separate":
        outputs: list[LayerOutputs] = []
        stored = [layer(config, execution, name=f"layers_{i}") for i in range(max(order) + 1)]
        for i, row in enumerate(order):
            inputs = LayerInputs(
                i,
                caches[i] if isinstance(caches, tuple) else None,
                cross[i] if isinstance(cross, tuple) else None,
            )
            x, output = stored[row](x, inputs, context)
            outputs.append(output)
        # Combine L records into one: each field becomes a tuple of L arrays, or None.
        return x, jax.tree.map(
            lambda *values: None if values[0] is None else values,
            *outputs,
            is_leaf=lambda value: value is None or isinstance(value, LayerCache | RouterStatistics),
        )
    assert not isinstance(caches, tuple)
    assert not isinstance(cross, tuple)
    # The scan slices these stacked inputs, and passes the same context to every layer.
    inputs = LayerInputs(jnp.arange(len(order)), caches, cross)
    options = {
        "in_axes": (0, nn.broadcast),  # (the type hint of nn.scan is too narrow)
        "length": len(order),
        "unroll": len(order) if execution.layers == "unroll" else 1,
        "check_constancy_invariants": False,  # the check would trace the layer twice
    }
    stack = layer(config, execution, name="layers")
    # Shared layers: every step receives all stored parameters, and selects the parameters of one
    # layer by its index.
    if list(order) != list(range(len(order))):
        step = _step_of_shared(order)
        shared = nn.scan(step, variable_broadcast="params", split_rngs={"params": False}, **options)
        return shared(stack, x, (jnp.asarray(order), inputs), context)
    # Layers with separate parameters: the scan slices the stacked parameters, one layer per step.
    options |= {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
    return nn.scan(_call, **options)(stack, x, inputs, context)


def _call(layer: Layer[Config], *args: Any) -> tuple[Float[Array, "B T D"], LayerOutputs]:
    return layer(*args)


def _step_of_shared(order: Sequence[int]) -> Callable[..., Any]:
    """Returns a function that runs one layer of a stack of shared layers."""
    alike = len(set(order)) == 1

    def step(
        stack: Layer[Config],
        x: Float[Array, "B T D"],
        inputs: tuple[Int[Array, ""], LayerInputs],
        context: LayerContext,
    ) -> tuple[Float[Array, "B T D"], LayerOutputs]:
        # If the index is static, the parameters are the same in every step, and the backward pass
        # stores no copies of them.
        row = order[0] if alike else inputs[0]
        read = nn.map_variables(
            _call, "params", lambda params: jax.tree.map(lambda p: p[row], params)
        )
        return read(stack, x, inputs[1], context)

    return step
