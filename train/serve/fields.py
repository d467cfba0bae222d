"""The fields of requests, and the errors of the server.

The body of an endpoint is a dataclass that derives from `Checked`. The type of a field declares its
range, and its default applies to a request without the field. If an endpoint accepts only one value
of a field, the type is `Literal[value]`, so that an error about a different value names the field.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import TypeVar

from ...data.common.errors import UserError, misspelled
from ...data.common.fields import FieldError, make_record, without_none
from ...data.common.json_text import JsonObject

Fields = TypeVar("Fields")

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
}
"""The error type that OpenAI's clients expect for each HTTP status. For any other status, the type
depends on whether the status is at least 500."""


class ApiError(Exception):
    """An error that the client sees in OpenAI's format."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        *,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Creates the error.

        Args:
            status: the HTTP status.
            message: a single line that states what is wrong, the given value, and the remedy.
            param: the field of the request that is wrong, or None.
            code: a short name of the problem, for programs.
            headers: additional headers of the response, such as `Retry-After`.
        """
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> JsonObject:
        """The JSON of the error."""
        other = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, other),
                "param": self.param,
                "code": self.code,
            }
        }


def require_valid(
    condition: object,
    message: str,
    param: str | None = None,
    code: str | None = "invalid_value",
    *,
    status: int = 400,
) -> None:
    """Checks a value of a request.

    Args:
        condition: the condition that must be true.
        message: a single line for the client; see `ApiError`.
        param: the field of the request.
        code: a short name of the problem.
        status: the HTTP status.

    Raises:
        ApiError: the condition does not hold.
    """
    if not condition:
        raise ApiError(status, message, param, code)


def read_json(body: bytes) -> JsonObject:
    """Returns the object in the body of a request.

    Raises:
        ApiError: the body is not a JSON object in UTF-8, or a text in it cannot be encoded.
    """
    try:
        value = json.loads(body.decode(), parse_constant=_refuse_constant)
        # A single surrogate is valid in JSON, but it cannot be encoded as text.
        if b"\\u" in body:
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0] if isinstance(error, json.JSONDecodeError) else ""
        kinds = {
            UnicodeDecodeError: "is not UTF-8",
            UnicodeEncodeError: "has half of a surrogate pair",
        }
        problem = kinds.get(type(error), f"is not valid JSON {reason}".rstrip())
        raise ApiError(400, f"the body {problem}: send a JSON object in UTF-8") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the body must be a JSON object, got {type(value).__name__}")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def read_fields(cls: type[Fields], body: Mapping[str, object]) -> Fields:
    """Returns the fields of a request. A field with the value null is treated as missing.

    Args:
        cls: the dataclass that declares the fields.
        body: the fields by name.

    Raises:
        ApiError: a field is unknown or missing, or has a value that is not allowed.
    """
    values = without_none(body)
    known = [field.name for field in dataclasses.fields(cls)]  # pyright: ignore
    # Report unknown fields first, because a misspelled field would otherwise be reported as
    # missing.
    unknown = next((name for name in values if name not in known), None)
    if unknown is not None:
        unknown = unknown[:100]
        similar = misspelled(unknown, known)
        remedy = f"did you mean {similar}?" if similar else "leave it out"
        message = f"the field {unknown!r} is not supported here: {remedy}"
        raise ApiError(400, message, unknown, "unsupported_field")
    try:
        return make_record(cls, values)
    except FieldError as error:
        raise ApiError(400, str(error), error.field, "invalid_value") from None
    except RecursionError:
        message = "the body has too many levels of lists: send fewer"
        raise ApiError(400, message, code="invalid_value") from None
    except UserError as error:
        # An error about several fields does not state which field is wrong, so report the field
        # that the message names first.
        name = next(filter(known.__contains__, str(error).split()), None)
        raise ApiError(400, str(error), name, "invalid_value") from None
