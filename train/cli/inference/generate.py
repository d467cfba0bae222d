"""The command `flaxzoo generate`."""

import dataclasses
import sys

from ...compilation_cache import enable_compilation_cache
from ..options import RunName, log, parse


@dataclasses.dataclass(frozen=True)
class GenerateArguments:
    """Continues prompts with a trained model."""

    run: RunName
    """A run folder, a folder in the Hugging Face format, or a name on the Hugging Face hub."""
    prompt: tuple[str, ...] = ("",)
    """The text to continue. Several prompts go through the model in one batch."""
    max_new_tokens: int | None = None
    """Longest continuation, in tokens. By default 200. (A folder in the Hugging Face format, or a
    run imported from one, may set its own defaults for this and the next options in
    generation_config.json.)"""
    temperature: float | None = None
    """Below 1 makes the text more predictable, above 1 more varied; 0 always takes the most
    probable token. By default 1."""
    top_k: int | None = None
    """Sample from the k most probable tokens only. By default, or with 0, from all tokens."""
    top_p: float | None = None
    """Sample from the most probable tokens whose probabilities sum to p."""
    repetition_penalty: float | None = None
    """Above 1 makes tokens that have already occurred less likely."""
    num_beams: int | None = None
    """Above 1 searches for the most probable continuations with this many beams instead of
    sampling."""
    length_penalty: float | None = None
    """With beams: above 0 favors longer continuations. By default 1."""
    stop: tuple[str, ...] = ()
    """Strings that end a continuation."""
    num_samples: int | None = None
    """Continuations of each prompt. By default 1."""
    seed: int = 0
    """Seed for sampling. The same seed gives the same text."""
    step: int | None = None
    """The checkpoint. By default the newest."""
    max_length: int | None = None
    """The tokens that the model may look back on, also more than in training. By default as in
    training. A model whose positions are a table (learned ones) looks back on no others."""
    json: bool = False
    """Print one JSON object instead of text."""


def generate_command(arguments: list[str]) -> None:
    """Runs `flaxzoo generate RUN --prompt TEXT`."""
    parsed = parse(
        GenerateArguments,
        arguments,
        "flaxzoo generate",
        renamed={"num_return_sequences": "--num-samples"},
    )
    enable_compilation_cache()
    from ...inference.generate import TextGenerator, merged_request, samples_to_json

    requested = _requested(parsed)
    # Check the options before anything is read. The folder may set the number of beams, so without
    # --num-beams the length penalty cannot be checked yet.
    known = requested if parsed.num_beams else {**requested, "length_penalty": None}
    merged_request({}, {name: value for name, value in known.items() if value is not None})
    generator = TextGenerator.of_run(
        parsed.run, step=parsed.step, log=log, max_length=parsed.max_length
    )
    request = generator.request(parsed.prompt, **requested)
    alone = len(parsed.prompt) * request.num_return_sequences == 1
    streaming = alone and not parsed.json
    if streaming:
        _write(parsed.prompt[0])
    samples = generator.write(
        parsed.prompt,
        request,
        stop=parsed.stop,
        seed=parsed.seed,
        on_text=_write if streaming else None,
        log=log,
    )
    if parsed.json:
        print(samples_to_json(samples))
    elif streaming:
        print()
    else:
        print("\n----\n".join(sample.prompt + sample.text for sample in samples))


def _requested(parsed: GenerateArguments) -> dict[str, int | float]:
    """Returns the given options as keyword arguments of `models.generate`."""
    options = {
        "max_new_tokens": parsed.max_new_tokens,
        "temperature": parsed.temperature,
        "top_k": parsed.top_k,
        "top_p": parsed.top_p,
        "repetition_penalty": parsed.repetition_penalty,
        "num_beams": parsed.num_beams,
        "length_penalty": parsed.length_penalty,
        "num_return_sequences": parsed.num_samples,
    }
    return {name: value for name, value in options.items() if value is not None}


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
