"""Time a rollout of GPT-2 small against transformers' `generate`, in turns on two threads.

python tests/benchmarks/rollout.py --rows 8 --new-tokens 64
"""

import os

os.environ.setdefault(
    "XLA_FLAGS", "--xla_cpu_multi_thread_eigen=true intra_op_parallelism_threads=2"
)

import argparse
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
import torch
from flaxzoo import models
from flaxzoo.models.decoding.rollout import sample_answers
from flaxzoo.models.decoding.unstack_layers import unstack_layers
from flaxzoo.models.hf.save_weights import write_weights
from transformers import GPT2LMHeadModel


def main():
    """Prints the median seconds of both, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    model = models.create(models.preset("gpt2"))
    params = jax.jit(lambda: models.init_params(model, jax.random.key(0)))()
    shape = arguments.rows, arguments.prompt
    ids = np.random.default_rng(0).integers(0, 50_000, shape).astype(np.int32)

    @jax.jit
    def ours(params, ids, mask, keys):
        decoding, own = unstack_layers(model, params)  # of the live parameters, in each rollout
        return sample_answers(
            decoding,
            own,
            ids,
            mask,
            keys=keys,
            max_new_tokens=arguments.new_tokens,
            end_ids=(50_256,),
        ).tokens

    with tempfile.TemporaryDirectory() as folder:
        write_weights(Path(folder), model.config, params)
        theirs = GPT2LMHeadModel.from_pretrained(folder).eval()
    keys = models.row_keys(jax.random.key(1), arguments.rows)
    given = torch.tensor(ids.astype(np.int64))

    def run_ours():
        jax.block_until_ready(ours(params, ids, np.ones_like(ids), keys))

    def run_theirs():
        with torch.inference_mode():
            theirs.generate(
                given,
                attention_mask=torch.ones_like(given),
                do_sample=True,
                top_k=0,
                min_new_tokens=arguments.new_tokens,
                max_new_tokens=arguments.new_tokens,
                pad_token_id=50_256,
            )

    seconds = {}
    for call in [run_ours, run_theirs] * (arguments.rounds + 1):
        begin = time.perf_counter()
        call()
        seconds.setdefault(call.__name__, []).append(time.perf_counter() - begin)
    medians = {name: float(np.median(values[1:])) for name, values in seconds.items()}
    a, b = medians["run_ours"], medians["run_theirs"]
    print(
        f"{arguments.rows} x {arguments.new_tokens} tokens: ours {a:.2f} s, transformers {b:.2f} s"
    )
    print(f"ratio {a / b:.2f}")


if __name__ == "__main__":
    main()
