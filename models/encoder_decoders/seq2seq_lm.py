"""The forward pass that all encoder-decoders share, from source and target tokens to logits."""

import dataclasses
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from ...data.common.errors import UserError
from ...data.common.fields import require
from ..config import Execution, TransformerConfig
from ..heads.outputs import ModelOutput, Projection, Seq2SeqLMOutput
from ..nn.cache import Cache
from ..nn.dropout import RowKeys, fold_in
from ..nn.masks import AnyArray, AttentionMask, Size, is_per_query
from ..nn.stack import (
    Layer,
    LayerContext,
    LayerOutputs,
    make_layer_context,
    prepare_inputs,
)
from ..nn.typing import Array, Bool, Float, Int

Config = TypeVar("Config", bound=TransformerConfig)


class Stack(nn.Module, Generic[Config]):
    """The encoder or the decoder: positions, L layers, and a final norm if the family has one.

    Attributes:
      config: sizes of the encoder or the decoder.
      execution: how the stack is run.
      layer: the class of the layers.
      causal: whether a token attends only to itself and earlier tokens.
    """

    config: Config
    execution: Execution
    layer: type[Layer[Config]]
    causal: bool

    def __call__(
        self,
        x: Float[Array, "B T D"],
        position_ids: Int[AnyArray, "#B #T"],
        cache: Cache | None,
        context: LayerContext,
    ) -> tuple[Float[Array, "B T D"], Cache | None, LayerOutputs]:
        """Maps embeddings to the output of the last layer, and adds the tokens to the cache."""
        raise NotImplementedError


