"""Describes the server in the OpenAPI 3.1 format, based on the table of endpoints.

The declared fields of an endpoint become a JSON Schema with the types, ranges, defaults and
docstrings of the dataclass.
"""

import dataclasses
import functools
import importlib.metadata
import math
from collections.abc import Callable, Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from ...data.common.fields import Range, field_docs, without_none
from .app import Endpoint, Service

Schema = dict[str, Any]

SCALARS: dict[object, Schema] = {
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    str: {"type": "string"},
    NoneType: {"type": "null"},
}
"""Maps types to schemas. Any other type has a schema that allows every value."""

ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def schema_of(hint: object) -> Schema:
    """Returns the JSON Schema of a type."""
    if dataclasses.is_dataclass(hint):
        return fields_schema(hint)
    arguments = get_args(hint)
    make = _GENERIC.get(get_origin(hint))
    return dict(SCALARS.get(hint, {})) if make is None else make(*arguments)


def fields_schema(cls: Any) -> Schema:
    """Returns the JSON Schema of a dataclass."""
    hints, docs = get_type_hints(cls, include_extras=True), field_docs(cls)
    fields = dataclasses.fields(cls)
    # If a field has no default, `default` and `default_factory` are both MISSING.
    required = [x.name for x in fields if x.default is x.default_factory]
    return {
        "type": "object",
        "description": " ".join((cls.__doc__ or "").split()),
        "properties": {
            field.name: {
                **schema_of(hints[field.name]),
                **_stated(description=docs.get(field.name), default=_json_default(field)),
            }
            for field in fields
        },
        **({"required": required} if required else {}),
        "additionalProperties": False,
    }


def description(endpoints: Sequence[Endpoint]) -> Schema:
    """Returns an OpenAPI document that describes the endpoints."""
    paths: dict[str, Schema] = {}
    schemas: dict[str, Schema] = {"Error": ERROR}
    for endpoint in endpoints:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint)
        if endpoint.fields is not None:
            schemas[endpoint.fields.__name__] = fields_schema(endpoint.fields)
    key = {"type": "http", "scheme": "bearer"}
    return {
        "openapi": "3.1.0",
        "info": {"title": "flaxzoo", "version": importlib.metadata.version("flaxzoo")},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": key}},
    }


_described = functools.lru_cache(maxsize=1)(description)


def _operation(endpoint: Endpoint) -> Schema:
    # For example, GET /v1/models has the identifier get_v1_models.
    words = endpoint.path.replace("_", "/").replace(".", "/").split("/")
    operation: Schema = {
        "operationId": "_".join(filter(None, [endpoint.method.lower(), *words])),
        "summary": endpoint.summary,
        "responses": {
            "200": {"description": "The answer"},
            "default": {
                "description": "An error in OpenAI's format",
                "content": _content("Error"),
            },
        },
        "security": [] if endpoint.is_open else [{"key": []}],
    }
    if endpoint.fields is not None:
        content = _content(endpoint.fields.__name__)
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _content(name: str) -> Schema:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}


def _stated(**values: Any) -> Schema:
    return without_none(values)


def _json_default(field: Any) -> Any:
    if field.default is dataclasses.MISSING:
        return None
    # A nested dataclass is an object.
    return vars(field.default) if hasattr(field.type, "__dataclass_fields__") else field.default


def _with_ranges(hint: object, *rules: object) -> Schema:
    schema = schema_of(hint)
    for rule in rules:
        if isinstance(rule, Range):
            bounds = {
                "minimum": rule.least,
                "exclusiveMinimum": rule.above,
                "maximum": rule.most,
                "exclusiveMaximum": rule.below,
            }
            schema |= {name: bound for name, bound in bounds.items() if math.isfinite(bound)}
    return schema


def _union(*hints: object) -> Schema:
    return {"anyOf": list(map(schema_of, hints))}


def _array(item: object, *rest: object) -> Schema:
    del rest  # `tuple[int, ...]`
    return {"type": "array", "items": schema_of(item)}


_GENERIC: Mapping[object, Callable[..., Schema]] = {
    Annotated: _with_ranges,
    Union: _union,
    UnionType: _union,
    Literal: lambda *values: {"enum": list(values)},
    tuple: _array,
    Sequence: _array,
    list: _array,
    Mapping: lambda _, value: {"type": "object", "additionalProperties": schema_of(value)},
    dict: lambda _, value: {"type": "object", "additionalProperties": schema_of(value)},
}


async def describe(service: Service, fields: None) -> Schema:
    """Answers `/openapi.json`."""
    del fields
    # Make the description only once: this endpoint needs no key, and reading the descriptions of
    # fields from source code is slow.
    return _described(tuple(service.endpoints))


OPENAPI = (Endpoint("GET", "/openapi.json", describe, "This description", is_open=True),)
"""The endpoint of this file."""
