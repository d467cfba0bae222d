"""Sentence embeddings: hidden states pooled over each text, with the settings of the folder."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np

from ...data.common.fields import require
from ...data.common.progress import LogFn
from ...data.tokenizers.base import Tokenizer
from ..finite import check_outputs
from ..hf.sentence_embedding import EmbeddingSettings, read_embedding_settings
from ..hf.sentence_modules import kind_of, lower_case
from ..hub import local_folder
from ..model import Model
from ..nn.heads import HEADS, encoder_heads
from ..nn.pooling import pool
from ..nn.typing import Params
from .bucketing import pad_batch, padded_batches
from .text_model import TextModel, require_texts


def normalized(vectors: np.ndarray) -> np.ndarray:
    """Returns float32 vectors of length 1; vectors of length 0 are unchanged."""
    vectors = np.asarray(vectors, np.float32)
    return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)


class TextEmbedder(TextModel):
    """A model and its tokenizer; compiled once for each padded shape.

    Example::

        embedder = models.TextEmbedder.of_run("sentence-transformers/all-MiniLM-L6-v2")
        vectors = embedder(["A cat sat.", "A dog ran."])  # float32 [2, 384]

    Args:
        model: the model of a BERT or GPT, with any head; the head and the pooler are not used.
        params: its parameters.
        tokenizer: its tokenizer.
        settings: how a text's vector is computed. Defaults to the mean of its hidden states.

    Raises:
        UserError: the model cannot embed texts, or the settings do not fit its size.
    """

    heads = frozenset(encoder_heads())
    refusal = "has no vector for a text"
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
            if HEADS[model.config.head].takes_choices:  # one choice per row
                given = {name: x[:, None] for name, x in given.items()}
            hidden = model.apply({"params": params}, **given).last_hidden_state  # [B, T, D]
            x = pool(hidden, pooled, settings.pooling)
            for layer in settings.layers:
                x = layer(x)
            return x[:, : settings.num_dimensions]

        self._embed = embed

    @classmethod
    def _open(
        cls, model: Model, params: Params, tokenizer: Tokenizer, folder: str | Path
    ) -> "TextEmbedder":
        require(
            kind_of(local_folder(folder)) != "SparseEncoder",
            f"{folder} is a sparse encoder, which weighs tokens: use `models.SparseEmbedder`",
        )
        settings = read_embedding_settings(local_folder(folder))
        return cls(model, params, tokenizer, settings or EmbeddingSettings())

    def with_settings(self, settings: EmbeddingSettings) -> "TextEmbedder":
        """Returns an embedder of the same model with other settings."""
        return TextEmbedder(self._model, self._params, self._tokenizer, settings)

    def __call__(
        self, texts: Sequence[str], log: LogFn = print, *, prompt_name: str | None = None
    ) -> np.ndarray:
        """Computes a vector for each text, whose tokens include special ones such as `[CLS]`.

        Args:
            texts: the texts; longer ones than the model reads are truncated.
            log: called with the numbers of texts that were truncated or have no token.
            prompt_name: the name of one of the model's prompts, which is prepended to each text;
              "" for no prompt. Defaults to the default prompt of the settings, if any.

        Returns:
            float32 `[num_texts, E]`, in the order of the texts. A text without tokens has the
            vector 0.

        Raises:
            UserError: `texts` is empty or one string, no prompt has this name, or a vector is NaN
              or infinite.
        """
        require_texts(texts, "texts")
        vectors = np.zeros((len(texts), self._width), np.float32)
        for batch, found in self._batches(texts, log, prompt_name):
            vectors[batch] = found
        return vectors

    def _batches(
        self, texts: Sequence[str], log: LogFn, prompt_name: str | None
    ) -> Iterator[tuple[list[int], np.ndarray]]:
        """Yields the indices of some texts and their vectors; see `__call__`."""
        require(texts, "there is no text to embed: give at least one line")
        longest, prompt = self._max_length, self.settings.prompt(prompt_name)
        tokenizer, frame = self._tokenizer, self._tokenizer.frame
        # Encode and truncate, leaving room for the special tokens.
        room = longest - frame.single.num_added
        ids = [self._encode(prompt + text) for text in texts]
        truncated = sum(len(row) > room for row in ids)
        if truncated:
            log(f"{truncated:,} of {len(ids):,} texts truncated: longer than {longest} tokens")
        ids = [frame.join(tokenizer.truncated(row, room)).ids for row in ids]
        if empty := sum(not row for row in ids):
            log(f"{empty:,} of {len(ids):,} texts have no token: their vector is 0")
        # The number of leading tokens that pooling skips: the frame and the prompt.
        not_pooled = 0
        if prompt and not self.settings.pool_prompt:
            not_pooled = len(frame.before) + len(self._encode(prompt))
        # Embed in batches of similar length.
        for batch, num_rows in padded_batches([len(row) for row in ids], longest):
            rows, mask = pad_batch([ids[i] for i in batch], num_rows, longest)
            pooled = mask * (np.arange(mask.shape[1]) >= not_pooled)
            found = np.asarray(self._embed(self._params, rows, mask, pooled))[: len(batch)]
            check_outputs({"a vector": found})
            yield batch, found

    def comparable(self, vectors: np.ndarray) -> np.ndarray:
        """Returns vectors whose dot product compares texts as the model's measure does.

        Args:
            vectors: float32 `[N, D]`.

        Returns:
            float32 `[N, D]`: of length 1 for a model that compares by cosine, else unchanged.

        Raises:
            UserError: the model compares vectors by a distance, and does not normalize them.
        """
        settings = self.settings
        if settings.compares_by_cosine:
            return normalized(vectors)
        require(
            settings.similarity == "dot",
            f"similarity_fn_name {settings.similarity} of the model compares vectors that are not "
            "normalized, and a search compares cosines or dot products: rank the vectors of "
            "flaxzoo embed yourself",
        )
        return vectors

    def _encode(self, text: str) -> list[int]:
        if self.settings.lowercase:
            text = lower_case(text)
        return self._tokenizer.encode(text, add_special_tokens=False)
