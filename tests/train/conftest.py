import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest


def _train_config(**fields: Any) -> Any:
    from flaxzoo import models, train
    from flaxzoo.data import CausalData, TokenizerConfig

    return train.TrainConfig(
        **{
            "model": models.GPTConfig(
                vocab_size=48,
                max_length=16,
                num_layers=2,
                d_model=32,
                num_heads=4,
                dropout_rate=0.1,
            ),
            "data": CausalData(
                source="builtin:python-docs",
                length=16,
                tokenizer=TokenizerConfig(vocab_size=48),
            ),
            # Adam divides by the size of a gradient: a larger epsilon keeps gradients
            # that are zero but for rounding from becoming whole steps.
            "optimizer": train.OptimizerConfig(
                peak_learning_rate=1e-2, epsilon=1e-3, warmup_steps=1
            ),
            "steps": 3,
            "batch_size": 16,
            "evaluate_every": 1,
            "checkpoint_every": 1,
            **fields,
        }
    )


@pytest.fixture(scope="session")
def train_config() -> Any:
    """`train_config(**fields)`: three steps of a tiny GPT with dropout."""
    return _train_config


@pytest.fixture(scope="session")
def batches() -> list[dict[str, np.ndarray]]:
    """Three batches of 16 packed rows; the real tokens of a row are from 1 to 16."""
    rng = np.random.default_rng(0)
    made = []
    for _ in range(3):
        ids = rng.integers(0, 48, (16, 17))
        real = (
            np.arange(16)
            < np.array([16, 1, 9, 16, 3, 14, 2, 16, 1, 1, 2, 16, 12, 5, 7, 1])[:, None]
        )
        second = np.arange(16) >= 6
        made.append(
            {
                "input_ids": np.where(real, ids[:, :-1], 0).astype(np.int32),
                "labels": np.where(real, ids[:, 1:], 0).astype(np.int32),
                "segment_ids": np.where(real, 1 + second, 0).astype(np.int32),
                "position_ids": np.where(second, np.arange(16) - 6, np.arange(16)).astype(np.int32)
                * real,
            }
        )
    return [{k: v.astype(np.int32) for k, v in batch.items()} for batch in made]


@contextlib.contextmanager
def _on_one_device() -> Iterator[None]:
    import jax
    from flaxzoo.train import parallel

    with pytest.MonkeyPatch.context() as patch:
        make_mesh = functools.partial(parallel.make_mesh, devices=jax.devices()[:1])
        patch.setattr(parallel, "make_mesh", make_mesh)
        yield


@pytest.fixture(scope="module")
def on_one_device() -> Iterator[None]:
    """Compiles for one of the eight devices, which is quicker."""
    with _on_one_device():
        yield


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the data of `encoders.py`, and the runs on it that several tests look at."""
    from .encoders import write_documents, write_labelled

    folder = tmp_path_factory.mktemp("tasks")
    write_documents(folder / "documents.txt")
    write_labelled(folder)
    return folder


def _pretrained(place: Path, name: str, **fields: Any) -> Path:
    from flaxzoo import train

    from .encoders import pretraining

    with _on_one_device():
        train.train(pretraining(place, **fields), place / name, quiet=True)
    return place / name


@pytest.fixture(scope="session")
def pretrained(place: Path) -> Path:
    """The run folder of a tiny BERT with both objectives."""
    return _pretrained(place, "pretrained")


@pytest.fixture(scope="session")
def masked(place: Path) -> Path:
    """The run folder of a tiny BERT with masked words alone."""
    return _pretrained(place, "masked", next_sentence=False)


@pytest.fixture(scope="session")
def tuned(place: Path, pretrained: Path) -> Any:
    """`tuned(kind)`: the result of fine-tuning that BERT for a kind of data."""
    from flaxzoo import train

    from .encoders import fine_tuning

    @functools.cache
    def tuned(kind: str) -> Any:
        config = fine_tuning(place, kind, init_from=str(pretrained))
        with _on_one_device():
            result = train.train(config, place / kind, quiet=True)
        assert result.finished
        return result

    return tuned
