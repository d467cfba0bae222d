"""Templates: where a tokenizer puts special tokens around one text and two texts."""

import re
from collections.abc import Callable
from typing import Literal, TypeAlias

import tokenizers
from tokenizers import processors

from ..folder import Settings
from ..sentencepiece_model import when

Template: TypeAlias = Callable[[tokenizers.Tokenizer, Settings], processors.PostProcessor | None]
"""Makes the template of a tokenizer that has all of its special tokens."""


def _with_id(backend: tokenizers.Tokenizer, name: str) -> tuple[str, int]:
    id = backend.token_to_id(name)
    assert id is not None, name  # all special tokens were added before
    return name, id


def layout(single: str, pair: str) -> Template:
    """Makes a template from layouts of one text and of two texts, such as ``cls_token:0 $A:0``.

    ``$A`` and ``$B`` are the texts; other words are settings that name special tokens. The number
    after a colon is the token type.
    """

    def template(backend: tokenizers.Tokenizer, settings: Settings) -> processors.PostProcessor:
        # The names of roles are the only words in lowercase.
        names = {role: settings.named(role) for role in re.findall("[a-z_]+", pair)}

        def written(layout: str) -> list[str]:
            return [re.sub("[a-z_]+", lambda role: names[role[0]], part) for part in layout.split()]

        ids = [_with_id(backend, name) for name in dict.fromkeys(names.values())]
        return processors.TemplateProcessing(
            single=written(single), pair=written(pair), special_tokens=ids
        )

    return template


BERT_LAYOUT = layout(
    "cls_token:0 $A:0 sep_token:0", "cls_token:0 $A:0 sep_token:0 $B:1 sep_token:1"
)
"""BERT's template."""


def stated_template(
    backend: tokenizers.Tokenizer, settings: Settings
) -> processors.PostProcessor | None:
    """Returns the template of ``tokenizer.json``, unless settings request begin and end tokens."""
    if {"add_bos_token", "add_eos_token"}.isdisjoint(settings.values):
        return backend.post_processor
    return plain_template(backend, settings)


def plain_template(
    backend: tokenizers.Tokenizer, settings: Settings
) -> processors.PostProcessor | None:
    """Makes the template that ``add_bos_token`` and ``add_eos_token`` request."""
    known = settings.by_role()
    begin, end = (
        when(settings.flag(f"add_{role}", False) and role in known, role)
        for role in ("bos_token", "eos_token")
    )
    one, other = (
        " ".join(f"{part}:{type}" for part in (*begin, text, *end))
        for type, text in enumerate(("$A", "$B"))
    )
    return layout(one, f"{one} {other}")(backend, settings)


def albert_template(
    backend: tokenizers.Tokenizer, settings: Settings
) -> processors.PostProcessor | None:
    """Makes BERT's template, unless settings request begin and end tokens."""
    stated = {"add_bos_token", "add_eos_token"} & settings.values.keys()
    return (plain_template if stated else BERT_LAYOUT)(backend, settings)


def roberta_template(backend: tokenizers.Tokenizer, settings: Settings) -> processors.PostProcessor:
    """Makes RoBERTa's template, which also trims the offsets of tokens."""
    begin, end = settings.named("cls_token"), settings.named("sep_token")
    return processors.RobertaProcessing(
        _with_id(backend, end),
        _with_id(backend, begin),
        settings.flag("trim_offsets", True),
        settings.flag("add_prefix_space", False),
    )


def mpnet_template(backend: tokenizers.Tokenizer, settings: Settings) -> processors.PostProcessor:
    """Makes RoBERTa's template with MPNet's fixed settings."""
    usual = settings.changed(trim_offsets=True, add_prefix_space=False)
    return roberta_template(backend, usual)


def language_layout(languages: tuple[str, ...], single: str, pair: str) -> Template:
    """Makes a template with the language ``src_lang`` of a text."""
    known: object = Literal[languages]  # pyright: ignore

    def template(
        backend: tokenizers.Tokenizer, settings: Settings
    ) -> processors.PostProcessor | None:
        language = settings.get("src_lang", known, "en_XX")
        return layout(single, pair)(backend, settings.changed(src_lang=language))

    return template
