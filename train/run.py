"""A run folder: made before training starts, and enough to take the run up again.

It holds `config.json`, `tokenizer/`, `checkpoints/<step>/`, `metrics.jsonl`,
`tensorboard/` and, in the end, `report.md`.
"""

import dataclasses
import importlib.metadata
import json
from collections.abc import Callable
from pathlib import Path

from ..data.atomic import build_folder
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
    tokenizer = None
    if (folder / CONFIG_FILE).is_file():
        old, tokenizer = open_run(folder)
        config = _grow_vocabulary(config, tokenizer)
        _check_same_config(folder, old, config)
    else:
        _check_empty(folder)
    train, validation = training_documents(config.data), validation_documents(config.data)
    if tokenizer is None:
        tokenizer = train_tokenizer(train, config.data.tokenizer)
        config = _grow_vocabulary(config, tokenizer)
    _check_frames(tokenizer)
    say(f"tokenizer: {tokenizer.kind}, {tokenizer.vocab_size:,} tokens")
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
    if (folder / CONFIG_FILE).is_file():
        _check_same_text(run)
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


def _check_frames(tokenizer: Tokenizer) -> None:
    """Without its own ends a document's first token would go unpredicted, its bytes counted."""
    if tokenizer.special_ids.bos is None or tokenizer.special_ids.eos is None:
        raise RunError(
            f"this {tokenizer.kind} tokenizer has no token that begins and one that ends a "
            "document: train one (--data.tokenizer.kind), or name one of a causal language model"
        )


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
    if run.folder.is_dir():
        run.folder.rmdir()  # it is empty, or `prepare_run` had refused it
    fields = to_dict(run.config)
    facts = {
        "flaxzoo": importlib.metadata.version("flaxzoo"),
        "model": fields.pop("model"),
        "train": fields,
        "data_fingerprints": _fingerprints(run),
    }

    def fill(folder: Path) -> None:
        run.tokenizer.save(folder / TOKENIZER)
        (folder / CONFIG_FILE).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")

    build_folder(run.folder, fill)


def _check_same_config(folder: Path, old: TrainConfig, new: TrainConfig) -> None:
    """Refuses to go on with another configuration."""
    changed = differences(old, new)
    if changed:
        listed = ", ".join(f"{name} {a!r} → {b!r}" for name, (a, b) in changed.items())
        raise RunError(
            f"{folder} holds a run with another configuration ({listed}): "
            "give the same, or another --workdir"
        )


def _check_same_text(run: Run) -> None:
    """Refuses to go on with another text."""
    if read_config(run.folder)["data_fingerprints"] == _fingerprints(run):
        return
    source = run.config.data.source
    comes_with_python = parse_source(source).kind == "builtin"
    remedy = "use the Python version it began with" if comes_with_python else "restore it"
    raise RunError(
        f"the text of {source} is no longer what {run.folder} was made for: {remedy}, "
        "or give another --workdir"
    )
