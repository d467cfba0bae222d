"""Endpoints for the state of the server (models, health, metrics) and for tokenizing texts."""

import asyncio
import dataclasses
import json
import re

from starlette.responses import JSONResponse, Response

from ...data.chat_templates.chat_template import ChatTemplate
from ...data.common.fields import Checked, NonNegativeInt
from ...data.common.json_text import JsonObject, JsonValue
from .app import Endpoint, Service
from .fields import require_valid


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizeFields(Checked):
    """A text to tokenize."""

    model: str | None = None
    """The name of the model. Optional if the server has only one model."""
    prompt: str
    """The text."""
    add_special_tokens: bool = True
    """Whether to add the special tokens that the tokenizer puts around a text. If False, the name
    of a control token in the text, such as `<|endoftext|>`, is converted to this token. If True,
    such names are treated as ordinary text."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DetokenizeFields(Checked):
    """Tokens to decode."""

    model: str | None = None
    """The name of the model. Optional if the server has only one model."""
    tokens: tuple[NonNegativeInt, ...]
    """The ids of the tokens."""


async def list_models(service: Service, fields: None) -> JsonObject:
    """Answers `/v1/models`."""
    del fields
    data: list[JsonValue] = [
        {
            "id": model.name,
            "object": "model",
            "created": model.created,
            "owned_by": "flaxzoo",
            "kinds": list(model.workers),
            "max_model_len": model.front.max_length,
        }
        for model in service.models.values()
    ]
    return {"object": "list", "data": data}


async def health(service: Service, fields: None) -> Response:
    """Answers `/health` with status 200 after the warm-up, and with 503 before."""
    del fields
    status, code = ("ready", 200) if service.engine.is_ready else ("unavailable", 503)
    return JSONResponse({"status": status}, code)


async def show_metrics(service: Service, fields: None) -> Response:
    """Answers `/metrics`."""
    del fields
    return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def tokenize(service: Service, fields: TokenizeFields) -> JsonObject:
    """Answers `/tokenize`."""
    model = service.model(fields.model)
    tokenizer = model.front.tokenizer
    ids = await asyncio.to_thread(tokenizer.encode, fields.prompt, fields.add_special_tokens)
    # lm-evaluation-harness finds the ids of special tokens by their names.
    control = tokenizer.control_tokens().get(fields.prompt)
    if control is not None and not fields.add_special_tokens:
        ids = [control.id]
    return {"tokens": ids, "count": len(ids), "max_model_len": model.front.max_length}


async def detokenize(service: Service, fields: DetokenizeFields) -> JsonObject:
    """Answers `/detokenize`."""
    tokenizer = service.model(fields.model).front.tokenizer
    greatest = max(fields.tokens, default=0)
    message = f"tokens must be below {tokenizer.vocab_size:,}, got {greatest}"
    require_valid(greatest < tokenizer.vocab_size, message, "tokens")
    return {"prompt": await asyncio.to_thread(tokenizer.decode, fields.tokens)}


async def tokenizer_info(service: Service, fields: None) -> JsonObject:
    """Answers `/tokenizer_info` for the first model."""
    del fields
    tokenizer = next(iter(service.models.values())).front.tokenizer
    special = dataclasses.asdict(tokenizer.special_ids)
    named: JsonObject = {
        f"{name}_token": None if token is None else tokenizer.token(token)
        for name, token in special.items()
    }
    template = plain_template(tokenizer.chat_template)
    return {**named, "vocab_size": tokenizer.vocab_size, "chat_template": template}


def plain_template(template: ChatTemplate) -> str:
    """Returns a chat template that Jinja can render without the extensions of transformers.

    The template sets the names of special tokens. The tag `{% generation %}`, which marks generated
    text, is replaced by a tag without effect.
    """
    source = template.source
    # A tag may contain signs that remove white space, as in `{%- generation -%}`.
    for tag, same in (("generation", "if true"), ("endgeneration", "endif")):
        source = re.sub(rf"({{%[-+]?\s*){tag}(\s*[-+]?%}})", rf"\1{same}\2", source)
    tokens = (f"{{%- set {role} = {json.dumps(x)} %}}" for role, x in template.tokens.items())
    return "".join((*tokens, source))


STATUS = (
    Endpoint("GET", "/health", health, "200 when the server is warm, else 503", is_open=True),
    Endpoint("GET", "/metrics", show_metrics, "Figures for Prometheus"),
    Endpoint("GET", "/v1/models", list_models, "The served models"),
    Endpoint("POST", "/tokenize", tokenize, "The tokens of a text", TokenizeFields),
    Endpoint("POST", "/detokenize", detokenize, "The text of tokens", DetokenizeFields),
    Endpoint("GET", "/tokenizer_info", tokenizer_info, "The special tokens of the first model"),
)
"""The endpoints of this file."""
