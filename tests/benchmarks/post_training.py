"""Time post-training of GPT-2 small beside TRL: an SFT step, a DPO step, and a rollout.

    python tests/benchmarks/post_training.py [--rounds 5] [--layers 12]

Both train the same random weights without dropout, with AdamW: SFT on 4 sequences of 256 tokens,
half of them learned; DPO on 2 pairs of 2 × 256 tokens, with log-probabilities of the reference that
are given. A rollout is 8 answers of 64 tokens to prompts of 64 tokens, sampled at temperature 1;
transformers' `generate` samples them there. Ours and theirs take turns, on as many threads as there
are cores. Prints the load of the machine before and after, the median and the least time of each,
and the ratios.
"""

import argparse
import dataclasses
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

LENGTH, ANSWER, RATE = 256, 128, 1e-4


def load() -> str:
    """Return the load of the machine over the last minute."""
    return f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"


def ours(layers: int, batches: dict[str, Any]) -> dict[str, Callable[[], float]]:
    """Return our functions: two train steps and a rollout."""
    from flaxzoo import models, train
    from flaxzoo.models.decoding.rollout import sample_answers
    from flaxzoo.models.decoding.unstack_layers import unstack_layers
    from flaxzoo.models.nn.dropout import row_keys

    config = dataclasses.replace(models.preset("gpt2"), dropout_rate=0.0, num_layers=layers)
    model = models.create(config, models.Execution(remat="dots"))
    params = models.init_params(model, jax.random.key(0))
    tx = optax.adamw(RATE, weight_decay=0.0)

    def stepping(objective: train.Objective, batch: dict[str, np.ndarray]) -> Callable[[], float]:
        step = jax.jit(train.make_train_step(model.apply, objective, tx), donate_argnums=0)
        state = train.init_state(jax.tree.map(jax.numpy.copy, params), tx)

        def run() -> float:
            nonlocal state
            state, metrics = step(state, batch, jax.random.key(1))
            return float(metrics["loss"])

        return run

    decoding = unstack_layers(model, params)
    prompts, count = batches["prompts"], 0

    @jax.jit
    def rollout(params: Any, key: jax.Array) -> Any:
        keys = row_keys(key, len(prompts))
        return sample_answers(
            decoding[0], params, prompts, np.ones_like(prompts),
            keys=keys, max_new_tokens=64, end_ids=(),
        )  # fmt: skip

    def roll() -> float:
        nonlocal count
        count += 1
        found = rollout(decoding[1], jax.random.key(count))
        return float(np.asarray(jax.tree.leaves(found)[0]).sum())

    return {
        "sft": stepping(train.supervised(), batches["sft"]),
        "dpo": stepping(train.dpo(), batches["dpo"]),
        "rollout": roll,
    }


def theirs(layers: int, batches: dict[str, Any], folder: Path) -> dict[str, Callable[[], float]]:
    """Return the same functions of TRL and transformers."""
    import torch
    import transformers
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from trl.trainer.dpo_config import DPOConfig
    from trl.trainer.dpo_trainer import DPOTrainer
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    torch.set_num_threads(os.cpu_count() or 1)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(50257)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="w1", eos_token="w2", bos_token="w2"
    )
    sizes: dict[str, Any] = {"n_layer": layers, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}

    def model() -> Any:
        torch.manual_seed(0)
        made = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
        made.save_pretrained(folder / "model")
        return transformers.GPT2LMHeadModel.from_pretrained(folder / "model")

    common: dict[str, Any] = {
        "output_dir": str(folder),
        "bf16": False,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
    }
    rows = {"prompt": ["w3"] * 2, "chosen": [" w4"] * 2, "rejected": [" w5"] * 2}
    demonstrations = {"prompt": ["w3"] * 2, "completion": [" w4"] * 2}
    trainers = {
        "sft": SFTTrainer(
            model(),
            SFTConfig(**common),
            train_dataset=Dataset.from_dict(demonstrations),
            processing_class=tokenizer,
        ),
        "dpo": DPOTrainer(
            model(),
            None,
            DPOConfig(**common, precompute_ref_log_probs=True),
            train_dataset=Dataset.from_dict(rows),
            processing_class=tokenizer,
        ),
    }

    def stepping(name: str) -> Callable[[], float]:
        trainer: Any = trainers[name]
        given = {key: torch.tensor(np.asarray(x)) for key, x in batches[f"trl-{name}"].items()}
        optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=RATE, weight_decay=0.0)

        def run() -> float:
            loss = trainer.compute_loss(trainer.model, given)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.item()

        return run

    writer = model().eval()
    prompts = torch.tensor(batches["prompts"]).long()

    def roll() -> float:
        with torch.no_grad():
            found = writer.generate(
                prompts, attention_mask=torch.ones_like(prompts), do_sample=True, top_k=0,
                min_new_tokens=64, max_new_tokens=64, pad_token_id=1,
            )  # fmt: skip
        return float(found.sum())

    return {"sft": stepping("sft"), "dpo": stepping("dpo"), "rollout": roll}


