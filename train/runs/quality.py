"""Selects documents with a trained classifier of text quality.

Brown et al. 2020, appendix A, trained a classifier to predict whether a document is from a
high-quality corpus or from the unfiltered crawl, and kept the documents with a high score. In
flaxzoo, the classifier can be any sequence-classification run. A document is kept if the
probability of the good label is at least a threshold.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np

from ...data.common.errors import RunError
from ...data.common.fields import Fraction, check_value, require
from ...data.dataset import PickledByFields
from ...data.tokenizers.base import Tokenizer
from ...models.finite import check_outputs, load_finite
from ...models.nn.typing import Params
from ..config import TrainConfig, objective_of
from ..losses.eval_step import rows_at_once, whole_rows
from .load_run import open_run

GOOD = "good"
"""The label of documents to keep. If a classifier lacks this label, the documents with the second
of its two labels are kept."""
THRESHOLD = 0.5
"""The default minimum probability of the good label."""
_ROWS_AT_ONCE = 64


@dataclass(frozen=True)
class QualityClassifier(PickledByFields):
    """Keeps the documents that a classifier considers good; see ``data.Selector``.

    The model is loaded on first use, separately in each worker of ``flaxzoo prepare``.

    Attributes:
        folder: The folder of a run, or of a model in the Hugging Face format. The model must
          classify single texts, and have two labels or a label ``good``.
        threshold: The minimum probability of the good label for a document to be kept.

    Example::

        quality = train.QualityClassifier("runs/quality", threshold=0.9)
        data.prepare("text:crawl/*.txt", "rows", "runs/letters", length=64, selector=quality)
    """

    folder: str
    threshold: float = THRESHOLD

    def __post_init__(self) -> None:
        check_value("threshold", self.threshold, Fraction)

    @property
    def name(self) -> str:
        """The reason for dropping documents, for the log."""
        return f"the classifier {self.folder} below {self.threshold}"

    @property
    def label(self) -> str:
        """The label of documents to keep."""
        labels = self._opened[0].model.labels
        return GOOD if GOOD in labels else labels[-1]

    @property
    def fingerprint(self) -> str:
        """A hash of the parameters, the tokenizer, the settings and the threshold."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        config, tokenizer = self._opened
        decisive = (tokenizer.fingerprint, repr(config.model), config.data.length, self.threshold)
        whole = hashlib.blake2b(repr((*decisive, self.label)).encode(), digest_size=16)
        for leaf in jax.tree.leaves(self._loaded[1]):
            whole.update(np.ascontiguousarray(leaf).tobytes())
        return whole.hexdigest()

    def __call__(self, texts: Sequence[str], /) -> list[bool]:
        """Returns whether to keep each text."""
        return (self.probabilities(texts) >= self.threshold).tolist()

    def probabilities(self, texts: Sequence[str]) -> np.ndarray:
        """Returns the probability of the label to keep for each text, float64 [n].

        Texts are truncated to the classifier's sequence length.

        Raises:
            RunError: The folder does not have a suitable classifier, or its outputs are not finite.
        """
        config, tokenizer = self._opened
        split = config.data.input_split(list(texts), tokenizer, config.model.labels)
        # Use a fixed number of rows per batch, so that only one program is compiled.
        params = self._loaded[1]
        rows = rows_at_once(config.data.length, _ROWS_AT_ONCE)
        # Import late, because this module needs grain, which `flaxzoo bench` does not require.
        from ...data.batching import evaluation_batches

        batches = evaluation_batches(split.examples, batch_size=rows)
        outputs = whole_rows([self._predictions(params, batch) for batch in batches], len(texts))
        check_outputs(outputs)
        examples: Any = split.examples
        return np.array([p["probabilities"][self.label] for p in examples.decode(outputs)])

    @cached_property
    def _opened(self) -> tuple[TrainConfig, Tokenizer]:
        config, tokenizer = open_run(self.folder)
        data, labels = config.data, config.model.labels
        require(
            data.classifies_single_texts,
            f"{self.folder} does not classify single texts: train a classifier, for example with "
            "flaxzoo train bert-classify --data.source 'corpora:good=text:good/*.txt | "
            "crawl=text:crawl/*.txt'",
            error=RunError,
        )
        # The label to keep must have the name GOOD, or be the second of two labels.
        require(
            GOOD in labels or (len(labels) == 2 and data.label_target != "binary"),
            f"{self.folder} has the labels {', '.join(labels)}, none of which is {GOOD!r}: train "
            f"it with two labels and --data.target single_label, or name one of them {GOOD!r}",
            error=RunError,
        )
        return config, tokenizer

    @cached_property
    def _loaded(self) -> tuple[Any, Params]:
        return load_finite(self.folder)

    @cached_property
    def _predictions(self) -> Any:
        objective = objective_of(self._opened[0])
        model = self._loaded[0]

        @jax.jit
        def predictions(params: Params, batch: Any) -> Any:
            return objective.predictions(objective.outputs(model.apply, params, batch))

        return predictions
