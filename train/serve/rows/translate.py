"""The endpoint that translates texts by beam search."""

import asyncio
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ....data.common.fields import Checked, PositiveInt, without_none
from ....data.common.json_text import JsonObject
from ....models.config import TransformerConfig
from ....models.decoding.request import GenerationRequest, LengthPenalty, NewTokens
from ....models.text.text_model import Loaded
from ....models.text.translate import TextTranslator, Translation
from ..app import Endpoint, Service
from ..fields import require_valid
from .inputs import as_list
from .worker import Row, RowFunction, computed, usage_of

KIND = "translation"
PART = 8
"""The number of tokens that a search adds before the server continues with other work."""
MOST_BEAMS = 32
"""The maximum number of beams in a request. Each beam increases the memory of a batch."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TranslateFields(Checked):
    """Texts to translate. Missing settings default to the settings of the model."""

    model: str | None = None
    """The name of the model. Optional if the server has only one model."""
    input: str | tuple[str, ...]
    """A sentence, or a list of sentences that are translated separately."""
    num_beams: PositiveInt | None = None
    """The number of beams. If it is 1, decoding is greedy."""
    length_penalty: LengthPenalty | None = None
    """The log-probability of a translation is divided by its length to the power of this number."""
    max_tokens: NewTokens | None = None
    """The maximum number of tokens of a translation."""
    n: PositiveInt = 1
    """The number of translations of each text, at most `num_beams`."""
    truncate: bool = False
    """Whether to truncate texts that exceed the model's maximum length. By default, they are
    rejected."""

    def request(self, translator: TextTranslator) -> GenerationRequest:
        """Returns the settings of the search.

        Raises:
            UserError: a setting is out of range.
        """
        options = {
            "num_beams": self.num_beams,
            "length_penalty": self.length_penalty,
            "max_new_tokens": self.max_tokens,
        }
        request = translator.request_with({**without_none(options), "num_return_sequences": self.n})
        message = f"num_beams must be at most {MOST_BEAMS}, got {request.num_beams}"
        require_valid(request.num_beams <= MOST_BEAMS, message, "num_beams")
        return request


def fits(config: TransformerConfig) -> bool:
    """Returns whether a model translates."""
    return config.head in TextTranslator.heads


def translation_function(folder: str | Path, loaded: Loaded) -> RowFunction:
    """Returns the function that translates encoded texts which have the same settings."""
    translator = TextTranslator.of_run(folder, loaded=loaded)

    def parts(items: Sequence[Any]) -> Iterator[list[list[Translation]] | None]:
        return translator.search_in_parts([ids for ids, _ in items], items[0][1], PART)

    (ids,) = translator.encode(["a"])

    def filler(length: int) -> tuple[list[int], GenerationRequest]:
        return [ids[0]] * length, translator.request

    return RowFunction(translator, parts, translator.max_length, filler)


async def translate(service: Service, fields: TranslateFields) -> JsonObject:
    """Answers `/v1/translate`."""
    model, worker = service.worker(fields.model, KIND)
    service.engine.check_admission()
    translator: TextTranslator = worker.front
    texts = as_list(fields.input, "input", worker.settings.max_inputs)
    request = fields.request(translator)
    locations = [f"input[{i}]" for i in range(len(texts))]
    notes: list[str] = []

    def encode() -> list[list[int]]:
        return translator.encode(
            texts, locations=locations, truncate=fields.truncate, log=notes.append
        )

    ids = await asyncio.to_thread(encode)
    # A blank text has no tokens, and its translation is empty.
    rows = [Row((row, request), len(row), request, request.num_beams) for row in ids if row]
    results = iter(await computed(service, model, worker, rows))
    translated = [next(results) if row else [Translation("", 0.0, 0.0, 0)] for row in ids]
    written = sum(one.num_tokens for several in translated for one in several)
    return {
        "object": "list",
        "data": [
            {"index": i, "translations": list(map(dataclasses.asdict, several))}
            for i, several in enumerate(translated)
        ],
        "model": model.name,
        "notes": [*notes],
        "usage": usage_of(rows, written),
    }


TRANSLATE = (
    Endpoint("POST", "/v1/translate", translate, "Translations of texts", TranslateFields),
)
"""The endpoint of this file."""
