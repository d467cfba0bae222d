"""Requests for tokens, in a line."""

from flaxzoo import models

PUBLISHED = {
    "num_beams": 4,
    "length_penalty": 0.6,
    "penalty_form": "gnmt",
    "early_stopping": "never",
}
"""The search of Vaswani et al. 2017."""


def beams(**fields):
    """A request for a beam search, the published one but for the given fields."""
    if not fields.keys() & {"max_new_tokens", "max_extra_tokens"}:
        fields["max_extra_tokens"] = 50
    if "bad_words_ids" in fields:
        fields["bad_words_ids"] = tuple(map(tuple, fields["bad_words_ids"]))
    return models.GenerationRequest(**PUBLISHED | fields)


def sampled(number, sampling=None, banned=(), **fields):
    """A request for `number` tokens, sampled among all by default."""
    fields = {**vars(sampling or models.Sampling()), "do_sample": True, **fields}
    banned = tuple(map(tuple, banned))
    return models.GenerationRequest(max_new_tokens=number, bad_words_ids=banned, **fields)
