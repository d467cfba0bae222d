"""A run folder: made before training starts, and enough to take the run up again.

It holds `config.json`, `tokenizer/`, `checkpoints/<step>/`, `metrics.jsonl`,
`tensorboard/` and, in the end, `report.md`.
"""

import dataclasses
import importlib.metadata
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..data.causal import CausalEvaluationRows, CausalRows
from ..data.corpus import TokenCorpus, build_corpus
from ..data.documents import Documents, default_cache_dir, load_documents
from ..data.sources import parse_source
from ..data.tokenizer import Tokenizer, load_tokenizer
from ..data.tokenizer_training import train_tokenizer
from ..models.loading import CONFIG_FILE, read_config
from .config import DataConfig, TrainConfig, differences, from_dict, to_dict
from .errors import RunError

TOKENIZER = "tokenizer"
Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Run:
    """Everything a training loop needs of text and disk."""

    folder: Path
    config: TrainConfig
    tokenizer: Tokenizer
    train: TokenCorpus
    validation: TokenCorpus

    @property
    def train_rows(self) -> CausalRows:
        """The rows of training epochs."""
        data = self.config.data
        return CausalRows(self.train, data.length, data.packing, self.config.seed)

    @property
    def validation_rows(self) -> CausalEvaluationRows:
        """Every validation token once."""
        return CausalEvaluationRows(self.validation, self.config.data.length)


def prepare_run(config: TrainConfig, folder: Path, say: Say) -> Run:
    """Reads the text, makes the tokenizer, and looks at the run folder.

    All that can be wrong with text, tokenizer and folder is found here, before
    any training starts; nothing is written to the folder yet.

    Args:
      config: as the recipe and the command line give it.
      folder: the run folder; may exist if it is the same run.
      say: told each thing done, in a line.

    Raises:
      DataError: the text cannot be had, read or cut into rows.
      RunError: the folder holds another run, or something that is not a run.
    """
    started = (folder / CONFIG_FILE).is_file()
    if not started:
        _check_empty(folder)
    train, validation = training_documents(config.data), validation_documents(config.data)
    if started:
        tokenizer = load_tokenizer(folder / TOKENIZER)
    else:
        tokenizer = train_tokenizer(train, config.data.tokenizer)
    say(f"tokenizer: {tokenizer.kind}, {tokenizer.vocab_size:,} tokens")
    config = _grow_vocabulary(config, tokenizer)
    corpora = [
        build_corpus(documents, tokenizer, default_cache_dir() / "tokens")
        for documents in (train, validation)
    ]
    for name, corpus in zip(("training", "validation"), corpora, strict=True):
        say(
            f"{name} text: {corpus.num_documents:,} documents, {corpus.num_bytes:,} bytes, "
            f"{corpus.total_pairs:,} tokens to predict"
        )
    run = Run(folder, config, tokenizer, *corpora)
    _ = run.train_rows.rows_per_epoch  # a text shorter than a row is refused here
    if started:
        _check_same(run)
    return run


def open_run(folder: str | Path) -> tuple[TrainConfig, Tokenizer]:
    """The configuration and tokenizer of a run folder.

    Raises:
      FileNotFoundError: it is not a run folder.
    """
    fields = read_config(folder)
    return from_dict(fields["train"] | {"model": fields["model"]}), load_tokenizer(
        Path(folder) / TOKENIZER
    )


def training_documents(data: DataConfig) -> Documents:
    """What a run trains on: all of its source but what it validates on."""
    fraction = data.validation_fraction if data.validation is None else 0.0
    return load_documents(data.source, "train", validation_fraction=fraction)


def validation_documents(data: DataConfig) -> Documents:
    """What a run validates on."""
    if data.validation is not None:
        return whole_source(data.validation)
    fraction = data.validation_fraction
    return load_documents(data.source, "validation", validation_fraction=fraction)


def whole_source(source: str) -> Documents:
    """All of a local source; of a published one its validation split."""
    split = "validation" if parse_source(source).kind == "tfds" else "train"
    return load_documents(source, split, validation_fraction=0.0)


def _grow_vocabulary(config: TrainConfig, tokenizer: Tokenizer) -> TrainConfig:
    size = max(config.model.vocab_size, tokenizer.vocab_size)
    model = dataclasses.replace(config.model, vocab_size=size)
    return dataclasses.replace(config, model=model)


def _check_empty(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RunError(
            f"{folder} exists and is not a run folder: give another --workdir, or empty it"
        )


def _fingerprints(run: Run) -> dict[str, str]:
    return {"train": run.train.fingerprint, "validation": run.validation.fingerprint}


def create_folder(run: Run) -> None:
    """Makes the run folder, unless it is there; to be called when nothing else can be wrong."""
    if (run.folder / CONFIG_FILE).is_file():
        return
    run.folder.mkdir(parents=True, exist_ok=True)
    run.tokenizer.save(run.folder / TOKENIZER)
    fields = to_dict(run.config)
    model = fields.pop("model")
    write_json(
        run.folder / CONFIG_FILE,
        {
            "flaxzoo": importlib.metadata.version("flaxzoo"),
            "model": model,
            "train": fields,
            "data_fingerprints": _fingerprints(run),
        },
    )


def _check_same(run: Run) -> None:
    """Refuses to go on with another configuration or another text."""
    fields = read_config(run.folder)
    old = from_dict(fields["train"] | {"model": fields["model"]})
    changed = differences(old, run.config)
    if changed:
        listed = ", ".join(f"{name} {a!r} → {b!r}" for name, (a, b) in changed.items())
        raise RunError(
            f"{run.folder} holds a run with another configuration ({listed}): "
            "give the same, or another --workdir"
        )
    if fields["data_fingerprints"] != _fingerprints(run):
        raise RunError(
            f"the text of {run.config.data.source} is no longer what {run.folder} was made "
            "for: restore it, or give another --workdir"
        )


def write_json(file: Path, value: Any) -> None:
    """Writes `value` so that the file is never seen half written."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    temporary.write_text(json.dumps(value, indent=2) + "\n")
    temporary.replace(file)
