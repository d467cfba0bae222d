"""Fill-mask: the words that a masked language model expects in a gap."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ...data.errors import UserError
from ...data.tokenizers.base import Tokenizer
from ...models.bert import WITH_MASKED_WORDS
from ...models.load import load
from ..runs.load_run import open_run
from .bucketing import padded


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A token for a gap."""

    token: str
    id: int
    probability: float
    text: str
    """The whole text with the gap filled, as the tokenizer spells it."""


class MaskFiller:
    """A masked language model and its tokenizer."""

    def __init__(self, model: Any, params: Any, tokenizer: Tokenizer) -> None:
        """Takes a model whose head is "pretraining" or "masked_lm".

        Raises:
          UserError: it has another head, or the tokenizer no mask.
        """
        head = getattr(model.config, "head", None)
        if head not in WITH_MASKED_WORDS:
            raise UserError(
                f"a model with the head {head} fills no masks: give a run that was pretrained "
                f"(head {' or '.join(WITH_MASKED_WORDS)})"
            )
        if tokenizer.special_ids.mask is None:
            raise UserError(f"this {tokenizer.kind} tokenizer has no mask token")
        self._model, self._params, self._tokenizer = model, params, tokenizer
        self._scores = jax.jit(self._mask_scores)

    @classmethod
    def of_run(cls, folder: str | Path, *, step: int | None = None) -> "MaskFiller":
        """The model of a run folder.

        Raises:
          FileNotFoundError: it is not a run folder, or has no such checkpoint.
        """
        _, tokenizer = open_run(folder)
        return cls(*load(folder, step=step), tokenizer)

    def __call__(self, text: str, *, top_k: int = 5) -> list[list[Candidate]]:
        """The `top_k` most probable tokens for each mask of a text, best first.

        Raises:
          UserError: the text has no mask or is too long, or `top_k` is out of range.
        """
        tokenizer, config = self._tokenizer, self._model.config
        mask = tokenizer.special_ids.mask
        if not 1 <= top_k <= tokenizer.vocab_size:
            raise UserError(f"top_k {top_k} must be from 1 to {tokenizer.vocab_size}")
        ids = tokenizer.encode_with_mask(text)
        gaps = [place for place, id in enumerate(ids) if id == mask]
        if not gaps:
            raise UserError(f"the text {text!r} has no [MASK]: write it where a word is missing")
        if len(ids) > config.max_length:
            raise UserError(
                f"the text has {len(ids)} tokens, the model reads {config.max_length}: shorten it"
            )
        probabilities = np.asarray(self._scores(self._params, *padded([ids], 1, config.max_length)))
        return [
            [self._candidate(ids, gap, int(id), probabilities[gap, id]) for id in best]
            for gap in gaps
            for best in [np.argsort(-probabilities[gap, : tokenizer.vocab_size])[:top_k]]
        ]

    def _mask_scores(self, params: Any, ids: jax.Array, attention_mask: jax.Array) -> jax.Array:
        outputs = self._model.apply(
            {"params": params}, input_ids=ids, attention_mask=attention_mask
        )
        return jax.nn.softmax(outputs.projection.logits()[0])

    def _candidate(
        self, ids: Sequence[int], gap: int, id: int, probability: np.floating
    ) -> Candidate:
        filled = [*ids[:gap], id, *ids[gap + 1 :]]
        text = self._tokenizer.decode(filled)
        return Candidate(self._tokenizer.token(id), id, float(probability), text)
