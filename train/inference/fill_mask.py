"""Fill-mask: the words that a masked language model finds most probable in a gap."""

import dataclasses

import jax
import numpy as np

from ...data.errors import UserError
from ...data.tokenizers.base import Tokenizer
from ...models.model import Model
from ...models.nn.heads import HEADS
from ...models.nn.typing import Params
from ..runs.finite import check_outputs
from .bucketing import pad_batch
from .text_model import TextModel


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A token for a gap."""

    token: str
    id: int
    probability: float
    text: str
    """The whole text with the gap filled, as the tokenizer spells it."""


class MaskFiller(TextModel):
    """A masked language model and its tokenizer.

    Raises:
      UserError: the model has another head than "pretraining" or "masked_lm", or the tokenizer
        has no mask token.
    """

    heads = tuple(name for name, head in HEADS.items() if head.predicts_masked)
    refusal = "fills no masks"
    remedy = f"give a run that was pretrained (head {' or '.join(heads)})"

    def __init__(self, model: Model, params: Params, tokenizer: Tokenizer) -> None:
        super().__init__(model, params, tokenizer)
        if tokenizer.special_ids.mask is None:
            raise UserError(f"this {tokenizer.kind} tokenizer has no mask token")
        self._probabilities = jax.jit(self._mask_probabilities)

    def __call__(self, text: str, *, top_k: int = 5) -> list[list[Candidate]]:
        """Returns the `top_k` most probable tokens for each mask of a text, the best first.

        Raises:
          UserError: the text has no mask or is too long, `top_k` is out of range, or a probability
            is NaN.
        """
        tokenizer, config = self._tokenizer, self._model.config
        mask = tokenizer.special_ids.mask
        if not 1 <= top_k <= tokenizer.vocab_size:
            raise UserError(f"top_k {top_k} must be from 1 to {tokenizer.vocab_size}")
        ids = tokenizer.encode_with_mask(text)
        gaps = [position for position, id in enumerate(ids) if id == mask]
        if not gaps:
            raise UserError(f"the text {text!r} has no [MASK]: write it where a word is missing")
        if len(ids) > config.max_length:
            raise UserError(
                f"the text has {len(ids)} tokens, the model reads {config.max_length}: shorten it"
            )
        padded = pad_batch([ids], 1, config.max_length)
        probabilities = np.asarray(self._probabilities(self._params, *padded))  # [T, V]
        check_outputs({"probabilities": probabilities[: len(ids)]})
        found = []
        for gap in gaps:
            # The vocabulary of a model may have rows that are no token.
            best = np.argsort(-probabilities[gap, : tokenizer.vocab_size])[:top_k]
            found.append(
                [
                    Candidate(
                        tokenizer.token(id),
                        id,
                        float(probabilities[gap, id]),
                        tokenizer.decode([*ids[:gap], id, *ids[gap + 1 :]]),
                    )
                    for id in best.tolist()
                ]
            )
        return found

    def _mask_probabilities(
        self, params: Params, ids: jax.Array, attention_mask: jax.Array
    ) -> jax.Array:
        """Returns the probabilities of every token at each position of the one row, `[T, V]`."""
        outputs = self._model.apply(
            {"params": params}, input_ids=ids, attention_mask=attention_mask
        )
        return jax.nn.softmax(outputs.projection.logits()[0])
