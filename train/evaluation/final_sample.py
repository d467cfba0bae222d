"""Generates the sample text of a finished run."""

from pathlib import Path

from ...models.heads.specs import HEADS
from ...models.text.fill_mask import MaskFiller
from ...models.text.generate import TextGenerator
from ..runs.load_run import open_run


def final_sample(folder: str | Path, prompt: str, seed: int) -> str:
    """Returns a continuation or a translation of `prompt`, or the candidates for its [MASK]s."""
    config = open_run(folder)[0]
    # The model's head determines whether to fill masks, to translate or to continue the prompt.
    if HEADS[config.model.head].predicts_masked:
        gaps = MaskFiller.of_run(folder)(prompt, top_k=5)
        lines = [", ".join(f"{c.token} {c.probability:.3f}" for c in gap) for gap in gaps]
        return "\n".join([prompt, *lines])
    if config.model.head == "seq2seq_lm":
        from ...models.text.translate import TextTranslator

        [[translation]] = TextTranslator.of_run(folder)([prompt])
        return f"{prompt}\n{translation.text}"
    samples = TextGenerator.of_run(folder)(
        [prompt],
        max_new_tokens=100,
        do_sample=True,
        temperature=0.8,
        top_p=0.95,
        seed=seed,
    )
    return prompt + samples[0].text
