"""Computes sentence embeddings: pools the hidden states of each text as its model specifies."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from ...data.common.fields import require
from ...data.common.progress import LogFn
from ...data.tokenizers.base import Tokenizer
from ..finite import check_outputs
from ..heads.specs import HEADS, encoder_heads
from ..hf.sentence_embedding import EmbeddingSettings, read_embedding_settings
from ..hf.sentence_modules import kind_of, lower_case
from ..hub import local_folder
from ..model import Model
from ..nn.pooling import pool
from ..nn.typing import Params
from .bucketing import pad_batch, padded_batches
from .text_model import TextModel, require_texts


def normalized(vectors: np.ndarray) -> np.ndarray:
    """Scales vectors to length 1, in float32. Vectors of length 0 are unchanged."""
    vectors = np.asarray(vectors, np.float32)
    return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)


class TextRow(NamedTuple):
    """The tokens of a text."""

    ids: list[int]
    """The token ids, including special tokens."""
    num_skipped: int = 0
    """The number of leading tokens that pooling skips."""


class TextEmbedder(TextModel):
    """Computes vectors of texts with a model and its tokenizer.

    The model is compiled once for each padded shape.

    Example::

        embedder = models.TextEmbedder.of_run("sentence-transformers/all-MiniLM-L6-v2")
        vectors = embedder(["A cat sat.", "A dog ran."])  # float32 [2, 384]

    Args:
        model: a BERT or GPT with any head. The head and the pooler are not used.
        params: its parameters.
        tokenizer: its tokenizer.
        settings: the settings for computing vectors. By default, a text's vector is the mean of its
          hidden states.

    Raises:
        UserError: the model cannot embed texts, or the settings do not match the model's width.
    """

    heads = frozenset(encoder_heads())
    refusal = "cannot embed texts"
    remedy = "give the run of a BERT or GPT"

    def __init__(
        self,
        model: Model,
        params: Params,
        tokenizer: Tokenizer,
        settings: EmbeddingSettings = EmbeddingSettings(),
    ) -> None:
        super().__init__(model, params, tokenizer)
        self.settings = settings
        self._width = settings.width(model.config.d_model)
        longest = model.config.max_length
        self._max_length = min(longest, settings.max_length or longest)

        @jax.jit
        def embed(
            params: Params, ids: jax.Array, attention_mask: jax.Array, pooled: jax.Array
        ) -> jax.Array:
            given = {"input_ids": ids, "attention_mask": attention_mask}
            if HEADS[model.config.head].takes_choices:  # give one choice per row
                given = {name: x[:, None] for name, x in given.items()}
            hidden = model.apply({"params": params}, **given).last_hidden_state  # [B, T, D]
            # [B, T, D] to [B, E], followed by the layers that the model's settings specify.
            x = pool(hidden, pooled, settings.pooling)
            for layer in settings.layers:
                x = layer(x)
            return x[:, : settings.num_dimensions]

        self._embed = embed

    @classmethod
    def _open(
        cls, model: Model, params: Params, tokenizer: Tokenizer, folder: str | Path
    ) -> "TextEmbedder":
        kind = kind_of(local_folder(folder))
        require(
            kind != "SparseEncoder",
            f"{folder} is a sparse encoder, which assigns weights to tokens: use "
            f"`models.SparseEmbedder`",
        )
        require(
            kind != "CrossEncoder",
            f"{folder} is a cross-encoder, which scores pairs of texts: use `models.PairScorer`, "
            f"or flaxzoo predict",
        )
        settings = read_embedding_settings(local_folder(folder))
        return cls(model, params, tokenizer, settings or EmbeddingSettings())

    @property
    def max_length(self) -> int:
        """The maximum number of tokens of a text, including special tokens."""
        return self._max_length

    @property
    def width(self) -> int:
        """The number of dimensions of a vector."""
        return self._width

    def with_settings(self, settings: EmbeddingSettings) -> "TextEmbedder":
        """Returns an embedder of the same model with different settings."""
        return TextEmbedder(self._model, self._params, self._tokenizer, settings)

    def __call__(
        self, texts: Sequence[str], log: LogFn = print, *, prompt_name: str | None = None
    ) -> np.ndarray:
        """Computes a vector for each text. Special tokens such as `[CLS]` are added to the texts.

        Args:
            texts: the texts. A text that is longer than the model's maximum length is truncated.
            log: called with the number of texts that were truncated and the number of texts without
                any token.
            prompt_name: the name of one of the model's prompts, which is prepended to each text.
              "" means no prompt. Defaults to the default prompt of the settings, if any.

        Returns:
            The vectors in the order of the texts, float32 `[num_texts, E]`. The vector of a text
            without tokens is 0.

        Raises:
            UserError: `texts` is empty or a single string, no prompt has this name, or a vector is
              NaN or infinite.
        """
        rows, num_truncated = self.encode(texts, prompt_name)
        self._report(rows, num_truncated, log)
        return self.vectors(rows)

    def encode(
        self, texts: Sequence[str], prompt_name: str | None = None
    ) -> tuple[list[TextRow], int]:
        """Encodes texts with a prompt and special tokens, and truncates texts that are too long.

        Args:
            texts: the texts.
            prompt_name: see `__call__`.

        Returns:
            A row for each text, and the number of truncated texts.

        Raises:
            UserError: `texts` is empty or a single string, or no prompt has this name.
        """
        require_texts(texts, "texts")
        require(texts, "texts must not be empty: give at least one text")
        prompt = self.settings.prompt(prompt_name)
        tokenizer, frame = self._tokenizer, self._tokenizer.frame
        # Truncate, leaving room for the special tokens.
        room = self._max_length - frame.single.num_added
        ids = [self._encode(prompt + text) for text in texts]
        num_truncated = sum(len(row) > room for row in ids)
        # Pooling skips the leading tokens of a text with a prompt: the special tokens before the
        # prompt, and the tokens of the prompt.
        not_pooled = 0
        if prompt and not self.settings.pool_prompt:
            not_pooled = len(frame.before) + len(self._encode(prompt))
        rows = (frame.join(tokenizer.truncated(row, room)).ids for row in ids)
        return [TextRow(row, not_pooled) for row in rows], num_truncated

    def _report(self, rows: Sequence[TextRow], num_truncated: int, log: LogFn) -> None:
        """Logs how many texts were truncated and how many texts have no token."""
        if num_truncated:
            number = f"{num_truncated:,} of {len(rows):,}"
            log(f"{number} texts truncated: longer than {self._max_length} tokens")
        if empty := sum(not row.ids for row in rows):
            log(f"{empty:,} of {len(rows):,} texts have no token: their vector is 0")

    def vectors(self, rows: Sequence[TextRow]) -> np.ndarray:
        """Computes the vectors of encoded texts.

        Args:
            rows: the texts, each with at most `max_length` tokens.

        Returns:
            The vectors in the order of the rows, float32 `[num_rows, E]`. The vector of a row
            without tokens is 0.

        Raises:
            UserError: a vector is NaN or infinite.
        """
        vectors = np.zeros((len(rows), self.width), np.float32)
        for batch, values in self._batches(rows):
            vectors[batch] = values
        return vectors

    def _batches(self, rows: Sequence[TextRow]) -> Iterator[tuple[list[int], np.ndarray]]:
        """Yields the indices and the vectors of the rows of each batch, grouped by length."""
        longest = self._max_length
        for batch, num_rows in padded_batches([len(row.ids) for row in rows], longest):
            ids, mask = pad_batch([rows[i].ids for i in batch], num_rows, longest)
            first = np.zeros((num_rows, 1), np.int32)
            first[: len(batch), 0] = [rows[i].num_skipped for i in batch]
            # [num_rows, T]: pooling leaves out padding and the skipped tokens of the prompt.
            pooled = mask * (np.arange(mask.shape[1]) >= first)
            vectors = np.asarray(self._embed(self._params, ids, mask, pooled))[: len(batch)]
            check_outputs({"a vector": vectors})
            yield batch, vectors

    def comparable(self, vectors: np.ndarray) -> np.ndarray:
        """Converts vectors so that their dot products rank texts like the model's similarity.

        Args:
            vectors: the vectors, float32 `[N, D]`.

        Returns:
            The vectors, float32 `[N, D]`. They are scaled to length 1 if the model compares vectors
            by cosine, and otherwise unchanged.

        Raises:
            UserError: the model compares vectors by a distance and does not normalize them.
        """
        settings = self.settings
        if settings.compares_by_cosine:
            return normalized(vectors)
        require(
            settings.similarity == "dot",
            f"similarity_fn_name {settings.similarity} of the model compares vectors that are not "
            "normalized, but search compares vectors by cosine or dot product: compute "
            "vectors with flaxzoo embed, and rank them yourself",
        )
        return vectors

    def _encode(self, text: str) -> list[int]:
        if self.settings.lowercase:
            text = lower_case(text)
        return self._tokenizer.encode(text, add_special_tokens=False)
