"""What runs leave behind, to be compared."""

import random

import jax
import numpy as np
import orbax.checkpoint as ocp

WORDS = "the cat sat on a mat and then it saw some dog run away from her big red house".split()


def write_text(file):
    """Sixty short documents."""
    draw = random.Random(0)
    file.write_text("\n\n".join(" ".join(draw.choices(WORDS, k=20)) for _ in range(60)))
    return file


def everything(workdir, step):
    """All arrays of a checkpoint, by path."""
    with ocp.StandardCheckpointer() as checkpointer:
        found = {
            part: checkpointer.restore((workdir / "checkpoints" / str(step) / part).resolve())
            for part in ("params", "optimizer")
        }
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
