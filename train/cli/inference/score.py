"""The commands `flaxzoo score` and `flaxzoo next`."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from ....data.errors import UserError
from ....data.io.json_text import to_json
from ...compilation_cache import enable_compilation_cache
from ..options import Positional, RunName, log, parse

if TYPE_CHECKING:
    from ...inference.score import TextScore, WordScore


@dataclasses.dataclass(frozen=True)
class ScoreArguments:
    """Prints the probability of each token of a text, its logarithm, and the running sum."""

    run: RunName
    """A run folder of a causal language model or an encoder-decoder, a folder in the Hugging Face
    format, or a name on the Hugging Face hub."""
    text: tuple[str, ...] = ()
    """Texts to score, each by itself."""
    input: str | None = None
    """A file to score instead, as one text without its last line feed; - reads standard input. For
    an encoder-decoder: one pair per line, the source and the target separated by a tab."""
    source: tuple[str, ...] = ()
    """The source of each --text, for an encoder-decoder."""
    lines: bool = False
    """Score each line of --input by itself."""
    stride: int | None = None
    """A text that is longer than the model reads is scored in windows of the model's length. Each
    scores this many further tokens. By default half the length."""
    begin: bool = True
    """Begin each text with the token that begins a document, if the vocabulary has one. Without it
    the first token has no probability."""
    each: bool = True
    """Print every token, not only the totals."""
    step: int | None = None
    """The checkpoint. By default the newest."""
    json: bool = False
    """Print one JSON object per text."""


def score_command(arguments: list[str]) -> None:
    """Runs `flaxzoo score RUN --text TEXT`."""
    parsed = parse(ScoreArguments, arguments, "flaxzoo score")
    if bool(parsed.text) == (parsed.input is not None):
        raise UserError("score needs either --text or --input: give one of them")
    if parsed.lines and parsed.input is None:
        raise UserError("--lines is for --input: leave it out, or give a file")
    enable_compilation_cache()
    from ...inference.score import TextScorer

    scorer = TextScorer.of_run(parsed.run, step=parsed.step, log=log)
    texts, sources = list(parsed.text), list(parsed.source)
    if parsed.input is not None:
        texts, sources = _read(parsed.input, parsed.lines or scorer.has_source, scorer.has_source)
    scores = scorer.score(texts, sources or None, stride=parsed.stride, begin=parsed.begin, log=log)
    for number, score in enumerate(scores):
        if parsed.json:
            each = [dataclasses.asdict(token) for token in score.tokens]
            shown = {"tokens": each} if parsed.each else {}
            print(to_json({"text": texts[number], **score.totals(), **shown}))
        else:
            print(
                *([""] if number and parsed.each else []), _table(score, each=parsed.each), sep="\n"
            )


def _read(path: str, by_line: bool, has_source: bool) -> tuple[list[str], list[str]]:
    """Returns the texts of a file, and their sources if it has any."""
    from ....data.io.files import input_lines

    if not by_line:
        whole = "".join(line for _, _, line in input_lines(path, keep_ends=True))
        return [whole.removesuffix("\n").removesuffix("\r")], []
    texts, sources = [], []
    for name, number, line in input_lines(path):
        source, tab, target = line.partition("\t")
        if has_source and not tab:
            raise UserError(
                f"{name} line {number} has no tab: write the source, a tab and the target"
            )
        texts.append(target if has_source else line)
        sources += [source] if has_source else []
    return texts, sources


def _table(score: "TextScore", *, each: bool) -> str:
    """Formats a text: a line for each token, and one for the totals."""
    lines = ["probability  log-probability        sum  token"] if each else []
    for token in score.tokens if each else ():
        if token.probability is None or token.log_probability is None:
            lines.append(f"{'-':>11}  {'-':>15}  {token.sum:9.4f}  {token.token}")
        else:
            lines.append(
                f"{token.probability:11.4g}  {token.log_probability:15.4f}  {token.sum:9.4f}  "
                f"{token.token}"
            )
    per = {"token": score.perplexity, "word": score.word_perplexity}
    per["character"] = score.character_perplexity
    perplexities = ", ".join(
        f"{'-' if value is None else format(value, ',.4g')} per {name}"
        for name, value in per.items()
    )
    lines.append(
        f"log-probability {score.log_probability:.4f} of {score.num_tokens:,} tokens; "
        f"perplexity {perplexities}"
    )
    return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class NextArguments:
    """Prints the most probable next tokens of a text, or the probabilities of given words."""

    run: RunName
    """A run folder of a causal language model or an encoder-decoder, a folder in the Hugging Face
    format, or a name on the Hugging Face hub."""
    text: Annotated[str, Positional("TEXT")]
    """The text so far."""
    top_k: int = 10
    """The number of tokens to print."""
    words: tuple[str, ...] = ()
    """Compare these words as the continuation instead. The probability of a word of several tokens
    is the product of its pieces'."""
    space: bool = True
    """Put a space between the text and each of --words, unless one of them has it already. With
    --no-space the word continues the last word of the text."""
    source: str | None = None
    """The source, for an encoder-decoder."""
    begin: bool = True
    """Begin the text with the token that begins a document, if the vocabulary has one, as score
    does."""
    step: int | None = None
    """The checkpoint. By default the newest."""
    json: bool = False
    """Print one JSON object instead of a table."""


def next_command(arguments: list[str]) -> None:
    """Runs `flaxzoo next RUN TEXT`."""
    parsed = parse(NextArguments, arguments, "flaxzoo next")
    enable_compilation_cache()
    from ...inference.score import TextScorer

    scorer = TextScorer.of_run(parsed.run, step=parsed.step, log=log)
    if parsed.words:
        print_words(
            scorer.compare(
                parsed.text,
                parsed.words,
                source=parsed.source,
                space=parsed.space,
                begin=parsed.begin,
                log=log,
            ),
            json=parsed.json,
        )
        return
    tokens = scorer.next_tokens(
        parsed.text, top_k=parsed.top_k, source=parsed.source, begin=parsed.begin, log=log
    )
    if parsed.json:
        print(to_json({"tokens": [dataclasses.asdict(token) for token in tokens]}))
        return
    for token in tokens:
        print(f"{token.probability:.4f}  {token.token}")


def print_words(words: Sequence["WordScore"], *, json: bool) -> None:
    """Prints words with their probabilities, the most probable first, and how they compare."""
    ranked = sorted(words, key=lambda word: -word.log_probability)
    if json:
        print(to_json({"words": [dataclasses.asdict(word) for word in ranked]}))
        return
    for word in ranked:
        print(f"{word.probability:.4g}  {word.word:<16}  {' '.join(word.tokens)}")
    for one, other in itertools.pairwise(ranked):
        difference = one.log_probability - other.log_probability
        sign = ">" if difference > 0 else "="
        times = f"{math.exp(difference):,.4g}" if difference < 700 else "over 1e+304"
        print(f"p({one.word}) {sign} p({other.word}), {times} times")
