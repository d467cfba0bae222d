"""Time a mixture of experts beside a dense model and torch, and decoding of a Llama beside torch.

    python tests/benchmarks/families.py [--rounds 5] [--case step] [--case decode]

A step: a Mixtral of 6 layers, width 512, 8 experts of width 1024 of which each token uses 2, on 4
sequences of 256 tokens, with AdamW; a Mistral whose feed-forward layers are as wide as two experts;
and transformers' Mixtral of the same sizes, with the fastest of its implementations of experts that
run here. Decoding: a Llama of 0.13 B parameters, greedy, 64 tokens after prompts of 32, for 1 and 8
sequences. All take turns, on as many threads as there are cores. Prints the load of the machine
before and after, the median and the least time of each, and the ratios.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

LENGTH, BATCH, NEW, PROMPT = 256, 4, 64, 32
SIZES = {"vocab_size": 8000, "num_layers": 6, "d_model": 512, "num_heads": 8, "num_kv_heads": 4}
IDS = np.random.default_rng(0).integers(3, 8000, (8, LENGTH + 1)).astype(np.int32)
Run = Callable[[], object]


def load() -> str:
    """Return the load of the machine over the last minute."""
    return f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"


def our_steps() -> dict[str, Run]:
    """Return a train step of the mixture, and of the dense model."""
    from flaxzoo import models, train
    from flaxzoo.models.decoders.mistral import MistralConfig
    from flaxzoo.models.decoders.mixtral import MixtralConfig

    batch = {"input_ids": IDS[:BATCH, :-1], "labels": IDS[:BATCH, 1:]}
    batch["segment_ids"] = np.ones_like(batch["labels"])
    batch["position_ids"] = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (BATCH, LENGTH))

    def stepping(config: models.TransformerConfig) -> Run:
        model = models.create(config)
        tx = optax.adamw(1e-4)
        objective = train.with_router(train.CAUSAL, config)
        step = jax.jit(train.make_train_step(model.apply, objective, tx), donate_argnums=0)
        state = train.init_state(models.init_params(model, jax.random.key(0)), tx)

        def run() -> float:
            nonlocal state
            state, metrics = step(state, batch, jax.random.key(1))
            return float(metrics["loss"])

        return run

    return {
        "mixture": stepping(MixtralConfig(**SIZES, max_length=LENGTH, d_ff=1024)),
        "dense": stepping(MistralConfig(**SIZES, max_length=LENGTH, d_ff=2048)),
    }


def torch_step(experts: str) -> Run:
    """Return a train step of transformers' Mixtral, which adds its loss of the router."""
    import torch
    import transformers

    config = transformers.MixtralConfig(
        vocab_size=8000, hidden_size=512, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=4, intermediate_size=1024, output_router_logits=True,
        max_position_embeddings=LENGTH,
    )  # fmt: skip
    model: Any = transformers.MixtralForCausalLM(config).train()
    model.set_experts_implementation(experts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.tensor(IDS[:BATCH, :-1]).long()

    def run() -> float:
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return run


def decoders(batch: int) -> dict[str, Run]:
    """Return greedy decoding of one Llama, ours and theirs."""
    import torch
    import transformers
    from flaxzoo import models
    from flaxzoo.models.decoders.llama import LlamaConfig

    config = transformers.LlamaConfig(
        vocab_size=32_000, hidden_size=768, num_hidden_layers=12, num_attention_heads=12,
        num_key_value_heads=4, intermediate_size=2048, max_position_embeddings=512,
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs: Any = transformers.LlamaForCausalLM(config).eval()
    model = models.create(
        LlamaConfig(
            vocab_size=32_000,
            max_length=512,
            num_layers=12,
            d_model=768,
            num_heads=12,
            num_kv_heads=4,
            d_ff=2048,
        )
    )
    params = models.init_params(model, jax.random.key(0))
    ids = IDS[:batch, :PROMPT]

    def torch_run() -> object:
        with torch.no_grad():
            return theirs.generate(
                torch.tensor(ids).long(), attention_mask=torch.ones_like(torch.tensor(ids)),
                do_sample=False, max_new_tokens=NEW, pad_token_id=0, eos_token_id=None,
            )  # fmt: skip

    generator = models.Generator(model, params)
    request = models.GenerationRequest(method=models.Sampling(temperature=0.0), max_new_tokens=NEW)

    def run() -> object:
        return np.concatenate(list(generator.stream(ids.tolist(), request)), axis=1)

    return {"flaxzoo": run, "torch": torch_run}


def in_turns(functions: dict[str, Run], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each function in each round; the first round compiles."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for number in range(rounds + 1):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            if number:
                times[name].append(time.perf_counter() - start)
    return times


def report(case: str, own: str, times: dict[str, list[float]]) -> None:
    """Print the times of a case, and the ratios of our time to each other one."""
    for name, taken in times.items():
        line = f"{case:<10}{name:<18}{statistics.median(taken):.3f} s (least {min(taken):.3f})"
        if name != own:
            ratio = statistics.median(times[own]) / statistics.median(taken)
            line += (
                f", {own} ÷ {name} {ratio:.2f} (of the least {min(times[own]) / min(taken):.2f})"
            )
        print(line, flush=True)


def main() -> None:
    """Time the cases, and print their lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--case", action="append", choices=("step", "decode"))
    arguments = parser.parse_args()
    cases = arguments.case or ["step", "decode"]
    print(load())
    if "step" in cases:
        steps = our_steps()
        steps |= {f"torch {way}": torch_step(way) for way in ("grouped_mm", "eager")}
        report("step", "mixture", in_turns(steps, arguments.rounds))
    if "decode" in cases:
        for batch in (1, 8):
            report(f"decode {batch}", "flaxzoo", in_turns(decoders(batch), arguments.rounds))
    print(load())


if __name__ == "__main__":
    main()
