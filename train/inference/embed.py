"""A vector for each text: the mean of an encoder's hidden states."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ...data.errors import UserError
from ...data.tokenizers.base import Tokenizer
from ...models.load import load
from ...models.nn.heads import mean_pool
from ..runs.load_run import open_run
from ..runs.run_folder import Say
from .bucketing import padded

BATCH_SIZE = 32


class TextEmbedder:
    """A model and its tokenizer; compiled once for each length bucket."""

    def __init__(self, model: Any, params: Any, tokenizer: Tokenizer) -> None:
        if getattr(model.config, "head", None) == "seq2seq_lm":
            raise UserError(
                "an encoder-decoder has no vector for a text: give the run of a BERT or GPT"
            )
        self._params, self._tokenizer = params, tokenizer
        self._max_length = model.config.max_length

        @jax.jit
        def embed(params: Any, ids: jax.Array, attention_mask: jax.Array) -> jax.Array:
            given = {"input_ids": ids, "attention_mask": attention_mask}
            if getattr(model.config, "head", None) == "choice":  # a row of one choice each
                given = {name: x[:, None] for name, x in given.items()}
            outputs = model.apply({"params": params}, **given)
            return mean_pool(outputs.last_hidden_state, attention_mask)

        self._embed = embed

    @classmethod
    def of_run(cls, folder: str | Path, *, step: int | None = None) -> "TextEmbedder":
        """The model of a run folder.

        Raises:
          FileNotFoundError: it is not a run folder, or has no such checkpoint.
        """
        _, tokenizer = open_run(folder)
        return cls(*load(folder, step=step), tokenizer)

    def __call__(self, texts: Sequence[str], say: Say = print) -> np.ndarray:
        """The mean over each text's tokens, `[CLS]` and `[SEP]` included.

        Args:
          texts: those longer than the model reads are cut.
          say: told how many were cut.

        Returns:
          float32 `[num_texts, D]`, in the order of the texts.

        Raises:
          UserError: there are no texts.
        """
        if not texts:
            raise UserError("there is no text to embed: give at least one line")
        ids = [self._tokenizer.encode(text) for text in texts]
        cut = sum(len(row) > self._max_length for row in ids)
        if cut:
            say(f"{cut:,} of {len(ids):,} texts are cut to {self._max_length} tokens")
        # Texts of like length stand in one batch, so that little is padding.
        order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
        parts = [
            self._batch([ids[i] for i in order[start : start + BATCH_SIZE]])
            for start in range(0, len(order), BATCH_SIZE)
        ]
        vectors = np.concatenate(parts)
        return vectors[np.argsort(order)]

    def _batch(self, rows: list[list[int]]) -> np.ndarray:
        cut = [_cut(row, self._max_length) for row in rows]
        ids, mask = padded(cut, BATCH_SIZE, self._max_length)
        return np.asarray(self._embed(self._params, ids, mask))[: len(rows)]


def _cut(ids: list[int], length: int) -> list[int]:
    """At most `length` tokens, the closing one kept."""
    return ids if len(ids) <= length else [*ids[: length - 1], ids[-1]]
