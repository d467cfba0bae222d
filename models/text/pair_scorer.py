"""Scores pairs of texts with a cross-encoder, and ranks documents for a query."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np

from ...data.common.fields import require
from ...data.common.progress import LogFn
from ...data.features.bert_inputs import BertInputs, Template, encode_texts
from ...data.tokenizers.base import Tokenizer
from ..finite import check_outputs
from ..hf.cross_encoder import PairScoring, read_pair_scoring
from ..hf.sentence_modules import lower_case
from ..hub import local_folder
from ..model import Model
from ..nn.typing import Params
from .bucketing import by_length
from .text_model import TextModel, require_texts


@dataclasses.dataclass(frozen=True)
class RankedDocument:
    """A document and its score for a query."""

    index: int
    """The index of the document."""
    score: float
    """Larger scores are better."""


class PairScorer(TextModel):
    """Scores pairs of texts with a sequence classifier that reads two texts as one sequence.

    The model is compiled once for each padded shape. The class CrossEncoder of
    sentence-transformers gives the same scores.

    Example::

        scorer = models.PairScorer.of_run("cross-encoder/ms-marco-MiniLM-L6-v2")
        scores = scorer.score([("how old is the sun", "The sun is 4.6 billion years old.")])
        best = scorer.rank("how old is the sun", documents, top_k=3)

    Args:
        model: a model with the head `sequence_classification`.
        params: its parameters.
        tokenizer: its tokenizer.
        settings: the settings for computing scores from the logits. By default, the score of a
          single label is the sigmoid of its logit, and the scores of several labels are the logits.

    Raises:
        UserError: the model has a different head.
    """

    heads = frozenset(("sequence_classification",))
    refusal = "cannot score pairs of texts"
    remedy = "give a cross-encoder, such as a run of `flaxzoo train rerank`"

    def __init__(
        self,
        model: Model,
        params: Params,
        tokenizer: Tokenizer,
        settings: PairScoring | None = None,
    ) -> None:
        super().__init__(model, params, tokenizer)
        model, _ = self._model, self._params = self._classifier(model, params)
        settings = settings or PairScoring.of_labels(len(model.config.labels))
        self.settings = settings
        longest = model.config.max_length
        self._longest = min(longest, settings.max_length or longest)
        # RoBERTa and DistilBERT have no token types.
        inputs = ("input_ids", "attention_mask", "token_type_ids")
        self._inputs = inputs if model.config.num_token_types > 1 else inputs[:2]

        @jax.jit
        def scores(params: Params, given: dict[str, jax.Array]) -> dict[str, jax.Array]:
            logits = model.apply({"params": params}, **given).logits
            return {"scores": settings(logits), "logits": logits}

        self._scores = scores

    @classmethod
    def _open(
        cls, model: Model, params: Params, tokenizer: Tokenizer, folder: str | Path
    ) -> "PairScorer":
        return cls(model, params, tokenizer, read_pair_scoring(local_folder(folder)))

    def _classifier(self, model: Model, params: Params) -> tuple[Model, Params]:
        """Returns the text-pair classifier. A subclass may build it from another type of model."""
        return model, params

    def _template(self, length: int) -> Template:
        """Returns the special tokens that surround the texts of a pair."""
        return Template.of(self._tokenizer, length)

    def _texts(self, pairs: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
        """Converts each pair to the texts that the model reads."""
        clean = lower_case if self.settings.lowercase else str
        return [tuple(map(clean, pair)) for pair in pairs]

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the arrays that the model reads."""
        return self._inputs

    @property
    def max_length(self) -> int:
        """The maximum number of tokens of a pair, including special tokens."""
        return self._longest

    def score(self, pairs: Sequence[tuple[str, ...]], log: LogFn = print) -> np.ndarray:
        """Scores pairs of texts, such as a query and a document.

        Args:
            pairs: the pairs. If a pair is too long, its longer text is truncated first.
            log: called with the number of pairs that were truncated.

        Returns:
            The scores in the order of the pairs, float32 `[num_pairs]`, or `[num_pairs, L]` if the
            model has several labels, L.

        Raises:
            UserError: `pairs` is empty or not a list of pairs of texts, or a score is NaN or
              infinite.
        """
        tokens, num_truncated = self.encode(pairs)
        if num_truncated:
            number = f"{num_truncated:,} of {len(pairs):,}"
            log(f"{number} pairs truncated: longer than {self._longest} tokens")
        found = self.outputs(tokens.example, tokens.lengths)["scores"]
        return found[:, 0] if found.shape[1] == 1 else found

    def encode(self, pairs: Sequence[tuple[str, ...]]) -> tuple[BertInputs, int]:
        """Encodes and truncates pairs of texts as in training; see `score`.

        Returns:
            The tokens, and the number of pairs that were truncated.
        """
        require_texts(pairs, "pairs", tuple)
        require(pairs, "pairs must not be empty: give at least one pair")
        for i, pair in enumerate(pairs):
            shown = repr(pair)[:60]
            require(len(pair) == 2, f"pairs[{i}] must be a tuple of two texts, got {shown}")
        return encode_texts(
            self._texts(pairs),
            self._tokenizer,
            self._template(self._longest),
            [f"pairs[{i}]" for i in range(len(pairs))],
        )

    def outputs(
        self, example: Callable[[int], Mapping[str, np.ndarray]], lengths: Sequence[int]
    ) -> dict[str, np.ndarray]:
        """Scores encoded pairs.

        Args:
            example: returns the arrays of a pair, given its index; see `BertInputs.example`.
            lengths: the number of tokens of each pair.

        Returns:
            The arrays `scores` and `logits`, float32 `[num_pairs, L]`. The scores are computed from
            the logits.

        Raises:
            UserError: a score is NaN or infinite.
        """
        found = by_length(
            functools.partial(self._scores, self._params),
            lambda i: {name: example(i)[name] for name in self._inputs},
            lengths,
        )
        check_outputs({"a score": found["scores"]})
        return found

    def rank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_k: int | None = None,
        log: LogFn = print,
    ) -> list[RankedDocument]:
        """Ranks documents by their scores for a query.

        Args:
            query: the query.
            documents: the documents.
            top_k: the number of documents to return. Defaults to all documents.
            log: see `score`.

        Returns:
            The documents with the highest scores, best first. Documents with equal scores keep
            their order.

        Raises:
            UserError: see `score`; or the model has several labels.
        """
        labels = self._model.config.labels
        require(
            len(labels) == 1,
            f"the model has {len(labels)} labels ({', '.join(labels[:3])} …), but ranking "
            f"requires one label: use `score`",
        )
        require_texts(documents, "documents")
        require(documents, "documents must not be empty: give at least one document")
        scores = self.score([(query, document) for document in documents], log)
        best = np.argsort(-scores, kind="stable")[:top_k]
        return [RankedDocument(int(i), float(scores[i])) for i in best]
