"""The description of the server is a document of OpenAPI 3.1 and states every declared field."""

import dataclasses
import json
import re
from pathlib import Path

import jsonschema
import pytest
from flaxzoo.data.common.fields import PositiveInt
from flaxzoo.train.serve import page
from flaxzoo.train.serve.openapi import description, schema_of
from flaxzoo.train.serve.served import ENDPOINTS

DOCUMENT = json.loads(json.dumps(description(ENDPOINTS)))
SCHEMAS = DOCUMENT["components"]["schemas"]


def references(value):
    if isinstance(value, dict):
        yield from (value[name] for name in value if name == "$ref")
        value = [*value.values()]
    if isinstance(value, list):
        for one in value:
            yield from references(one)


def test_the_document_has_what_openapi_requires():
    assert re.fullmatch(r"3\.1\.\d", DOCUMENT["openapi"])
    assert {"title", "version"} <= DOCUMENT["info"].keys()
    assert DOCUMENT["components"]["securitySchemes"]["key"] == {"type": "http", "scheme": "bearer"}
    operations = [one for path in DOCUMENT["paths"].values() for one in path.values()]
    assert len({one["operationId"] for one in operations}) == len(operations) == len(ENDPOINTS)
    for path, methods in DOCUMENT["paths"].items():
        assert path.startswith("/")
        assert methods.keys() <= {"get", "post"}
        for operation in methods.values():
            assert operation["responses"]["200"]["description"]
            assert ("requestBody" in operation) == ("post" in methods)
    for reference in references(DOCUMENT):
        node = DOCUMENT
        for part in reference.removeprefix("#/").split("/"):
            node = node[part]


@pytest.mark.parametrize("endpoint", [x for x in ENDPOINTS if x.fields], ids=lambda x: x.path)
def test_every_field_has_a_schema_and_a_description(endpoint):
    schema = SCHEMAS[endpoint.fields.__name__]
    jsonschema.Draft202012Validator.check_schema(schema)
    names = [field.name for field in dataclasses.fields(endpoint.fields)]
    assert [*schema["properties"]] == names
    undescribed = [n for n, s in schema["properties"].items() if "description" not in s]
    assert not undescribed


def test_schemas_accept_what_the_fields_accept():
    validator = jsonschema.Draft202012Validator(SCHEMAS["EmbeddingFields"])
    for given in ("a", ["a"], [1, 2], [[1], [2]]):
        validator.validate({"input": given})
    for wrong in (
        {},
        {"input": {}},
        {"input": [-1]},
        {"input": "a", "dimensions": 0},
        {"inputs": ""},
    ):
        assert not validator.is_valid(wrong)
    assert schema_of(PositiveInt) == {"type": "integer", "minimum": 1}


def test_the_page_has_no_external_resources():
    html = Path(page.__file__).with_name("page.html").read_text(encoding="utf-8")
    assert not re.findall(r"https?://|//\w+\.|@import|url\(", html)
