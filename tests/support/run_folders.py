"""Tiny runs, and the contents of their folders for comparison."""

import random

import jax
import numpy as np
import orbax.checkpoint as ocp
from flaxzoo import data, models, train

WORDS = "the cat sat on a mat and then it saw some dog run away from her big red house".split()


def write_text(file):
    """Return sixty short documents."""
    draw = random.Random(0)
    file.write_text("\n\n".join(" ".join(draw.choices(WORDS, k=20)) for _ in range(60)))
    return file


def small_run(folder, *, model=None, **fields):
    """Return the configuration of a tiny GPT on short documents in `folder`, with dropout."""
    file = write_text(folder / "text.txt")
    sizes = {"vocab_size": 1, "max_length": 16, "num_layers": 2, "d_model": 16, "num_heads": 2}
    usual = {
        "optimizer": train.OptimizerConfig(peak_learning_rate=1e-2, warmup_steps=3),
        "batch_size": 8,
        "log_every": 1,
    }
    return train.TrainConfig(
        model=models.GPTConfig(**{**sizes, "dropout_rate": 0.2, **(model or {})}),
        data=data.CausalLMData(
            source=f"text:{file}#block",
            validation_fraction=0.1,
            length=16,
            tokenizer=data.TokenizerConfig(kind="characters"),
        ),
        **{**usual, **fields},
    )


def everything(workdir, step):
    """Read all arrays of a checkpoint, by path."""
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])  # whatever devices saved it
    found = {}
    with ocp.StandardCheckpointer() as checkpointer:
        for part in ("params", "optimizer"):
            path = (workdir / "checkpoints" / str(step) / part).resolve()
            shapes = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here),
                checkpointer.metadata(path).item_metadata.tree,
            )
            found[part] = checkpointer.restore(path, shapes)
    leaves = jax.tree_util.tree_flatten_with_path(found)[0]
    return {jax.tree_util.keystr(path): np.asarray(value) for path, value in leaves}


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert ours[name].tobytes() == theirs[name].tobytes(), name


def lines(workdir):
    return (workdir / "metrics.jsonl").read_text().splitlines()


def kept(workdir):
    return sorted(int(path.name) for path in (workdir / "checkpoints").iterdir())
