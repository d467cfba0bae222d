"""Computes sparse vectors of texts: a weight for each token of the vocabulary (SPLADE)."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from ...data.common.progress import LogFn
from ...data.tokenizers.base import Tokenizer
from ..greatest_logits import greatest_logits
from ..heads.specs import HEADS
from ..hf.sentence_embedding import EmbeddingSettings
from ..hf.sentence_modules import kind_of
from ..hf.sparse_encoder import SparseSettings, read_sparse_settings
from ..hub import local_folder
from ..model import Model
from ..nn.typing import Params
from .embed import TextEmbedder
from .text_model import Loaded


class SparseEmbedder(TextEmbedder):
    """Computes sparse vectors with a masked language model.

    The model is compiled once for each padded shape. The class SparseEncoder of
    sentence-transformers gives the same weights. Tokens that do not occur in a text may also have a
    weight above 0.

    Example::

        embedder = models.SparseEmbedder.of_run("naver/splade-v3")
        [weights] = embedder.weights(["A cat sat."])  # {"cat": 2.1, …}, the largest first

    Args:
        model: a model that predicts masked tokens.
        params: its parameters.
        tokenizer: its tokenizer.
        sparse: the settings for computing weights from logits.

    Raises:
        UserError: the model has a different head.
    """

    heads = frozenset(name for name, head in HEADS.items() if head.predicts_masked)
    refusal = "cannot weight tokens"
    remedy = "give a masked language model"

    def __init__(
        self,
        model: Model,
        params: Params,
        tokenizer: Tokenizer,
        sparse: SparseSettings = SparseSettings(),
    ) -> None:
        super().__init__(model, params, tokenizer, sparse.texts)
        self.sparse = sparse
        self._width = model.config.vocab_size

        @jax.jit
        def embed(
            params: Params, ids: jax.Array, attention_mask: jax.Array, pooled: jax.Array
        ) -> jax.Array:
            given = {"input_ids": ids, "attention_mask": attention_mask}
            projection = model.apply({"params": params}, **given).projection
            return sparse(greatest_logits(projection, pooled))

        self._embed = embed

    @classmethod
    def _open(
        cls, model: Model, params: Params, tokenizer: Tokenizer, folder: str | Path
    ) -> "SparseEmbedder":
        stored = read_sparse_settings(local_folder(folder))
        return cls(model, params, tokenizer, stored or SparseSettings())

    def with_settings(self, settings: EmbeddingSettings) -> "SparseEmbedder":
        """Returns an embedder of the same model with different settings for texts."""
        sparse = dataclasses.replace(self.sparse, texts=settings)
        return SparseEmbedder(self._model, self._params, self._tokenizer, sparse)

    def comparable(self, vectors: np.ndarray) -> np.ndarray:
        """Returns the vectors unchanged, because they are compared by dot product."""
        return vectors

    def weights(
        self,
        texts: Sequence[str],
        log: LogFn = print,
        *,
        top_k: int | None = None,
        prompt_name: str | None = None,
    ) -> list[dict[str, float]]:
        """Returns the tokens with a weight above 0 for each text, the largest weights first.

        Args:
            texts: the texts.
            log: see `__call__`.
            top_k: the maximum number of tokens for each text. Defaults to all tokens with a weight
              above 0.
            prompt_name: see `__call__`.
        """
        rows, num_truncated = self.encode(texts, prompt_name)
        self._report(rows, num_truncated, log)
        weights: list[dict[str, float]] = [{} for _ in texts]
        for batch, vectors in self._batches(rows):
            for i, row in zip(batch, vectors, strict=True):
                # Sort by weight, the largest first, and sort tokens of equal weight by id.
                order = np.argsort(-row, kind="stable")[: np.count_nonzero(row)][:top_k]
                names = map(self._tokenizer.token, order.tolist())
                weights[i] = dict(zip(names, row[order].tolist(), strict=True))
        return weights


def open_embedder(
    folder: str | Path,
    *,
    step: int | None = None,
    log: LogFn = print,
    loaded: Loaded | None = None,
) -> TextEmbedder:
    """Opens a model that computes dense or sparse vectors; see `TextModel.of_run`."""
    is_sparse = kind_of(local_folder(folder)) == "SparseEncoder"
    kind = SparseEmbedder if is_sparse else TextEmbedder
    return kind.of_run(folder, step=step, log=log, loaded=loaded)