class Seq2SeqLM(nn.Module, Generic[Config]):
    """A model that predicts the next token of a target, given a source.

    A family's module declares its embedding tables, the encoder and the decoder in `setup`, and
    defines `embed_source`, `embed_target` and `project`. A family with other heads also defines
    `default_target` and `apply_head`.

    Attributes:
      config: sizes and options of the model.
      execution: how the model is run.
    """

    config: Config
    execution: Execution = Execution()

    skip_padding: ClassVar[bool] = True
    """Whether default positions count only real tokens. If False, positions also count padding."""

    # `setup` sets `encoder` and `decoder`. Flax would treat a declaration here as an argument
    if TYPE_CHECKING:
        encoder: Stack[Config] = dataclasses.field(init=False)
        decoder: Stack[Config] = dataclasses.field(init=False)

    def __call__(
        self,
        input_ids: Int[AnyArray, "B S"] | None = None,
        attention_mask: Int[AnyArray, "B columns"] | None = None,
        *,
        decoder_input_ids: Int[AnyArray, "B T"] | None = None,
        decoder_attention_mask: Int[AnyArray, "B slots"]
        | Bool[AnyArray, "B T slots"]
        | None = None,
        segment_ids: Int[AnyArray, "B S"] | None = None,
        decoder_segment_ids: Int[AnyArray, "B T"] | None = None,
        position_ids: Int[AnyArray, "#B S"] | None = None,
        decoder_position_ids: Int[AnyArray, "#B #T"] | None = None,
        encoder_outputs: Float[AnyArray, "B S D"] | None = None,
        cache: Cache | None = None,
        rng: RowKeys | None = None,
        output_attentions: bool = False,
        head_mask: Float[AnyArray, "*L N"] | None = None,
        decoder_head_mask: Float[AnyArray, "*L N"] | None = None,
        cross_attn_head_mask: Float[AnyArray, "*L N"] | None = None,
    ) -> Seq2SeqLMOutput | ModelOutput:
        """Computes the logits of the next token at each target position, or the head's output.

        Args:
          input_ids: tokens of the sources. Ignored if the call has `encoder_outputs`, or a cache
            with the keys and values of the sources.
          attention_mask: 1 for the tokens of the source that may be attended to.
          decoder_input_ids: tokens of the targets, shifted right so that a start token comes first.
            Required unless the head derives the targets from the sources.
          decoder_attention_mask: 1 for the tokens of the target that later tokens may attend to.
            With a cache, the mask has one entry per slot. A mask `[B, T, slots]` specifies for each
            token all tokens that it may attend to, including itself.
          segment_ids: for each token of a packed sequence, the id of its sentence; 0 for padding.
          decoder_segment_ids: for each target token, the id of its sentence. A target attends only
            to the source with the same id.
          position_ids: position of each token. Defaults to the index of the token among the real
            tokens of its sequence, or of its sentence in a packed sequence.
          decoder_position_ids: position of each token of the targets.
          encoder_outputs: output of the encoder in an earlier call.
          cache: keys and values of earlier calls; `decoder_input_ids` are the tokens that follow.
            Beyond the last slot of the cache, all logits are NaN.
          rng: one random key for each sequence (`models.row_keys`). If None, dropout is off.
          output_attentions: whether to return the attention weights.
          head_mask: factor that multiplies the attention weights of each encoder head, `[N]`, or
            `[L, N]` with one row per layer. A factor of 0 disables a head.
          decoder_head_mask: the same factor for each head of the decoder's self-attention.
          cross_attn_head_mask: the same factor for each head of the decoder's cross-attention.

        Raises:
          UserError: a sequence is longer than a position table (`max_length`), a mask has the wrong
            length, only the sources or only the targets are packed, or the sources or targets are
            missing.
        """
        if decoder_input_ids is None:
            decoder_input_ids = self.default_target(input_ids)
        problem = "only one side is packed: give both segment_ids or neither"
        require((segment_ids is None) == (decoder_segment_ids is None), problem)
        # Encode the source, unless the caller or the cache has the result of an earlier call.
        encoded, attentions = None, None
        if encoder_outputs is not None:
            encoded = jnp.asarray(encoder_outputs)
        elif cache is None or cache.cross is None:
            encoded, attentions = self._encode(
                input_ids,
                attention_mask,
                segment_ids=segment_ids,
                position_ids=position_ids,
                rng=rng,
                output_attentions=output_attentions,
                head_mask=head_mask,
            )
        # Compute the mask and the positions of the decoder.
        cross_mask = AttentionMask(
            decoder_input_ids.shape[1],
            _source_length(attention_mask, encoded, cache),
            attention_mask,
            segment_ids,
            decoder_segment_ids,
        )
        # A mask [B, T, slots] specifies all tokens that each token attends to, so no causal mask is
        # added.
        per_query = is_per_query(decoder_attention_mask)
        positions, mask = prepare_inputs(
            self.config,
            decoder_input_ids,
            decoder_attention_mask,
            position_ids=decoder_position_ids,
            segment_ids=decoder_segment_ids,
            cache=cache,
            causal=not per_query,
            skip_padding=self.skip_padding,
            prefix="decoder_",
        )
        # The decoder and the encoder have different dropout keys (`fold_in` 0 and 1).
        context = make_layer_context(
            self.config.decoder,
            self.execution,
            mask,
            cache=cache,
            rng=fold_in(rng, 1),
            output_attentions=output_attentions,
            encoder_hidden_states=encoded,
            cross_mask=cross_mask,
            head_mask=decoder_head_mask,
            cross_head_mask=cross_attn_head_mask,
        )
        # Run the decoder and the head. The decoder maps [B, T, D] to [B, T, D]; `projection`
        # computes the product with the vocabulary matrix on access.
        x = self.embed_target(decoder_input_ids)
        x, cache, outputs = self.decoder(x, positions, cache, context)
        output = Seq2SeqLMOutput(
            last_hidden_state=x,
            projection=self.project(x),
            encoder_last_hidden_state=encoded,
            cache=cache,
            encoder_attentions=attentions,
            decoder_attentions=outputs.attentions,
            cross_attentions=outputs.cross_attentions,
        )
        return self.apply_head(output, input_ids, rng)

    def _encode(
        self,
        input_ids: Int[AnyArray, "B S"] | None,
        attention_mask: Int[AnyArray, "B columns"] | None,
        *,
        segment_ids: Int[AnyArray, "B S"] | None,
        position_ids: Int[AnyArray, "#B S"] | None,
        rng: RowKeys | None,
        output_attentions: bool,
        head_mask: Float[AnyArray, "*L N"] | None,
    ) -> tuple[Float[Array, "B S D"], Array | tuple[Array, ...] | None]:
        """Returns the encoder's output for the sources, and its attention weights."""
        if input_ids is None:
            raise UserError(
                "the source is missing: give input_ids, encoder_outputs or a used cache"
            )
        position_ids, mask = prepare_inputs(
            self.config,
            input_ids,
            attention_mask,
            position_ids=position_ids,
            segment_ids=segment_ids,
            cache=None,
            causal=self.encoder.causal,
            skip_padding=self.skip_padding,
        )
        context = make_layer_context(
            self.encoder.config,
            self.execution,
            mask,
            cache=None,
            rng=fold_in(rng, 0),
            output_attentions=output_attentions,
            head_mask=head_mask,
        )
        # Map tokens [B, S] to hidden states [B, S, D], without a cache, because a source is read
        # only once.
        x, _, outputs = self.encoder(self.embed_source(input_ids), position_ids, None, context)
        return x, outputs.attentions

    def embed_source(self, ids: Int[AnyArray, "B S"]) -> Float[Array, "B S D"]:
        """Returns the embeddings of source tokens, the encoder's input."""
        raise NotImplementedError

    def embed_target(self, ids: Int[AnyArray, "B T"]) -> Float[Array, "B T D"]:
        """Returns the embeddings of target tokens, the decoder's input."""
        raise NotImplementedError

    def project(self, x: Float[Array, "B T D"]) -> Projection:
        """Returns the decoder's output and the vocabulary matrix, but does not multiply them."""
        raise NotImplementedError

    def default_target(self, ids: Int[AnyArray, "B S"] | None) -> Int[Array, "B S"]:
        """Returns the default input of the decoder, for heads that derive it from the source.

        Raises:
          UserError: the head needs `decoder_input_ids`.
        """
        del ids
        raise UserError("the target is missing: give decoder_input_ids, a start token first")

    def apply_head(
        self,
        output: Seq2SeqLMOutput,
        input_ids: Int[AnyArray, "B S"] | None,
        rng: RowKeys | None,
    ) -> Seq2SeqLMOutput | ModelOutput:
        """Returns the output of the head; by default the projection to the vocabulary."""
        del input_ids, rng
        return output


def _source_length(
    mask: Int[AnyArray, "B columns"] | None,
    encoder_hidden_states: Array | None,
    cache: Cache | None,
) -> Size:
    """Returns the number of encoder positions; raises UserError if the mask has another length."""
    # A later call with a cache has only the projected keys and values of the source.
    if encoder_hidden_states is not None:
        length = encoder_hidden_states.shape[1]
    else:
        assert cache is not None
        length = cache.source_length
    if mask is not None and mask.shape[1] != length:
        raise UserError(
            f"attention_mask has {mask.shape[1]} columns for {length} encoded tokens: give one "
            "column for each token"
        )
    return length


def one_token_each(config: TransformerConfig) -> dict[str, np.ndarray]:
    """Returns the smallest inputs of an encoder-decoder: one source token and one target token."""
    del config
    return {name: np.zeros((1, 1), np.int32) for name in ("input_ids", "decoder_input_ids")}
