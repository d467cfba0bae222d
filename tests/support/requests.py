"""Requests for tokens, in a line."""

import dataclasses

from flaxzoo import models

SEARCH = {field.name for field in dataclasses.fields(models.BeamSearch)}


def beams(**fields):
    """A request for a beam search: fields of `BeamSearch` and of `GenerationRequest`."""
    method = models.BeamSearch(**{name: x for name, x in fields.items() if name in SEARCH})
    rest = {name: x for name, x in fields.items() if name not in SEARCH}
    if not rest.keys() & {"max_new_tokens", "max_extra_tokens"}:
        rest["max_extra_tokens"] = 50
    if "banned" in rest:
        rest["banned"] = tuple(map(tuple, rest["banned"]))
    return models.GenerationRequest(method=method, **rest)


def sampled(number, method=None, banned=(), **fields):
    """A request for `number` tokens, sampled among all by default."""
    method = models.Sampling() if method is None else method
    banned = tuple(map(tuple, banned))
    return models.GenerationRequest(method=method, max_new_tokens=number, banned=banned, **fields)
