"""A reward model as a reward: scores of answers by a trained model of a single number."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from ...data.chat.encoding import encode_completion
from ...data.chat.preference_pairs import as_classified
from ...data.chat.records import Demonstration, Dialogue
from ...data.tokenizers.base import Tokenizer
from ...models.decoding.padding import pad_rows, power_of_two, round_up
from ...models.model import Model
from ...models.nn.typing import Array, Float, Int, Params
from ..distributed.expert_parallel import over_mesh
from ..distributed.sharding import (
    num_batch_shards,
    parameter_shardings,
    shard_batch,
)
from ..errors import RunError
from ..runs.finite import check_outputs, load_finite
from ..runs.load_run import open_run

LENGTH_BUCKET = 64
"""Lengths that the model is compiled for are multiples of this number."""


class RewardModel:
    """The score of a trained reward model, as `reward(begun, completions)`.

    It reads a prompt and its completion as `RewardData` writes them: by its own tokenizer and chat
    template, up to as many tokens as its run was trained on; longer ones are an error.

    Args:
        model: the model, whose head has a single label.
        params: its parameters.
        tokenizer: its own.
        length: the number of tokens that it reads at most.
        mesh: the devices that it is divided over; None: it is on one.
    """

    def __init__(
        self,
        model: Model,
        params: Params,
        tokenizer: Tokenizer,
        *,
        length: int,
        mesh: Mesh | None = None,
    ) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._length, self._mesh = length, mesh
        if mesh is not None:
            params = jax.device_put(params, parameter_shardings(params, mesh, model.config))
        self._params = params

    @classmethod
    def of_run(cls, folder: str | Path, mesh: Mesh | None = None) -> "RewardModel":
        """Opens a reward model.

        Args:
            folder: a run folder, one in Hugging Face's form, or a name on the hub.
            mesh: the devices that it is divided over; None: it is on one.

        Raises:
            FileNotFoundError: there is no such folder.
            RunError: the model has no head of a single number.
        """
        config, tokenizer = open_run(folder)
        if config.model.head != "sequence_classification" or len(config.model.labels) != 1:
            labels = f" of {len(config.model.labels)} labels" if config.model.labels else ""
            raise RunError(
                f"{folder} has the head {config.model.head}{labels}, and a reward model has "
                "sequence_classification of one label: train one with flaxzoo train reward"
            )
        model, params = load_finite(folder)
        return cls(model, params, tokenizer, length=config.data.length, mesh=mesh)

    def __call__(self, begun: Sequence[Demonstration], completions: Sequence[str]) -> list[float]:
        """Scores completions.

        Args:
            begun: the prompt of each.
            completions: the completions.
        """
        pairs = zip(begun, completions, strict=True)
        rows = [
            as_classified(self._encoded(one, completion), self._tokenizer)
            for one, completion in pairs
        ]
        if (longest := max(map(len, rows))) > self._length:
            raise RunError(
                f"a prompt and its answer have {longest} tokens, and the reward model reads "
                f"{self._length}: lower data.rollout.max_new_tokens, or train one with a larger "
                "data.length"
            )
        several = jax.process_count() > 1  # all of them compute together, on equal shapes
        shards = 1 if self._mesh is None else num_batch_shards(self._mesh)
        length = self._length if several else round_up(max(map(len, rows)), LENGTH_BUCKET)
        number = len(rows) if several else round_up(power_of_two(len(rows)), shards)
        ids, mask = pad_rows(rows, num_rows=number, length=min(length, self._length))
        batch: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
        if self._mesh is not None:
            batch = shard_batch(batch, self._mesh)
        scores = self._scores(self._params, batch["input_ids"], batch["attention_mask"])
        parts = sorted(
            {part.index[0].start or 0: part.data for part in scores.addressable_shards}.items()
        )
        found = np.concatenate([np.asarray(part) for _, part in parts])[: len(rows)]
        check_outputs({"reward": found})
        return found.tolist()

    def _encoded(self, begun: Demonstration, completion: str) -> list[int]:
        completion = completion if completion.strip() else " "  # an answer that is not empty
        if isinstance(begun, Dialogue):
            answer = {"role": "assistant", "content": completion}
            return Dialogue((*begun.messages, answer), begun.tools).encode(self._tokenizer).ids
        return encode_completion(self._tokenizer, begun.prompt, completion).ids

    @functools.cached_property
    def _scores(self) -> Any:
        mesh = self._mesh
        apply = (
            self._model.apply
            if mesh is None
            else over_mesh(self._model.apply, mesh, self._model.config)
        )

        def scores(
            params: Params, ids: Int[Array, "R T"], mask: Int[Array, "R T"]
        ) -> Float[Array, " R"]:
            outputs: Any = apply({"params": params}, input_ids=ids, attention_mask=mask)
            return outputs.logits[:, 0]

        return jax.jit(scores)
