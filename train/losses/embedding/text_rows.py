"""Converts the texts of a batch to the inputs of a model, and the outputs to the texts' vectors."""

import dataclasses
from collections.abc import Callable, Sequence

from ....models.nn.pooling import PoolingMode, pool, pool_segments
from ....models.nn.typing import Array, Float
from ..objective import Batch, Inputs, select_inputs
from .vectors import Vectors

PACKED_INPUTS = select_inputs("input_ids", "segment_ids")
"""The inputs of a model for packed rows."""


@dataclasses.dataclass(frozen=True)
class TextRows:
    """Rows of texts: one text in each row, or several texts in each packed row."""

    inputs: Inputs
    """The model's keyword arguments, arrays `[R, T]`."""
    num_texts: int | None = None
    """The number of texts of a packed row. None means that each row has a single text."""

    def pool(
        self, last_hidden_state: Float[Array, "R T D"], modes: Sequence[PoolingMode]
    ) -> Float[Array, "N D"]:
        """Pools the hidden states of each text into a vector."""
        if self.num_texts is None:
            return pool(last_hidden_state, self.inputs["attention_mask"], modes)
        x = pool_segments(last_hidden_state, self.inputs["segment_ids"], self.num_texts, modes)
        return x.reshape(-1, x.shape[-1])  # [R, K, D] to [R · K, D]


def text_rows(batch: Batch) -> tuple[TextRows, ...]:
    """Returns the rows of a batch: packed rows, or anchors `[B, Q]` and documents `[B · C, T]`.

    A batch of labeled texts has no documents.
    """
    if "text_mask" in batch:
        inputs = PACKED_INPUTS(batch)
        _, slots, columns = batch["text_mask"].shape
        return (TextRows(inputs, slots * columns),)
    anchors = {"input_ids": batch["anchor_ids"], "attention_mask": batch["anchor_mask"]}
    if "input_ids" not in batch:
        return (TextRows(anchors),)
    names = ("input_ids", "attention_mask")
    documents = {name: batch[name].reshape(-1, batch[name].shape[-1]) for name in names}
    return TextRows(anchors), TextRows(documents)


def text_inputs(batch: Batch) -> tuple[Inputs, ...]:
    """Returns the model's inputs for each entry of `text_rows`."""
    return tuple(rows.inputs for rows in text_rows(batch))


def vectors_of(embed: Callable[[TextRows], Array], batch: Batch) -> Vectors:
    """Computes the vectors of a batch; `embed` returns the vectors of rows, `[N, D]`."""
    first, *others = map(embed, text_rows(batch))
    if "text_mask" in batch:
        # [R · S · (1 + C), D] to [R, S, 1 + C, D].
        texts = first.reshape(*batch["text_mask"].shape, -1)
        return Vectors(texts[:, :, 0], texts[:, :, 1:])
    # For labeled texts, the array of documents is empty, [B, 0, D].
    if not others:
        return Vectors(first, first[:, None][:, :0])
    # [B · C, D] to [B, C, D].
    return Vectors(first, others[0].reshape(len(first), -1, first.shape[-1]))


def of_examples(vectors: Vectors, batch: Batch) -> tuple[Vectors, Batch]:
    """Returns vectors and targets with a single axis of examples.

    The examples of packed rows `[R, S, …]` become `[R · S, …]`.
    """
    if "text_mask" not in batch:
        return vectors, batch
    names = {"text_mask", "scores"} & batch.keys()
    joined = {name: batch[name].reshape(-1, *batch[name].shape[2:]) for name in names}
    return vectors.of_examples(), joined
