"""The command `flaxzoo generate`."""

import dataclasses
import sys
from typing import TYPE_CHECKING

from ....data.common.errors import UserError
from ...compilation_cache import enable_compilation_cache
from ..options import RunName, log, parse

if TYPE_CHECKING:
    from ....models.text.generate import TextGenerator

SEPARATOR = "\n----\n"
"""Printed between texts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodingArguments:
    """Options for decoding that several commands share."""

    max_new_tokens: int | None = None
    """Longest continuation, in tokens. By default 200. (A folder in the Hugging Face format, or a
    run imported from one, may set other defaults for this and the next options in
    generation_config.json.)"""
    do_sample: bool | None = None
    """Sample tokens; --no-do-sample takes the most probable token each time. By default tokens are
    sampled, unless the folder or another option says otherwise."""
    temperature: float | None = None
    """Below 1 makes the text more predictable, above 1 more varied; 0 always takes the most
    probable token. By default 1."""
    top_k: int | None = None
    """Sample from the k most probable tokens only. By default, or with 0, from all tokens."""
    top_p: float | None = None
    """Sample from the most probable tokens whose probabilities sum to p."""
    min_p: float | None = None
    """Sample from the tokens that are at least p times as probable as the best one."""
    repetition_penalty: float | None = None
    """Above 1 makes tokens that have already occurred less likely."""
    num_beams: int | None = None
    """Above 1 searches for the most probable continuations with this many beams instead of
    sampling."""
    length_penalty: float | None = None
    """With beams: above 0 favors longer continuations. By default 1."""
    num_return_sequences: int | None = None
    """Continuations of each prompt. By default 1."""
    stop_strings: tuple[str, ...] = ()
    """Strings that end a continuation."""
    seed: int = 0
    """Seed for sampling. The same seed gives the same text. If each prompt has a seed, this is the
    seed of the first prompt, and it increases by one with each prompt."""
    batch_size: int = 8
    """With many prompts: the number of completions generated at once. When one ends, the next
    begins."""
    assistant_model: str | None = None
    """A smaller model with the same tokenizer, named like RUN. It proposes tokens, and the model
    checks several at once. With temperature 0 the text stays the same; with sampling it changes,
    but has the same distribution. --step and --max-length apply only to RUN."""
    num_assistant_tokens: int | None = None
    """With --assistant-model: the number of tokens that it proposes at a time. By default 4."""
    step: int | None = None
    """The checkpoint. By default the newest."""
    max_length: int | None = None
    """The longest context, in tokens, which may exceed the length in training. By default as in
    training. A model whose positions are a table (learned ones) cannot exceed it."""

    def requested(self) -> dict[str, int | float]:
        """Returns the given options as keyword arguments of `models.generate`."""
        return {name: x for name in REQUESTED if (x := getattr(self, name)) is not None}


REQUESTED = (
    *("max_new_tokens", "do_sample", "temperature", "top_k", "top_p", "min_p"),
    *("repetition_penalty", "num_beams", "length_penalty", "num_return_sequences"),
)
"""Options that are arguments of `models.generate`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateArguments(DecodingArguments):
    """Continues prompts with a trained model."""

    run: RunName
    """A run folder, a folder in the Hugging Face format, or a name on the Hugging Face hub."""
    prompt: tuple[str, ...] = ("",)
    """The text to continue. Several prompts go through the model in one batch."""
    prompt_file: str | None = None
    """Complete the prompts of a file instead, each with a separate seed: one prompt per line, or
    .jsonl objects with "prompt" and optionally "seed", "stop_strings" and "max_new_tokens". Other
    fields are copied to the output. - reads lines from standard input."""
    json: bool = False
    """Print one JSON object instead of text. With --prompt-file one for each prompt: "prompt",
    "seed", and for each of its "completions" the text, why it ended ("finish_reason": stop, end or
    length), and the log-probabilities of the completion and of each token."""


