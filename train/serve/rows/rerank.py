"""The endpoint that scores documents for a query, as text-embeddings-inference and Cohere do."""

import asyncio
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np

from ....data.common.fields import Checked, FieldError, PositiveInt, require_default
from ....data.common.json_text import JsonValue
from ....data.features.bert_inputs import BertInputs
from ....models.config import TransformerConfig
from ....models.text.bucketing import padded_length
from ....models.text.pair_scorer import PairScorer
from ....models.text.text_model import Loaded
from ....models.text.yes_no_scorer import YesNoScorer, answers_yes_or_no, open_pair_scorer
from ...evaluation.vectors.retrieval import is_cross_encoder
from ..app import Endpoint, Service
from .inputs import as_list, check_not_truncated
from .worker import Row, RowFunction, computed, outputs_of_rows, usage_of

KIND = "rerank"
Pair: TypeAlias = dict[str, np.ndarray]
"""The arrays of a query-document pair, int32 [length]."""
RESULTS = {
    "texts": ("index", "score", "text"),
    "documents": ("index", "relevance_score", "document"),
}
"""Maps the field of a request that contains the documents to the names in a result. The third name
is only in the answer if the client requests the documents."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RerankFields(Checked):
    """A query, and documents to score for it."""

    model: str | None = None
    """The name of the model. Optional if the server has only one model."""
    query: str
    """The query."""
    texts: tuple[str, ...] | None = None
    """The documents. If a request has this field, the answer has the format of
    text-embeddings-inference, which is a list."""
    documents: tuple[str | Mapping[str, str], ...] | None = None
    """The documents, or objects with a field `text`. If a request has this field, the answer has
    the format of Cohere and Jina, which is an object with `results`."""
    top_n: PositiveInt | None = None
    """The number of documents to return. Defaults to all documents."""
    raw_scores: bool = False
    """Whether to return the logits, without the model's activation, instead of the scores."""
    return_text: bool = False
    """For `texts`: whether to return `text` with each score."""
    return_documents: bool = False
    """For `documents`: whether to return `document` with each score."""
    truncate: bool | None = None
    """Whether to truncate pairs that exceed the model's maximum length. By default, they are
    rejected for `texts`, and truncated for `documents` with a line in `meta.warnings`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.texts is None) == (self.documents is None):
            raise FieldError("documents", "or texts is missing: give one of the two")
        unused = "return_documents" if self.documents is None else "return_text"
        require_default(self, [unused], "is not supported with this format of documents")
        for i, document in enumerate(self._documents):
            if not isinstance(document, str) and [*document] != ["text"]:
                raise FieldError(f"documents[{i}]", "must be a text or an object with text alone")

    @property
    def field(self) -> str:
        """The name of the field that contains the documents, which is a key of `RESULTS`."""
        return "texts" if self.documents is None else "documents"

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The pairs of the query and each document."""
        documents = self._documents
        return [(self.query, x if isinstance(x, str) else x["text"]) for x in documents]

    @property
    def _documents(self) -> Sequence[str | Mapping[str, str]]:
        return getattr(self, self.field)

    @property
    def truncates(self) -> bool:
        """Whether long pairs are truncated."""
        return self.texts is None if self.truncate is None else self.truncate


def fits(config: TransformerConfig) -> bool:
    """Returns whether a model can compute a single score for a text pair."""
    return config.head in YesNoScorer.heads or is_cross_encoder(config)


def rerank_function(folder: str | Path, loaded: Loaded) -> RowFunction | None:
    """Returns the function that scores encoded pairs with the model in a folder.

    The result is None for a language model if its tokenizer lacks tokens of the prompt.
    """
    if loaded[0].config.head in YesNoScorer.heads and not answers_yes_or_no(folder):
        return None
    scorer = open_pair_scorer(folder, loaded=loaded)
    padding = {"input_ids": scorer.tokenizer.special_ids.pad or 0}

    def parts(items: Sequence[Pair]) -> Iterator[list[dict[str, np.ndarray]]]:
        lengths = [len(row["attention_mask"]) for row in items]
        size = padded_length(max(lengths), scorer.max_length)
        rows = [
            {
                name: np.pad(x, (0, size - len(x)), constant_values=padding.get(name, 0))
                for name, x in row.items()
            }
            for row in items
        ]
        yield outputs_of_rows(scorer.outputs(rows.__getitem__, lengths))

    def filler(length: int) -> Pair:
        return {
            name: np.ones(length, np.int32) * (name == "attention_mask") for name in scorer.inputs
        }

    return RowFunction(scorer, parts, scorer.max_length, filler)


def tokens_of(tokens: BertInputs, index: int, length: int) -> Pair:
    """Returns the arrays of a pair without the padding, which may be thousands of tokens long."""
    return {name: x[:length].copy() for name, x in tokens.example(index).items()}


async def rerank(service: Service, fields: RerankFields) -> JsonValue:
    """Answers `/rerank`."""
    model, worker = service.worker(fields.model, KIND)
    service.engine.check_admission()
    scorer: PairScorer = worker.front
    pairs = as_list(fields.pairs, fields.field, worker.settings.max_inputs)
    tokens, num_truncated = await asyncio.to_thread(scorer.encode, pairs)
    check_not_truncated(
        fields.truncates, num_truncated, len(pairs), scorer.max_length, name=fields.field
    )
    rows = [Row(tokens_of(tokens, i, length), length) for i, length in enumerate(tokens.lengths)]
    outputs = await computed(service, model, worker, rows)
    kind = "logits" if fields.raw_scores else "scores"
    scores = np.stack([output[kind] for output in outputs])[:, 0]
    # A stable sort keeps documents with equal scores in the order of the request.
    best = np.argsort(-scores, kind="stable")[: fields.top_n].tolist()
    # At most one of these options is set, because each is valid for one format.
    num_names = 2 + fields.return_text + fields.return_documents
    names = RESULTS[fields.field][:num_names]
    is_list = fields.documents is None
    results: list[JsonValue] = []
    for i in best:
        text = pairs[i][1]
        row = (i, float(scores[i]), text if is_list else {"text": text})
        results.append(dict(zip(names, row, strict=False)))
    if is_list:
        return results
    truncated = f"{num_truncated:,} pairs truncated to {scorer.max_length:,} tokens"
    warnings: list[JsonValue] = [truncated] * bool(num_truncated)
    return {
        "model": model.name,
        "results": results,
        "usage": usage_of(rows),
        "meta": {"warnings": warnings},
    }


RERANK = tuple(
    Endpoint("POST", path, rerank, "The documents that fit a query best", RerankFields)
    for path in ("/rerank", "/v1/rerank")
)
"""The endpoints of this file."""