def make_batches() -> dict[str, Any]:
    """Return random tokens in the forms of both libraries."""
    draw = np.random.default_rng(0)

    def rows(*shape: int) -> tuple[np.ndarray, np.ndarray]:
        ids = draw.integers(10, 50_000, (*shape, LENGTH + 1)).astype(np.int32)
        return ids[..., :-1], ids[..., 1:]

    ids, labels = rows(4)
    learned = np.broadcast_to(np.arange(LENGTH) >= LENGTH - ANSWER, ids.shape).astype(np.int32)
    ones = np.ones_like(ids)
    pair_ids, pair_labels = rows(2, 2)
    pair_learned = np.broadcast_to(learned[0], pair_ids.shape).astype(np.int32)
    reference = np.full((2, 2), -1000.0, np.float32)
    flat = np.concatenate([pair_ids[:, 0], pair_ids[:, 1]]).astype(np.int64)
    return {
        "sft": {
            "input_ids": ids, "labels": labels, "segment_ids": ones, "loss_mask": learned,
            "position_ids": np.broadcast_to(np.arange(LENGTH, dtype=np.int32), ids.shape),
        },
        "trl-sft": {
            "input_ids": ids.astype(np.int64), "attention_mask": ones.astype(np.int64),
            "labels": np.where(learned, ids, -100).astype(np.int64),
        },
        "dpo": {
            "input_ids": pair_ids, "labels": pair_labels, "attention_mask": np.ones_like(pair_ids),
            "loss_mask": pair_learned, "reference_log_probs": reference,
        },
        "trl-dpo": {
            "input_ids": flat, "attention_mask": np.ones_like(flat),
            "completion_mask": pair_learned.reshape(-1, LENGTH).astype(np.int64),
            "ref_chosen_logps": reference[:, 0], "ref_rejected_logps": reference[:, 1],
        },
        "prompts": draw.integers(10, 50_000, (8, 64)).astype(np.int32),
    }  # fmt: skip


def main() -> None:
    """Time all cases in turns, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=12)
    arguments = parser.parse_args()
    batches = make_batches()
    with tempfile.TemporaryDirectory() as name:
        both = {
            "flaxzoo": ours(arguments.layers, batches),
            "trl": theirs(arguments.layers, batches, Path(name)),
        }
        times: dict[tuple[str, str], list[float]] = {}
        print(load())
        for case in ("sft", "dpo", "rollout"):
            for number in range(arguments.rounds + 1):
                for library, functions in both.items():
                    start = time.perf_counter()
                    functions[case]()
                    if number:  # the first call compiles
                        taken = time.perf_counter() - start
                        times.setdefault((case, library), []).append(taken)
        print(load())
    for case in ("sft", "dpo", "rollout"):
        own, other = times[case, "flaxzoo"], times[case, "trl"]
        ratios = statistics.median(own) / statistics.median(other), min(own) / min(other)
        print(
            f"{case:<8} flaxzoo {statistics.median(own):.3f} s (least {min(own):.3f}), "
            f"trl {statistics.median(other):.3f} s (least {min(other):.3f}), "
            f"ratio {ratios[0]:.2f} (of the least {ratios[1]:.2f})"
        )


if __name__ == "__main__":
    main()
