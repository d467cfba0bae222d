"""The commands `flaxzoo predict` and `flaxzoo fill-mask`."""

import dataclasses
from typing import Annotated

from ....data.common.fields import PositiveInt
from ....data.common.json_text import to_json
from ...compilation_cache import enable_compilation_cache
from ..options import Positional, check_applies, log, parse
from .arguments import ModelArguments
from .score import print_words


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictArguments(ModelArguments):
    """Prints the predictions of a fine-tuned model, one JSON object per line."""

    input: str
    """The file of examples; - reads standard input. Sequence classification: one text per line, or
    two separated by a tab; JSON lines, or a .csv or .tsv table with a line of names, whose fields
    are text and text_b, premise and hypothesis, or the like. Next-sentence prediction (a
    pretraining run): two texts separated by a tab. Token classification: a CoNLL file, whose first
    column has the words, or one text per line. Question answering: SQuAD's JSON, or JSON lines with
    "context" and "question". Multiple choice: JSON lines with "context" and "choices". The score of
    a regression is the unchanged output of the model. The score of a cross-encoder (a folder of
    sentence-transformers, or a run of the recipe rerank) is the output after the activation that
    CrossEncoder applies."""
    yes_no: bool = False
    """Score pairs of a query and a document with a language model that answers yes or no
    (Qwen3-Reranker). The score is the probability of yes after the prompt of Qwen3-Reranker."""
    instruction: str | None = None
    """With --yes-no: the instruction, which states when a document fits a query. Defaults to the
    instruction of Qwen3-Reranker: Given a web search query, retrieve relevant passages that answer
    the query."""


def predict_command(arguments: list[str]) -> None:
    """Runs `flaxzoo predict RUN --input FILE`."""
    parsed = parse(PredictArguments, arguments, "flaxzoo predict")
    check_applies(parsed, "instruction", to="yes_no")
    enable_compilation_cache()
    from ...evaluation.predict import predict, predict_yes_no

    step, ema = parsed.step, parsed.ema
    if parsed.yes_no:
        predicted = predict_yes_no(
            parsed.run, parsed.input, instruction=parsed.instruction, step=step, ema=ema, log=log
        )
    else:
        predicted = predict(parsed.run, parsed.input, step=step, ema=ema, log=log)
    for prediction in predicted:
        print(to_json(prediction))


@dataclasses.dataclass(frozen=True, kw_only=True)
class FillMaskArguments(ModelArguments):
    """Prints the most probable tokens for each [MASK] in a text, or compares given words."""

    text: Annotated[str, Positional("TEXT")]
    """A text with [MASK] in place of each missing token."""
    top_k: PositiveInt = 5
    """The number of tokens to print for each [MASK]."""
    words: tuple[str, ...] | None = None
    """Compare these words for the single [MASK] instead. A word of several tokens takes one mask
    for each token, filled from left to right; its probability is the product of the tokens'
    probabilities."""
    json: bool = False
    """Print one JSON object instead of a table."""


def fill_mask_command(arguments: list[str]) -> None:
    """Runs `flaxzoo fill-mask RUN TEXT`."""
    parsed = parse(FillMaskArguments, arguments, "flaxzoo fill-mask")
    enable_compilation_cache()
    from ....models.text.fill_mask import MaskFiller

    filler = MaskFiller.of_run(parsed.run, step=parsed.step, log=log, ema=parsed.ema)
    if parsed.words is not None:
        # If words are given, score these words instead of finding the most probable tokens.
        print_words(filler.compare(parsed.text, parsed.words), json=parsed.json)
        return
    masks = filler(parsed.text, top_k=parsed.top_k)
    if parsed.json:
        listed = [list(map(dataclasses.asdict, mask)) for mask in masks]
        print(to_json({"masks": listed}))
        return
    for mask in masks:
        for candidate in mask:
            print(f"{candidate.probability:.4f}  {candidate.token:<16}  {candidate.text}")
