"""The command `flaxzoo attend`."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from ....data.common.fields import PositiveInt, Suffix
from ....data.common.json_text import to_json
from ...compilation_cache import enable_compilation_cache
from ..options import Positional, log, parse
from .arguments import ModelArguments

if TYPE_CHECKING:
    from ....models.text.attend import Attention


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttendArguments(ModelArguments):
    """Prints what each word of a text attends to: the words with the largest attention weights.

    If a word has several tokens, its weights as a query are the mean over the tokens, and its
    weights as a key are the sum over the tokens.
    """

    text: Annotated[str, Positional("TEXT")]
    """The text; for an encoder-decoder, the source text."""
    word: str | None = None
    """Show only what this word attends to. The table has a column for each layer; with --layer, it
    has a column for each head of this layer."""
    layer: PositiveInt | None = None
    """Show only this layer, counted from 1. By default, show the mean over layers."""
    head: PositiveInt | None = None
    """Show only this head, counted from 1. By default, show the mean over heads."""
    top_k: PositiveInt | None = None
    """The number of attended words to show, in descending order of weight. By default 3, or 10 with
    --word."""
    tokens: bool = False
    """Show tokens instead of words."""
    target: str | None = None
    """For an encoder-decoder: the translation. Defaults to the model's translation."""
    part: Literal["cross", "encoder", "decoder"] | None = None
    """For an encoder-decoder: attention from the target to the source (cross, the default), or
    within the source or the target."""
    output: Annotated[Path, Suffix((".png",))] | None = None
    """Also draw the weights as a PNG with a panel for each layer; with --layer, it has a panel for
    each head of this layer."""
    json: bool = False
    """Print one JSON object with the weights [queries, keys] instead of a table."""


def attend_command(arguments: list[str]) -> None:
    """Runs `flaxzoo attend RUN TEXT`."""
    parsed = parse(AttendArguments, arguments, "flaxzoo attend")
    enable_compilation_cache()
    from ....data.common.atomic_io import check_output_path, write_file
    from ....models.text.attend import TextAttention, draw_attention

    if parsed.output is not None:
        # Check the path before the model is loaded, to fail fast.
        check_output_path(parsed.output, "-")
    # Compute the weights of all layers and heads; the options choose which are shown.
    attend = TextAttention.of_run(parsed.run, step=parsed.step, log=log, ema=parsed.ema)
    attention = attend(parsed.text, target=parsed.target, part=parsed.part, by_token=parsed.tokens)
    if parsed.json:
        weights = attention.mean(parsed.layer, parsed.head)
        chosen = attention.places(parsed.word) if parsed.word else range(len(attention.queries))
        print(
            to_json(
                {
                    "queries": [attention.queries[i] for i in chosen],
                    "keys": attention.keys,
                    "weights": [weights[i].tolist() for i in chosen],
                }
            )
        )
    elif parsed.word is None:
        _print_all(attention, parsed)
    else:
        _print_word(attention, parsed, parsed.word)
    if parsed.output is not None:
        write_file(parsed.output, draw_attention(attention, parsed.layer, parsed.head))
        log(f"drawn: {parsed.output}")


def _print_all(attention: "Attention", parsed: AttendArguments) -> None:
    """Prints a line for each word, with the words that it attends to most."""
    width = max(map(len, attention.queries))
    for query, row in zip(
        attention.queries, attention.mean(parsed.layer, parsed.head), strict=True
    ):
        # A weight of 0 belongs to a masked key.
        best = [i for i in (-row).argsort(kind="stable")[: parsed.top_k or 3] if row[i] > 0]
        print(f"{query:<{width}}  " + "  ".join(f"{attention.keys[i]} {row[i]:.3f}" for i in best))


def _print_word(attention: "Attention", parsed: AttendArguments, word: str) -> None:
    """Prints what each occurrence of a word attends to, with columns for layers or heads."""
    weights = attention.chosen(parsed.layer, parsed.head)  # [layers, heads, Q, K]
    # The table has a column for each layer (its mean over heads), or for each head of the chosen
    # layer.
    if parsed.layer is None:
        name, columns, first = "layer", weights.mean(axis=1), 1
    else:
        name, columns, first = "head", weights[0], parsed.head or 1
    titles = [f"{f'{name} {number}':>8}" for number in range(first, first + len(columns))]
    width = max(4, *map(len, attention.keys))
    for index in attention.places(word):
        print(f"{attention.queries[index]}, word {index + 1} of {len(attention.queries)}")
        print("  ".join([f"{'word':<{width}}", f"{'mean':>6}", *titles]))
        mean = columns[:, index].mean(axis=0)
        for i in (-mean).argsort(kind="stable")[: parsed.top_k or 10]:
            values = [f"{value:8.3f}" for value in columns[:, index, i]]
            print("  ".join([f"{attention.keys[i]:<{width}}", f"{mean[i]:6.3f}", *values]))
