"""Run in PyTorch what `gpu.py` measures: a train step, generation, or attention alone.

    python tests/benchmarks/torch_peer.py --work step --model gpt2 --batch 32 --length 1024

Models are those of transformers with its SDPA attention, compiled by `torch.compile`; compute is in
bfloat16 by autocast, parameters and moments in float32, the optimizer is the fused AdamW. It speaks
the protocol of `lockstep.py`: it prints `{"ready": true}` when it has compiled, `{"s": seconds}`
after each line `go`, and a last line of JSON at `end`. `--tiny` takes a tiny model, float32 and the
CPU, without compilation.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

Step = Callable[[], object]

GPT2_SIZES = {"gpt2": (768, 12, 12), "gpt2-medium": (1024, 24, 16), "gpt2-xl": (1600, 48, 25)}
"""Width, layers and heads."""
MODELS = (*GPT2_SIZES, "bert-large", "transformer-big", "llama-1b")
KINDS = ("causal", "padded", "packed", "window", "dropped")
WINDOW, TINY_WINDOW = 256, 4


def make_model(name: str, dropout: float, tiny: bool) -> Any:
    """Return a model with random weights, on the CPU."""
    import transformers as hf

    if name in GPT2_SIZES:
        width, layers, heads = (32, 2, 2) if tiny else GPT2_SIZES[name]
        rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
        return hf.GPT2LMHeadModel(
            hf.GPT2Config(n_embd=width, n_layer=layers, n_head=heads, **rates)
        )
    if name == "bert-large":
        width, layers, heads = (32, 2, 2) if tiny else (1024, 24, 16)
        return hf.BertForPreTraining(
            hf.BertConfig(
                hidden_size=width,
                num_hidden_layers=layers,
                num_attention_heads=heads,
                intermediate_size=4 * width,
                hidden_dropout_prob=dropout,
                attention_probs_dropout_prob=dropout,
            )
        )
    if name == "transformer-big":
        width, layers, heads = (32, 2, 2) if tiny else (1024, 6, 16)
        return hf.MarianMTModel(
            hf.MarianConfig(
                vocab_size=37_000,
                decoder_vocab_size=37_000,
                d_model=width,
                encoder_layers=layers,
                decoder_layers=layers,
                encoder_attention_heads=heads,
                decoder_attention_heads=heads,
                encoder_ffn_dim=4 * width,
                decoder_ffn_dim=4 * width,
                activation_function="relu",
                dropout=dropout,
                attention_dropout=0.0,
                activation_dropout=0.0,
                pad_token_id=36_999,
                decoder_start_token_id=36_999,
                eos_token_id=0,
                forced_eos_token_id=None,
            )
        )
    width, layers, heads = (32, 2, 2) if tiny else (2048, 16, 32)
    return hf.LlamaForCausalLM(
        hf.LlamaConfig(
            vocab_size=128_256,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=max(heads // 4, 1),
            intermediate_size=4 * width,
            max_position_embeddings=8192,
            rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
            tie_word_embeddings=True,
        )
    )


def random_batch(name: str, batch_size: int, length: int) -> dict[str, Any]:
    """Return random tokens and labels, int64 [B, T]; ids within 1,000 to 30,000."""
    import torch

    def tokens() -> Any:
        return torch.randint(1000, 30_000, (batch_size, length))

    batch = {"input_ids": tokens(), "labels": tokens()}
    if name == "bert-large":
        masked = torch.rand(batch_size, length) < 0.15
        batch["labels"] = torch.where(masked, batch["input_ids"], -100)
        batch["token_type_ids"] = (torch.arange(length) >= length // 2).long().repeat(batch_size, 1)
        batch["next_sentence_label"] = torch.randint(0, 2, (batch_size,))
    return batch


def training_step(options: argparse.Namespace, device: str) -> Step:
    """Return a function that takes a train step."""
    import torch

    model = make_model(options.model, options.dropout, options.tiny).train().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    run = model if options.tiny else torch.compile(model)
    batch = random_batch(options.model, options.batch, options.length)
    batch = {key: array.to(device) for key, array in batch.items()}
    mixed = torch.autocast(device, torch.bfloat16, enabled=not options.tiny)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        with mixed:
            loss = run(**batch).loss
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def generation(options: argparse.Namespace, device: str) -> Step:
    """Return a function that continues prompts greedily by as many tokens as they have."""
    import torch

    dtype = torch.float32 if options.tiny else torch.bfloat16
    model = make_model(options.model, 0.0, options.tiny).eval().to(device, dtype)
    model.generation_config.eos_token_id = None
    ids = random_batch(options.model, options.batch, options.length)["input_ids"].to(device)
    more: dict[str, Any] = {} if options.tiny else {"cache_implementation": "static"}

    def step() -> int:
        with torch.inference_mode():
            tokens = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=options.length,
                do_sample=False,
                pad_token_id=0,
                **more,
            )
        return int(tokens[0, -1])

    return step


def attention(options: argparse.Namespace, device: str) -> Step:
    """Return a function that computes causal attention and its gradient by SDPA."""
    import torch

    heads, size = (2, 8) if options.tiny else (12, 64)
    dtype = torch.float32 if options.tiny else torch.bfloat16
    shape = (options.batch, heads, options.length, size)
    inputs = [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]
    position = torch.arange(options.length, device=device)
    mask = None
    visible = position[:, None] >= position[None, :]
    if options.kind == "window":
        window = TINY_WINDOW if options.tiny else WINDOW
        mask = visible & (position[:, None] - position[None, :] < window)
    elif options.kind == "packed":
        segment = position // (options.length // 4)
        mask = visible & (segment[:, None] == segment[None, :])
    elif options.kind == "padded":
        rows = torch.arange(options.batch, device=device)
        lengths = options.length - rows * options.length // (2 * options.batch)
        real = position < lengths[:, None]
        same = real[:, :, None] == real[:, None, :]
        mask = (visible & same)[:, None]

    def step() -> None:
        for x in inputs:
            x.grad = None
        output = torch.nn.functional.scaled_dot_product_attention(
            *inputs,
            attn_mask=mask,
            is_causal=mask is None,
            dropout_p=0.1 if options.kind == "dropped" else 0.0,
        )
        (output.float() ** 2).sum().backward()
        if device == "cuda":
            torch.cuda.synchronize()

    return step


WORKS = {"step": training_step, "generate": generation, "attention": attention}


def peak_bytes(device: str) -> int | None:
    """Return the most memory that torch had allocated on the GPU."""
    import torch

    return torch.cuda.max_memory_allocated() if device == "cuda" else None


def main() -> None:
    """Warm up, then take a step for each line `go`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", choices=WORKS, required=True)
    parser.add_argument("--model", choices=MODELS, default="gpt2")
    parser.add_argument("--kind", choices=KINDS, default="causal", help="the mask of attention")
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--length", type=int, required=True, help="tokens; of either side")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    import torch

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = "cpu" if options.tiny else "cuda"
    started = time.perf_counter()
    step = WORKS[options.work](options, device)
    for _ in range(1 if options.tiny else 3):
        step()
    compile_seconds = time.perf_counter() - started
    print(json.dumps({"ready": True}), flush=True)
    times: list[float] = []
    for line in sys.stdin:
        if line.strip() != "go":
            break
        started = time.perf_counter()
        step()
        times.append(time.perf_counter() - started)
        print(json.dumps({"s": times[-1]}), flush=True)
    report = {
        "peer": f"torch {torch.__version__}",
        "ms": round(statistics.median(times) * 1e3, 3) if times else None,
        "compile_s": round(compile_seconds, 2),
        "peak_bytes": peak_bytes(device),
    }
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
