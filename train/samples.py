"""What a finished run shows of itself."""

from pathlib import Path

from ..models.bert import WITH_MASKED_WORDS
from ..models.generation import Sampling
from .filling import MaskFiller
from .run import open_run
from .sampling import TextGenerator


def final_sample(folder: str | Path, prompt: str, seed: int) -> str:
    """A continuation of `prompt`, or what a masked language model puts into its gap."""
    config, _ = open_run(folder)
    if getattr(config.model, "head", None) in WITH_MASKED_WORDS:
        gaps = MaskFiller.of_run(folder)(prompt, top_k=5)
        lines = [", ".join(f"{c.token} {c.probability:.3f}" for c in gap) for gap in gaps]
        return "\n".join([prompt, *lines])
    samples = TextGenerator.of_run(folder)(
        [prompt],
        max_new_tokens=100,
        sampling=Sampling(temperature=0.8, top_p=0.95),
        seed=seed,
    )
    return prompt + samples[0].text
