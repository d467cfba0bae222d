"""BART and mBART: a Transformer pretrained to reconstruct corrupted text.

- BART: Lewis et al. 2020, "BART: denoising sequence-to-sequence pre-training for natural language
  generation, translation, and comprehension", section 2.1 for the Transformer with GELU; section 3
  and figure 3 for the heads, which read the decoder's output.
- mBART: Liu et al. 2020, "Multilingual denoising pre-training for neural machine translation",
  section 2.2: a BART with norms before the sublayers, and a final norm in the encoder and in the
  decoder.
- mBART-50: Tang et al. 2020, "Multilingual translation with extensible multilingual pretraining
  and finetuning": an mBART with 25 more languages.

Details that the papers leave open follow the authors' code (fairseq): positions are learned, with
two unused rows before the row of the first position; the sums of embeddings and positions are
normalized; the projections of attention have biases. The layers come from `transformer.py`.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from ...data.common.errors import UserError
from ...data.common.fields import Positive, Rate, require, require_default
from ..config import Activation, Count, PositionKind, Settings
from ..heads.modules import HeadInputs
from ..heads.outputs import EncoderOutput, ModelOutput, Seq2SeqLMOutput
from ..heads.specs import HEADS, HeadSpec, check_head
from ..nn.dropout import RowKeys, dropout
from ..nn.layers import Linear
from ..nn.masks import AnyArray
from ..nn.parameter_axes import EMBEDDING_AXES, FINAL_NORM_AXES, HEAD_AXES, LAYER_AXES
from ..nn.typing import Array, Int
from ..registry import Family, Preset
from .seq2seq_lm import one_token_each
from .transformer import EncoderDecoder, EncoderDecoderConfig

BART_HEADS = tuple(name for name, spec in reversed(HEADS.items()) if spec.reads_decoder)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BartConfig(EncoderDecoderConfig):
    """The configuration of a BART, or of an mBART with `norm_position="pre"`.

    Raises:
      UserError: a size or a rate is out of range, or the head needs labels and has none.
    """

    embedding_norm: ClassVar[bool] = True
    position_offset: ClassVar[int] = 2

    activation: Activation = "gelu"
    """Non-linearity of the feed-forward layers."""
    init_std: Positive | None = 0.02
    """Standard deviation of initial kernels and embeddings. If None, each kernel is initialized
    uniformly (Glorot and Bengio 2010, equation 16), and embeddings have the standard deviation 1 /
    √D."""
    attention_bias: bool = True  # pyright: ignore[reportIncompatibleMethodOverride]
    """Whether the projections of attention have biases."""
    positions: PositionKind = "learned"
    """The kind of positions; a BART supports only learned positions."""
    scale_embedding: bool = False
    """Whether embeddings are multiplied by √D before positions are added (mBART)."""
    head: str = dataclasses.field(  # pyright: ignore[reportIncompatibleVariableOverride]
        default="seq2seq_lm", metadata={"choices": BART_HEADS}
    )
    """The output: the next tokens of a target (seq2seq_lm), labels of the source
    (sequence_classification), or an answer in the source (question_answering). For the last two,
    the decoder also reads the source."""
    labels: tuple[str, ...] = ()  # pyright: ignore[reportIncompatibleVariableOverride]
    """Names of the labels of a classification head, in order of their ids; for question answering,
    the name of the label that means "no answer", if questions may have no answer."""
    classifier_dropout: Rate = 0.0
    """Dropout rate before both linear maps of the sequence-classification head."""
    start_id: Count = 2
    """The id of the decoder's first token if the source also serves as the target."""
    end_id: Count = 2
    """The id of the token that ends a source. Sequence classification reads the hidden state of the
    last end token."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_head(self)
        require_default(self, ["positions"], "must be learned in a BART")
        if self.head == "seq2seq_lm":
            return
        require(
            self.tie_output and not self.output_bias,
            f"head {self.head!r} does not predict tokens: leave output_bias and tie_output out",
        )
        # Classification heads use these tokens to derive a target and to find the end of the
        # source.
        for name in ("start_id", "end_id"):
            require(
                getattr(self, name) < self.vocab_size,
                f"{name} {getattr(self, name)} is not within the vocabulary of "
                f"{self.vocab_size}: give the id of one of its tokens",
            )

    def with_head(self, head: str, labels: tuple[str, ...]) -> "BartConfig":
        """Returns the configuration of the same body with a different head.

        A head that does not generate tokens has no output projection, so the options of the output
        projection are reset.
        """
        # Without an output projection, the model has no matrix to tie to the token embedding.
        if head != "seq2seq_lm":
            return dataclasses.replace(
                self, head=head, labels=labels, tie_output=True, output_bias=False
            )
        return dataclasses.replace(self, head=head, labels=labels)

    @property
    def head_spec(self) -> HeadSpec:
        """The properties of the model's head."""
        return HEADS[self.head]

    @property
    def classifier_dropout_rate(self) -> float:
        """Dropout rate of the inputs of classifiers."""
        return self.classifier_dropout if self.head_spec.has_dropout else 0.0

    @property
    def embedding_init_std(self) -> float:
        """Standard deviation of initial embeddings of tokens and positions."""
        return super().embedding_init_std if self.init_std is None else self.init_std


