"""Ask whether pretraining helps a small T5 to translate, at equal steps of fine-tuning.

    python tests/benchmarks/pretraining.py OUTPUT --pairs train.en.gz,train.de.gz \\
        --validation val.en.gz,val.de.gz [--seeds 0 1 2] [--cases scratch spans-0.5]

Pretraining reads the sentences of both sides, each by itself, and no pairs. All cases share a
vocabulary, which is trained on both sides, and the pairs, the batches and their order (a seed
decides all three with the initial values). `scratch` begins with random parameters, `spans-R`
after span corruption that drops a fraction R of the tokens (`t5-quickstart`), `denoising` after
texts that are restored as a whole; all three are the recipe `text-to-text`. `transformer` is the
recipe `multi30k-en-de` in the same sizes. Prints a row of a table for each case and seed: the loss
on held-out pairs in nats per token, and BLEU and chrF of greedy translations.
"""

import argparse
import dataclasses
import gzip
import time
from collections.abc import Sequence
from pathlib import Path

import sacrebleu
from flaxzoo import data, models, train

CASES = ("scratch", "spans-0.15", "spans-0.5", "denoising", "transformer")
COLUMNS = ("case", "seed", "loss of pretraining", "loss", "BLEU", "chrF", "seconds")


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What all cases share."""

    output: Path
    pairs: str
    validation: str
    size: str
    """Layers of each half x width."""
    pretraining_steps: int
    steps: int
    translated: int
    learning_rate: float | None
    """The peak in fine-tuning a T5; None: the recipe's."""

    def documents(self, pairs: str) -> str:
        """Returns the name of both sides of some pairs as texts of a line each."""
        return " + ".join(f"text:{file}#line" for file in pairs.split(","))

    def in_size(self, recipe: train.TrainConfig, steps: int, seed: int) -> train.TrainConfig:
        """Returns a recipe in the sizes of the comparison."""
        layers, width = map(int, self.size.split("x"))
        sizes = {"num_layers": layers, "d_model": width, "num_heads": 4, "d_ff": 2 * width}
        heads = {"d_head": width // 4} if hasattr(recipe.model, "d_head") else {}
        warmup = min(recipe.optimizer.warmup_steps, steps // 4)
        return dataclasses.replace(
            recipe,
            model=dataclasses.replace(recipe.model, dropout_rate=0.0, **sizes, **heads),
            optimizer=dataclasses.replace(recipe.optimizer, warmup_steps=warmup),
            label_smoothing=0.0,
            batch_size=16,
            steps=steps,
            evaluate_every=steps,
            checkpoint_every=steps,
            sample_prompt=None,
            seed=seed,
        )

    @property
    def tokenizer(self) -> data.TokenizerConfig:
        """The vocabulary of all cases, which is trained if it is not there yet."""
        folder = self.output / "tokenizer"
        if not folder.is_dir():
            self.texts(0.15, None).make_tokenizer().save(folder)
        return data.TokenizerConfig(path=str(folder))

    def texts(
        self, density: float, tokenizer: data.TokenizerConfig | None
    ) -> data.SpanCorruptionData:
        """Returns both sides as texts with gaps."""
        return data.SpanCorruptionData(
            source=self.documents(self.pairs),
            validation=self.documents(self.validation),
            length=96,
            noise_density=density,
            tokenizer=tokenizer
            or data.TokenizerConfig(kind="sentencepiece-unigram", vocab_size=2100),
        )

    def pretrain(self, case: str, seed: int) -> tuple[Path | None, float | None]:
        """Pretrains, unless a case does not; returns the run and its loss."""
        if case in ("scratch", "transformer"):
            return None, None
        texts = self.texts(float(case.partition("-")[2] or 0.15), self.tokenizer)
        if case == "denoising":
            texts = data.DenoisingData(
                source=texts.source,
                validation=texts.validation,
                length=96,
                tokenizer=texts.tokenizer,
            )
        folder = self.output / f"{case}-{seed}-pretrained"
        config = self.in_size(train.recipe("t5-quickstart"), self.pretraining_steps, seed)
        result = train.train(dataclasses.replace(config, data=texts), folder, quiet=True)
        return folder, loss_of(result)

    def finetune(self, case: str, seed: int, init_from: Path | None) -> tuple[Path, float]:
        """Learns the pairs; returns the run and its loss."""
        recipe = train.recipe("multi30k-en-de" if case == "transformer" else "text-to-text")
        pairs = data.TextToTextData(
            source=f"pairs:{self.pairs}",
            validation=f"pairs:{self.validation}",
            length=64,
            tokenizer=self.tokenizer,
        )
        folder = self.output / f"{case}-{seed}"
        config = dataclasses.replace(
            self.in_size(recipe, self.steps, seed),
            data=pairs,
            init_from=None if init_from is None else str(init_from),
        )
        if self.learning_rate is not None and case != "transformer":
            rate = dataclasses.replace(config.optimizer, peak_learning_rate=self.learning_rate)
            config = dataclasses.replace(config, optimizer=rate)
        return folder, loss_of(train.train(config, folder, quiet=True))

    def quality(self, run: Path) -> tuple[float, float]:
        """Returns BLEU and chrF of the first held-out pairs."""
        sources, targets = (
            read_lines(Path(file))[: self.translated] for file in self.validation.split(",")
        )
        translator = train.TextTranslator.of_run(run)
        found = translator(sources, search=models.BeamSearch(num_beams=1), truncate=True)
        texts = [best[0].text for best in found]
        bleu, chrf = (f(texts, [targets]) for f in (sacrebleu.corpus_bleu, sacrebleu.corpus_chrf))
        return bleu.score, chrf.score


def loss_of(result: train.Result) -> float:
    """Returns the last loss on held-out examples."""
    assert result.validation is not None
    return result.validation["loss"]


def read_lines(file: Path) -> Sequence[str]:
    """Returns the lines of a file, which may be compressed."""
    content = file.read_bytes()
    text = gzip.decompress(content) if file.suffix == ".gz" else content
    return text.decode("utf-8").splitlines()


def main() -> None:
    """Train every case with every seed, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--pairs", required=True)
    parser.add_argument("--validation", required=True)
    parser.add_argument("--size", default="2x128")
    parser.add_argument("--pretraining-steps", type=int, default=300)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--translated", type=int, default=250)
    parser.add_argument("--learning-rate", type=float, help="in fine-tuning a T5")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    arguments = vars(parser.parse_args())
    seeds, cases = arguments.pop("seeds"), arguments.pop("cases")
    comparison = Comparison(**arguments)
    print(f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}")
    for case in cases:
        for seed in seeds:
            start = time.monotonic()
            pretrained, before = comparison.pretrain(case, seed)
            run, loss = comparison.finetune(case, seed, pretrained)
            bleu, chrf = comparison.quality(run)
            first = "" if before is None else f"{before:.3f}"
            seconds = time.monotonic() - start
            row = (
                f"{case} | {seed} | {first} | {loss:.3f} | {bleu:.2f} | {chrf:.2f} | {seconds:.0f}"
            )
            print(f"| {row} |", flush=True)


if __name__ == "__main__":
    main()
