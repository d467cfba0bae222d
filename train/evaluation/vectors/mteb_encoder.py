"""Runs the tasks of MTEB, a benchmark for text embeddings, on a model.

The benchmark is in the package `mteb` (the extra `mteb`), which is imported on first use. See
Muennighoff et al. 2022, "MTEB: Massive Text Embedding Benchmark".
"""

import importlib.util
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ....data.common.fields import require
from ....data.common.progress import LogFn
from ....models.text.embed import TextEmbedder, normalized
from .pairs import cosines

if TYPE_CHECKING:
    from mteb.models import ModelMeta


class MTEBEncoder:
    """Makes a model that embeds texts usable as an encoder in `mteb.evaluate`.

    The model's prompts precede queries and documents, as in `evaluate_retrieval`. The model's
    default prompt, if any, precedes all other texts. Vectors are compared by cosine.

    Example::

        tasks = mteb.get_tasks(tasks=["STS13", "SciFact"])
        results = mteb.evaluate(train.MTEBEncoder("runs/search"), tasks)

    Args:
        folder: a run folder, a folder in the Hugging Face format or of sentence-transformers, or a
          name on the hub.
        step: the checkpoint. Defaults to the newest checkpoint.
        log: called with lines about how many texts were truncated.

    Raises:
        FileNotFoundError: the folder is not a run folder, or does not have the checkpoint.
        UserError: the package mteb is missing, or the model does not embed texts.
    """

    def __init__(self, folder: str | Path, *, step: int | None = None, log: LogFn = print) -> None:
        require(
            importlib.util.find_spec("mteb") is not None,
            "mteb is not installed: pip install 'flaxzoo[mteb]', or use flaxzoo evaluate --data "
            "beir:FOLDER",
        )
        self._folder, self._log = folder, log
        self._embedder = TextEmbedder.of_run(folder, step=step, log=log)
        require(
            self._embedder.settings.compares_by_cosine,
            f"similarity_fn_name {self._embedder.settings.similarity} of {folder} must be "
            f"cosine, because this adapter lets mteb compare vectors by cosine: use flaxzoo "
            f"evaluate --data beir:FOLDER",
        )

    def encode(
        self, inputs: Iterable[dict[str, list[str]]], *, prompt_type: object = None, **_: object
    ) -> np.ndarray:
        """Returns the vectors of texts: float32 `[N, D]`.

        Args:
            inputs: batches of texts under the key `text`.
            prompt_type: `query` or `document`, from mteb's `PromptType`. If None, the default
              prompt precedes the texts.
            **_: the task, which is ignored.
        """
        settings = self._embedder.settings
        kind = getattr(prompt_type, "value", None)
        prompts = {"query": settings.query_prompt, "document": settings.document_prompt}
        texts = [text for batch in inputs for text in batch["text"]]
        return self._embedder(texts, self._log, prompt_name=prompts.get(str(kind)))

    def similarity(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        """Returns the cosines `[N, M]` between vectors `[N, D]` and other vectors `[M, D]`.

        If an argument is a single vector `[D]`, the result lacks the corresponding axis.
        """
        return normalized(first) @ normalized(second).T

    def similarity_pairwise(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        """Returns the cosines `[N]` of the pairs of vectors in two arrays `[N, D]`."""
        return cosines(first, second)

    @cached_property
    def mteb_model_meta(self) -> "ModelMeta":
        """The model description that mteb stores with the results."""
        from mteb.models import ModelMeta

        known = {
            "name": f"flaxzoo/{Path(self._folder).name}",
            "framework": ["JAX"],
            "max_tokens": self._embedder.max_length,
            "similarity_fn_name": "cosine",
        }
        return ModelMeta.create_empty(known)
