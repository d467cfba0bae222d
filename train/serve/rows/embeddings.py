"""The endpoint for vectors of texts, as in OpenAI's interface."""

import asyncio
import base64
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np

from ....data.common.fields import Checked, NonNegativeInt, PositiveInt
from ....data.common.json_text import JsonObject
from ....models.config import TransformerConfig
from ....models.hf.sentence_modules import kind_of
from ....models.hub import local_folder
from ....models.text.embed import TextEmbedder, TextRow, normalized
from ....models.text.text_model import Loaded
from ..app import Endpoint, Service
from ..fields import require_valid
from .inputs import as_list, check_not_truncated
from .worker import Row, RowFunction, computed, usage_of

KIND = "embedding"
Ids: TypeAlias = tuple[NonNegativeInt, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbeddingFields(Checked):
    """Texts to embed."""

    model: str | None = None
    """The name of the model. Optional if the server has only one model."""
    input: str | tuple[str, ...] | Ids | tuple[Ids, ...]
    """A text, a list of texts, the token ids of a text, or a list of lists of token ids. Token ids
    are used unchanged, without a prompt and without additional special tokens."""
    encoding_format: Literal["float", "base64"] = "float"
    """float: lists of numbers. base64: the bytes of little-endian float32 numbers."""
    dimensions: PositiveInt | None = None
    """The number of leading dimensions to keep. If the full vectors have norm 1, the shorter
    vectors are scaled to norm 1 again."""
    prompt_name: str | None = None
    """The name of the model's prompt that precedes each text; "" for no prompt. Defaults to the
    model's default prompt."""
    truncate: bool = False
    """Whether to truncate texts that exceed the model's maximum length. By default, they are
    rejected."""
    user: str | None = None
    """Ignored."""


def fits(config: TransformerConfig) -> bool:
    """Returns whether a model embeds texts."""
    return config.head in TextEmbedder.heads


def embedding_function(folder: str | Path, loaded: Loaded) -> RowFunction | None:
    """Returns the function that embeds rows of text, or None if the folder has a cross-encoder."""
    if kind_of(local_folder(folder)) == "CrossEncoder":
        return None
    embedder = TextEmbedder.of_run(folder, loaded=loaded)

    def parts(rows: Sequence[TextRow]) -> Iterator[list[np.ndarray]]:
        yield list(embedder.vectors(rows))

    def filler(length: int) -> TextRow:
        return TextRow([0] * length)

    return RowFunction(embedder, parts, embedder.max_length, filler)


async def embed(service: Service, fields: EmbeddingFields) -> JsonObject:
    """Answers `/v1/embeddings`."""
    model, worker = service.worker(fields.model, KIND)
    service.engine.check_admission()
    embedder: TextEmbedder = worker.front
    width, kept = embedder.width, fields.dimensions or embedder.width
    message = f"dimensions must be at most {width:,}, got {kept:,}"
    require_valid(kept <= width, message, "dimensions")
    encoded = await asyncio.to_thread(_rows, embedder, fields, worker.settings.max_inputs)
    rows = [Row(row, len(row.ids)) for row in encoded]
    vectors = np.stack(await computed(service, model, worker, rows))[:, :kept]
    # Removing dimensions changes the norm of a vector.
    if kept < width and embedder.settings.has_length_1:
        vectors = normalized(vectors)
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": i, "embedding": ENCODINGS[fields.encoding_format](x)}
            for i, x in enumerate(vectors)
        ],
        "model": model.name,
        "usage": usage_of(rows),
    }


def to_base64(vector: np.ndarray) -> str:
    """Returns the bytes of little-endian float32 numbers in base64."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


ENCODINGS = {"float": np.ndarray.tolist, "base64": to_base64}
"""Functions that convert a vector to JSON, by encoding_format."""


def _rows(embedder: TextEmbedder, fields: EmbeddingFields, most: int) -> list[TextRow]:
    """Returns the rows of the input.

    Raises:
        ApiError: the input is empty, a text is too long or has no tokens, or a token id is unknown.
    """
    inputs = as_list(fields.input, "input", most)
    if isinstance(inputs[0], str):
        rows, num_truncated = embedder.encode(inputs, fields.prompt_name)
        check_not_truncated(fields.truncate, num_truncated, len(rows), embedder.max_length)
    else:
        rows = _of_ids(embedder, inputs, truncate=fields.truncate)
    empty = next((i for i, row in enumerate(rows) if not row.ids), None)
    require_valid(empty is None, f"input[{empty}] has no token: leave it out", "input")
    return rows


def _of_ids(
    embedder: TextEmbedder, inputs: Sequence[Sequence[int]], *, truncate: bool
) -> list[TextRow]:
    longest, size = embedder.max_length, embedder.tokenizer.vocab_size
    greatest = max(max(ids, default=0) for ids in inputs)
    message = f"the ids of input must be below {size:,}, got {greatest}"
    require_valid(greatest < size, message, "input")
    num_truncated = sum(len(ids) > longest for ids in inputs)
    check_not_truncated(truncate, num_truncated, len(inputs), longest)
    return [TextRow(embedder.tokenizer.truncated(list(ids), longest)) for ids in inputs]


EMBEDDINGS = (Endpoint("POST", "/v1/embeddings", embed, "The vectors of texts", EmbeddingFields),)
"""The endpoint of this file."""
