"""The command `flaxzoo tokenizer train`."""

import dataclasses

from ....data.common.fields import PositiveInt, require
from ....data.tokenizers.training import TokenizerKind
from ..options import OutputPath, SourceName, log, parse


@dataclasses.dataclass(frozen=True)
class TokenizerArguments:
    """Trains a tokenizer on a source of text and saves it in a folder."""

    source: SourceName
    """builtin:python-docs, text:GLOB[#line|#block], jsonl:GLOB#field, parquet:GLOB#field,
    arrow:GLOB#field, tfds:NAME/CONFIG#field or hf:NAME/CONFIG#field."""
    output: OutputPath
    """The folder to create."""
    kind: TokenizerKind = "byte-bpe"
    """The kind of tokenizer."""
    vocab_size: PositiveInt | None = None
    """Number of tokens, including special tokens. The kind characters does not accept this
    option."""


def tokenizer_command(arguments: list[str]) -> None:
    """Runs `flaxzoo tokenizer train SOURCE OUTPUT`."""
    usage = "flaxzoo tokenizer train SOURCE OUTPUT [--kind KIND] [--vocab-size N]"
    if arguments[:1] in (["-h"], ["--help"]):
        arguments = ["train", "--help"]
    require(arguments[:1] == ["train"], f"flaxzoo tokenizer knows one action: train, as in {usage}")
    parsed = parse(
        TokenizerArguments,
        arguments[1:],
        "flaxzoo tokenizer train",
        renamed={"data.tokenizer.vocab_size": "--vocab-size", "data.tokenizer.kind": "--kind"},
    )
    require(
        not parsed.output.exists(), f"{parsed.output} exists: give a folder that does not exist"
    )
    from ....data.sources.load_documents import load_documents
    from ....data.tokenizers.training import TokenizerConfig, train_tokenizer

    # The tokenizer is trained on all documents; none are held out for validation.
    documents = load_documents(parsed.source, "train", validation_fraction=0.0)
    tokenizer = train_tokenizer(documents, TokenizerConfig(parsed.kind, parsed.vocab_size))
    tokenizer.save(parsed.output)
    log(f"{parsed.output}: {tokenizer.kind}, {tokenizer.vocab_size:,} tokens")