class Bart(EncoderDecoder):
    """A BART with its head.

    Attributes:
      config: sizes and options of the model.
      execution: how the model is run.
    """

    config: BartConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    skip_padding = False  # positions count all tokens of a sequence, including padding

    def setup(self) -> None:
        """Declares the embedding tables, the two stacks of layers, and the head."""
        super().setup()
        c, e = self.config, self.execution
        spec = c.head_spec
        if spec.needs_pooler:
            self.pooler = Linear((c.d_model,), c.init_std, execution=e)
        if spec.module is not None:
            self.head = spec.module(c, e)  # pyright: ignore[reportCallIssue]

    def default_target(self, ids: Int[AnyArray, "B S"] | None) -> Int[Array, "B S"]:
        """Returns a start token followed by the source without its last token.

        The head seq2seq_lm has no default target.
        """
        if ids is None or self.config.head == "seq2seq_lm":
            return super().default_target(ids)
        # [B, S]: drop the last token, which has no successor to predict.
        return jnp.pad(
            jnp.asarray(ids)[:, :-1], ((0, 0), (1, 0)), constant_values=self.config.start_id
        )

    def apply_head(
        self,
        output: Seq2SeqLMOutput,
        input_ids: Int[AnyArray, "B S"] | None,
        rng: RowKeys | None,
    ) -> Seq2SeqLMOutput | ModelOutput:
        """Returns the output of the head.

        Sequence classification reads the decoder's hidden state at the last end token.
        """
        c, x = self.config, output.last_hidden_state
        if c.head == "seq2seq_lm":
            return output
        # The classifier reads the decoder's hidden state at the position where the source ends.
        pooled = None
        if c.head_spec.needs_pooler:
            if input_ids is None:
                raise UserError(f"head {c.head!r} looks for the end of a source: give input_ids")
            # If a sequence has no end token, the classifier reads its first position.
            columns = jnp.where(input_ids == c.end_id, jnp.arange(input_ids.shape[1]), 0)
            last = jnp.max(columns, axis=1)[:, None, None]  # [B, 1, 1]
            ended = jnp.take_along_axis(x, last, axis=1)[:, 0]  # [B, D]
            ended = dropout(ended, c.classifier_dropout_rate, rng, "pooler")
            pooled = jnp.tanh(self.pooler(ended))
        # The head reads the decoder's hidden states in place of an encoder's.
        body = EncoderOutput(x, pooled, output.decoder_attentions)
        return self.head(HeadInputs(body, self.token_embedding.embedding, None, rng))


def _preset(
    paper: str, published: str, sizes: tuple[int, int], fields: Settings, *, note: str = ""
) -> Preset:
    """Builds a preset from the number of layers (of encoder and decoder alike) and the width."""
    # Every published BART has heads of size 64.
    num_layers, d_model = sizes
    config = BartConfig(
        max_length=1024,
        num_layers=num_layers,
        d_model=d_model,
        num_heads=d_model // 64,
        **fields,
    )
    return Preset(config, paper, published, note)


_BART: Settings = {"vocab_size": 50_265}
_MBART: Settings = {"vocab_size": 250_027, "norm_position": "pre", "scale_embedding": True}

PRESETS: dict[str, Preset] = {
    "bart-base": _preset("Lewis et al. 2020", "140M", (6, 768), _BART),
    "bart-large": _preset("Lewis et al. 2020", "400M", (12, 1024), _BART),
    "mbart-large-cc25": _preset("Liu et al. 2020", "610M", (12, 1024), _MBART),
    "mbart-large-50": _preset(
        "Tang et al. 2020",
        "610M",
        (12, 1024),
        _MBART | {"vocab_size": 250_054},
        note="the printed count is for 25 languages, whose vocabulary has 27 tokens less",
    ),
}

NUM_PARAMETERS = {
    "bart-base": 139_420_416,
    "bart-large": 406_291_456,
    "mbart-large-cc25": 610_851_840,
    "mbart-large-50": 610_879_488,
}

FAMILY = Family(
    config=BartConfig,
    module=Bart,
    presets=PRESETS,
    num_parameters=NUM_PARAMETERS,
    smallest_inputs=one_token_each,
    parameter_axes={
        **EMBEDDING_AXES,
        **LAYER_AXES,
        **FINAL_NORM_AXES,
        **HEAD_AXES,
        r"(encoder|decoder)/embedding_norm/(scale|bias)": (None,),
        r"pooler/kernel": ("model", None),
        r"pooler/bias": (None,),
    },
    hf_module="encoder_decoders.bart",
)
