"""Creates templates, which define the special tokens that are put around one or two texts."""

import re
from collections.abc import Callable
from typing import Literal, TypeAlias

import tokenizers
from tokenizers import processors

from ..folder import Settings
from ..sentencepiece_model import when

Template: TypeAlias = Callable[[tokenizers.Tokenizer, Settings], processors.PostProcessor | None]
"""A function that creates the template of a tokenizer, which must have all special tokens."""


def _with_id(backend: tokenizers.Tokenizer, name: str) -> tuple[str, int]:
    id = backend.token_to_id(name)
    assert id is not None, name  # all special tokens were added before
    return name, id


def layout(single: str, pair: str) -> Template:
    """Creates a template from the layouts of one text and of two texts.

    In a layout such as ``cls_token:0 $A:0``, ``$A`` and ``$B`` stand for the texts, and all other
    words are settings that name special tokens. The number after a colon is the token type.
    """

    def template(backend: tokenizers.Tokenizer, settings: Settings) -> processors.PostProcessor:
        # Only the names of roles consist of lowercase letters.
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
    """Returns the template of ``tokenizer.json``, or the one that settings request, if any."""
    if {"add_bos_token", "add_eos_token"}.isdisjoint(settings.values):
        return backend.post_processor
    return plain_template(backend, settings)


def plain_template(
    backend: tokenizers.Tokenizer, settings: Settings
) -> processors.PostProcessor | None:
    """Creates the template that the settings ``add_bos_token`` and ``add_eos_token`` request."""
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
    """Creates BERT's template, unless settings state whether to add begin and end tokens."""
    stated = {"add_bos_token", "add_eos_token"} & settings.values.keys()
    return (plain_template if stated else BERT_LAYOUT)(backend, settings)


def roberta_template(backend: tokenizers.Tokenizer, settings: Settings) -> processors.PostProcessor:
    """Creates RoBERTa's template, which also trims spaces from the offsets of tokens."""
    begin, end = settings.named("cls_token"), settings.named("sep_token")
    return processors.RobertaProcessing(
        _with_id(backend, end),
        _with_id(backend, begin),
        settings.flag("trim_offsets", True),
        settings.flag("add_prefix_space", False),
    )


def mpnet_template(backend: tokenizers.Tokenizer, settings: Settings) -> processors.PostProcessor:
    """Creates RoBERTa's template with the fixed settings of MPNet."""
    usual = settings.changed(trim_offsets=True, add_prefix_space=False)
    return roberta_template(backend, usual)


def language_layout(languages: tuple[str, ...], single: str, pair: str) -> Template:
    """Creates a template that contains the token of the text's language, ``src_lang``."""
    known: object = Literal[languages]  # pyright: ignore

    def template(
        backend: tokenizers.Tokenizer, settings: Settings
    ) -> processors.PostProcessor | None:
        language = settings.get("src_lang", known, "en_XX")
        return layout(single, pair)(backend, settings.changed(src_lang=language))

    return template