def generate_command(arguments: list[str]) -> None:
    """Runs `flaxzoo generate RUN --prompt TEXT`."""
    parsed = parse(GenerateArguments, arguments, "flaxzoo generate")
    if parsed.prompt_file is not None and parsed.prompt != ("",):
        raise UserError("--prompt and --prompt-file are both given: leave one out")
    enable_compilation_cache()
    from ....data.common.progress import Progress
    from ....models.text.completions import completed_to_json, read_prompts
    from ....models.text.generate import completed_to_samples

    requested = parsed.requested()
    # Check the options before the model is loaded, to fail fast.
    check_requested(parsed)
    file = parsed.prompt_file
    prompts = list(parsed.prompt) if file is None else read_prompts(file)
    generator = open_generator(parsed, parsed.run)
    number = len(prompts) * (parsed.num_return_sequences or 1)
    # A single continuation is printed while it is generated.
    alone = file is None and not parsed.json and number == 1
    if file is None:
        # Prompts of one call are one batch, as in transformers: a stored `max_length` leaves all
        # of them what it leaves the longest.
        request = generator.request(parsed.prompt, **requested)
        requested["max_new_tokens"] = request.max_new_tokens or 0
        # A folder in the Hugging Face format may return several sequences by default.
        alone = alone and request.num_return_sequences == 1
    if alone:
        _write(parsed.prompt[0])
    with Progress(quiet=file is None).counter("completions", number) as advance:
        completed = generator.complete(
            prompts,
            stop_strings=parsed.stop_strings,
            seed=parsed.seed,
            batch_size=None if file is None else parsed.batch_size,
            on_text=_write if alone else None,
            on_batch=advance,
            log=log,
            **requested,
        )
    if alone:
        print()
    elif not parsed.json:
        texts = [each.prompt.text + one.text for each in completed for one in each.completions]
        print(SEPARATOR.join(texts))
    elif file is None:
        print(completed_to_samples(completed))
    else:
        print("\n".join(map(completed_to_json, completed)))
    log_acceptance(generator)


def open_generator(parsed: DecodingArguments, run: str) -> "TextGenerator":
    """Returns the generator of a command, with its draft model if one is given.

    Raises:
        FileNotFoundError: the run or checkpoint does not exist.
        UserError: a model does not continue texts, or the draft model does not match the model.
    """
    from ....models.text.generate import NUM_DRAFT_TOKENS, TextGenerator

    generator = TextGenerator.of_run(run, step=parsed.step, log=log, max_length=parsed.max_length)
    if parsed.assistant_model is None:
        return generator
    number = (
        NUM_DRAFT_TOKENS if parsed.num_assistant_tokens is None else parsed.num_assistant_tokens
    )
    try:
        return generator.with_draft(TextGenerator.of_run(parsed.assistant_model, log=log), number)
    except UserError as error:
        raise UserError(f"--assistant-model {parsed.assistant_model}: {error}") from error


def log_acceptance(generator: "TextGenerator") -> None:
    """Logs how many tokens of the draft model were accepted, if one was used."""
    if generator.acceptance is not None:
        log(str(generator.acceptance))


def check_requested(parsed: DecodingArguments) -> None:
    """Checks the options before any file is read.

    Raises:
        UserError: an option is out of range, or without effect.
    """
    if parsed.num_assistant_tokens is not None and parsed.assistant_model is None:
        raise UserError(
            f"--num-assistant-tokens {parsed.num_assistant_tokens} is for a draft model: give "
            "--assistant-model, or leave it out"
        )
    from ....models.decoding.generator import check_seed
    from ....models.text.generate import merged_request

    check_seed(parsed.seed or 0)
    # The folder may set the number of beams, so the length penalty cannot be checked yet without
    # --num-beams.
    known = parsed.requested()
    if not parsed.num_beams:
        known.pop("length_penalty", None)
    merged_request({}, known)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
