"""The commands `flaxzoo score` and `flaxzoo next`."""

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from ....data.common.fields import PositiveInt
from ....data.common.json_text import to_json
from ...compilation_cache import enable_compilation_cache
from ..options import Positional, check_applies, check_one_given, log, parse
from .arguments import ContextArguments

if TYPE_CHECKING:
    from ....models.text.score import NextWord, TextScore, TokenScore


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreArguments(ContextArguments):
    """Prints the probability of texts under a model that generates text."""

    text: tuple[str, ...] = ()
    """The texts; or name a file with --input."""
    input: str | None = None
    """A file with one text on each line; - reads standard input."""
    whole: bool = False
    """Score all lines of --input as one text, without the last line feed."""
    source: tuple[str, ...] = ()
    """For a translation model: the source of each --text."""
    source_input: str | None = None
    """For a translation model: a file with the source of each line of --input."""
    each: bool = False
    """Print the probability of each token and the running sum of their logarithms."""
    stride: PositiveInt | None = None
    """A text that is longer than the context is scored in windows that start this many tokens
    apart. Defaults to half of the context. A smaller number gives each token more context."""
    json: bool = False
    """Print a JSON object for each text, with its tokens."""


def score_command(arguments: list[str]) -> None:
    """Runs `flaxzoo score RUN --text TEXT`."""
    parsed = parse(ScoreArguments, arguments, "flaxzoo score")
    check_one_given(parsed, "text", "input")
    check_one_given(parsed, "source", "source_input", least=0)
    check_applies(parsed, "whole", to="input")
    enable_compilation_cache()
    from ....data.common.files import read_lines, text_lines
    from ....models.text.score import TextScorer

    if parsed.input is None:
        texts = list(parsed.text)
    elif parsed.whole:
        # Keep all line feeds except the last line feed.
        lines = [line for _, _, line in text_lines(parsed.input, keep_ends=True)]
        texts = ["".join(lines).removesuffix("\n").removesuffix("\r")]
    else:
        texts = read_lines(parsed.input)
    # An encoder-decoder scores each text given its source.
    file = parsed.source_input
    sources = list(parsed.source) if file is None else read_lines(file)
    scorer = TextScorer.of_run(
        parsed.run, step=parsed.step, log=log, max_length=parsed.max_length, ema=parsed.ema
    )
    scores = scorer(texts, sources=sources, stride=parsed.stride, log=log)
    for score in scores:
        if parsed.json:
            print(to_json(_as_json(score)))
            continue
        # The columns of `_line`.
        if parsed.each:
            print("probability         ln       sum  token")
            for token in score.tokens:
                print(_line(token))
        print(
            f"ln Pr {score.log_probability:.4f}, {score.num_scored} tokens, perplexity "
            f"{score.perplexity:.2f} per token and {score.word_perplexity:.2f} per word, "
            f"{score.bits_per_byte:.3f} bits per byte: "
            f"{parsed.input if parsed.whole else score.text}"
        )


def _line(token: "TokenScore") -> str:
    if token.log_probability is None:
        return f"{'-':>11} {'-':>10} {token.total:9.4f}  {token.token}"
    return (
        f"{token.probability:11.6f} {token.log_probability:10.4f} {token.total:9.4f}  {token.token}"
    )


def _as_json(score: "TextScore") -> dict[str, object]:
    return {
        "text": score.text,
        "log_probability": score.log_probability,
        "tokens": score.num_scored,
        "perplexity": score.perplexity,
        "word_perplexity": score.word_perplexity,
        "bits_per_byte": score.bits_per_byte,
        "each": [
            {**dataclasses.asdict(token), "probability": token.probability}
            for token in score.tokens
        ],
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class NextArguments(ContextArguments):
    """Prints the most probable next tokens of a causal language model, with probabilities."""

    text: Annotated[str, Positional("TEXT")]
    """The beginning of a text."""
    top_k: PositiveInt = 10
    """The number of tokens to print."""
    words: tuple[str, ...] | None = None
    """Compare these words instead, by the probability that a space and the word follow the text.
    The probability of a word of several tokens is the product of the token probabilities."""
    json: bool = False
    """Print one JSON object instead of a table."""


def next_command(arguments: list[str]) -> None:
    """Runs `flaxzoo next RUN TEXT`."""
    parsed = parse(NextArguments, arguments, "flaxzoo next")
    enable_compilation_cache()
    from ....models.text.score import TextScorer

    scorer = TextScorer.of_run(
        parsed.run, step=parsed.step, log=log, max_length=parsed.max_length, ema=parsed.ema
    )
    if parsed.words is None:
        tokens = scorer.next_tokens(parsed.text, top_k=parsed.top_k)
        if parsed.json:
            print(to_json({"tokens": list(map(dataclasses.asdict, tokens))}))
            return
        for token in tokens:
            print(f"{token.probability:.6f}  {token.token}")
        return
    print_words(scorer.next_words(parsed.text, parsed.words), json=parsed.json)


def print_words(words: "Sequence[NextWord]", *, json: bool) -> None:
    """Prints words with their probabilities, the most probable first, and their ratios."""
    if json:
        listed = [
            {
                "word": word.word,
                "probability": word.probability,
                "log_probability": word.log_probability,
                "tokens": [token.token for token in word.tokens],
            }
            for word in words
        ]
        print(to_json({"words": listed}))
        return
    # The ratios compare each word with the most probable word.
    best = words[0].log_probability
    for word in words:
        ratio = "" if word is words[0] else f"  1/{_times(best - word.log_probability)} of the best"
        pieces = " ".join(token.token for token in word.tokens)
        print(f"{word.probability:.3e}  {word.word:<16} {pieces}{ratio}")


def _times(log_ratio: float) -> str:
    """Returns exp(log_ratio) with at most three digits. Large values do not overflow."""
    return f"{math.exp(log_ratio):.3g}" if log_ratio < 700 else f"e^{log_ratio:.0f}"
