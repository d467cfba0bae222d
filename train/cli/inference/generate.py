"""The command `flaxzoo generate`."""

import dataclasses
import sys
from typing import TYPE_CHECKING

from ....data.common.errors import UserError
from ....data.common.fields import without_none
from ...compilation_cache import enable_compilation_cache
from ..options import check_applies, check_one_given, log, parse
from .arguments import DecodingArguments

if TYPE_CHECKING:
    from ....models.text.generate import TextGenerator

SEPARATOR = "\n----\n"
"""The line that is printed between texts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateArguments(DecodingArguments):
    """Continues prompts with a trained model."""

    prompt: tuple[str, ...] = ("",)
    """The text to continue. Several prompts go through the model in one batch."""
    prompt_file: str | None = None
    """Continue the prompts in a file instead, each with a separate seed: one prompt per line, or
    .jsonl objects with "prompt" and optionally "seed", "stop_strings" and "max_new_tokens". Other
    fields are copied to the output. - reads lines from standard input."""
    json: bool = False
    """Print one JSON object instead of text. With --prompt-file, print one object for each prompt,
    with "prompt", "seed" and "completions". Each completion has its text, the reason why it ended
    ("finish_reason": stop, end or length), and the log-probabilities of the completion and of each
    token."""


def generate_command(arguments: list[str]) -> None:
    """Runs `flaxzoo generate RUN --prompt TEXT`."""
    parsed = parse(GenerateArguments, arguments, "flaxzoo generate")
    check_one_given(parsed, "prompt", "prompt_file", least=0)
    enable_compilation_cache()
    from ....data.common.progress import Progress, ignore
    from ....models.text.completions import completed_to_json, read_prompts
    from ....models.text.generate import completed_to_samples

    requested = parsed.requested()
    # Check the options before the model is loaded, to fail fast.
    check_requested(parsed)
    file = parsed.prompt_file
    prompts = list(parsed.prompt) if file is None else read_prompts(file)
    generator = open_generator(parsed, parsed.run)
    number = len(prompts) * (parsed.num_return_sequences or 1)
    alone = False
    if file is None:
        # The prompts of one call are one batch, as in transformers. A stored `max_length` therefore
        # allows every prompt as many new tokens as the longest prompt.
        request = generator.request(parsed.prompt, **requested)
        requested["max_new_tokens"] = request.max_new_tokens or 0
        # A single continuation is printed while it is generated. A folder in the Hugging Face
        # format may request several sequences by default, so check the number of sequences in the
        # request.
        alone = not parsed.json and len(prompts) * request.num_return_sequences == 1
    if alone:
        _write(parsed.prompt[0])
    with Progress(quiet=file is None).counter("completions", number) as advance:
        completed = generator.complete(
            prompts,
            stop_strings=parsed.stop_strings,
            seed=parsed.seed,
            batch_size=None if file is None else parsed.batch_size,
            on_text=_write if alone else ignore,
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
    from ....models.text.generate import TextGenerator

    generator = TextGenerator.of_run(
        run, step=parsed.step, log=log, max_length=parsed.max_length, ema=parsed.ema
    )
    if parsed.assistant_model is None:
        return generator
    options = without_none({"num_tokens": parsed.num_assistant_tokens})
    try:
        draft = TextGenerator.of_run(parsed.assistant_model, log=log)
        return generator.with_draft(draft, **options)
    except UserError as error:
        raise UserError(f"--assistant-model {parsed.assistant_model}: {error}") from error


def log_acceptance(generator: "TextGenerator") -> None:
    """Logs how many tokens of the draft model were accepted, if one was used."""
    if generator.acceptance is not None:
        log(str(generator.acceptance))


def check_requested(parsed: DecodingArguments) -> None:
    """Checks the options before any file is read.

    Raises:
        UserError: an option is out of range or would have no effect.
    """
    check_applies(parsed, "num_assistant_tokens", to="assistant_model")
    from ....models.text.generate import merged_request

    # The folder may set the number of beams, so the length penalty cannot be checked yet without
    # --num-beams.
    known = parsed.requested()
    if not parsed.num_beams:
        known.pop("length_penalty", None)
    merged_request({}, known)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
