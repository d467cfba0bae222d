"""Sentence vectors: the mean of a model's hidden states over each text."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ...data.errors import UserError
from ...data.tokenizers.base import Tokenizer
from ...models.nn.heads import HEADS, encoder_heads, mean_pool
from ...models.nn.typing import Params
from ..progress import LogFn
from .bucketing import batches_by_length, pad_batch
from .text_model import TextModel

BATCH_SIZE = 32


class TextEmbedder(TextModel):
    """A model and its tokenizer; compiled once for each length bucket."""

    heads = frozenset(encoder_heads())
    refusal = "has no vector for a text"
    remedy = "give the run of a BERT or GPT"

    def __init__(self, model: Any, params: Params, tokenizer: Tokenizer) -> None:
        super().__init__(model, params, tokenizer)
        self._max_length = model.config.max_length

        @jax.jit
        def embed(params: Params, ids: jax.Array, attention_mask: jax.Array) -> jax.Array:
            given = {"input_ids": ids, "attention_mask": attention_mask}
            if HEADS[model.config.head].takes_choices:  # a row of one choice each
                given = {name: x[:, None] for name, x in given.items()}
            outputs = model.apply({"params": params}, **given)
            return mean_pool(outputs.last_hidden_state, attention_mask)

        self._embed = embed

    def __call__(self, texts: Sequence[str], log: LogFn = print) -> np.ndarray:
        """Averages the hidden states of each text's tokens, `[CLS]` and `[SEP]` included.

        Args:
          texts: the texts; those longer than the model reads are truncated.
          log: called with how many were truncated.

        Returns:
          float32 `[num_texts, D]`, in the order of the texts.

        Raises:
          UserError: there are no texts.
        """
        if not texts:
            raise UserError("there is no text to embed: give at least one line")
        longest = self._max_length
        ids = [self._tokenizer.encode(text) for text in texts]
        truncated = sum(len(row) > longest for row in ids)
        if truncated:
            log(f"{truncated:,} of {len(ids):,} texts are truncated to {longest} tokens")
        # The closing token is kept. A text without any token has the vector 0.
        ids = [row if len(row) <= longest else [*row[: longest - 1], row[-1]] for row in ids]
        vectors = np.zeros((len(ids), self._model.config.d_model), np.float32)
        for batch in batches_by_length(ids, BATCH_SIZE):
            rows, mask = pad_batch([ids[i] for i in batch], BATCH_SIZE, longest)
            vectors[batch] = self._embed(self._params, rows, mask)[: len(batch)]
        return vectors
