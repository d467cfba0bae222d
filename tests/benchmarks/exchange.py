"""Compare the bytes that each device sends in a train step with the least possible.

    python tests/benchmarks/exchange.py [MODEL …] [--topology v5e:4x4 …] [--micro-batches 1 …]
        [--gather layer]

Compiles the steps of four models for TPUs, which need not be present (`pip install -e '.[tpu]'`),
and prints a row for each: the bytes sent, by the compiled program, the least, and their ratio. One
sequence a device is in each micro-batch (four of GPT-2), computed in bfloat16.

The least for n devices, in units of (n - 1) / n bytes for each parameter:

- `data`: an all-reduce of the gradients, 2 · g, once a step;
- `fsdp`, gathered once a step: parameters in bfloat16 and gradients, 2 + g;
- `fsdp`, layer by layer: parameters gathered forward and backward, and gradients scattered, all in
  bfloat16, 2 + 2 + 2 in each micro-batch; outside of the layers gathered once, 2 + 2, or 2 + 4 for
  the embedding of tokens, whose gradient is a sum in float32.

Here g is 4, for a sum in float32, but 2 for linear maps without micro-batches, whose gradients are
computed in bfloat16.

The second is possible where whole parameters, their gradients and, with micro-batches, the sums of
these (`fsdp.whole_bytes`) fit a device beside its part of the state; else the third is the
least.
"""

import argparse
import dataclasses
import sys
from typing import Any

TOPOLOGIES = ("v5e:4x4", "v5p:2x2x2")
MICRO_BATCHES = (1, 16)
GB = 1e9


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, and how it is divided."""

    recipe: str
    axis: str
    """The axis of the mesh that all devices are on."""
    preset: str | None = None
    rows: int = 1
    """Sequences of a device in a micro-batch."""
    length: int | None = None
    vocab_size: int | None = None
    remat: str = "dots"


CASES = {
    "gpt2": Case("gpt2", "data", rows=4),
    "gpt2-fsdp": Case("gpt2", "fsdp", rows=4),
    "bert-large": Case("bert-large-512", "data"),
    "gpt2-xl": Case("gpt2-xl", "fsdp", remat="full"),
    "llama3-8b": Case(
        "llama", "fsdp", preset="llama3-8b", length=8192, vocab_size=128256, remat="full"
    ),
}


def configuration(case: Case, num_devices: int, micro_batches: int, gather: str) -> Any:
    """Return the run's configuration."""
    from flaxzoo import train
    from flaxzoo.train.plan.placeholders import without_data

    config = train.recipe(case.recipe, case.preset) if case.preset else train.recipe(case.recipe)
    model, data = config.model, config.data
    if case.vocab_size is not None:
        model = dataclasses.replace(model, vocab_size=case.vocab_size)
    if case.length is not None:
        model = dataclasses.replace(model, max_length=max(model.max_length, case.length))
        data = dataclasses.replace(data, length=case.length)
    config = dataclasses.replace(
        config,
        model=model,
        data=data,
        mesh=train.MeshConfig(**{"data": 1, case.axis: num_devices}),
        batch_size=case.rows * num_devices * micro_batches,
        micro_batches=micro_batches,
        gather=gather,
        execution=dataclasses.replace(config.execution, dtype="bfloat16", remat=case.remat),
    )
    return without_data(config, lambda line: None)


def least_bytes(plan: Any, config: Any, axis: str, memory: int) -> float:
    """Return the least bytes that each device sends in a step."""
    import jax
    import optax
    from flaxzoo import models
    from flaxzoo.models.init import parameter_shapes
    from flaxzoo.train import init_state
    from flaxzoo.train.distributed.fsdp import LINEAR, whole_bytes
    from flaxzoo.train.optim.parameters import is_stacked, map_named

    def gradient_bytes(name: str, x: Any) -> int:
        return x.size * (2 if config.micro_batches == 1 and LINEAR.fullmatch(name) else 4)

    def of_layers(name: str, x: Any) -> int:
        if is_stacked(name):
            return x.size * (2 + 2 + 2)
        return x.size * (2 + (2 if LINEAR.fullmatch(name) else 4))

    shapes = parameter_shapes(models.create(config.model))
    gradients = sum(jax.tree.leaves(map_named(gradient_bytes, shapes)))
    parameters, others = plan.num_parameters, (plan.num_devices - 1) / plan.num_devices
    if axis == "data":
        return 2 * gradients * others
    by_layers = config.micro_batches * others * sum(jax.tree.leaves(map_named(of_layers, shapes)))
    state = init_state(shapes, optax.identity())
    whole = whole_bytes(state, config.execution.dtype, config.micro_batches)
    if plan.argument_bytes + whole > memory:
        return by_layers
    return min(by_layers, (2 * parameters + gradients) * others)


def main() -> int:
    """Print the table."""
    from flaxzoo.train.plan.chips import GIB
    from flaxzoo.train.plan.plan import make_plan
    from flaxzoo.train.plan.topology import parse_topology

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--topology", nargs="*", default=TOPOLOGIES)
    parser.add_argument("--micro-batches", nargs="*", type=int, default=MICRO_BATCHES)
    parser.add_argument("--gather", choices=["auto", "layer", "step"], default="auto")
    parser.add_argument("models", nargs="*", metavar="MODEL", choices=[*CASES, []])
    options = parser.parse_args()
    print("| model | topology | mesh | micro-batches | sent, GB | least, GB | ratio | peak, GiB |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name in options.models or CASES:
        case = CASES[name]
        for topology in map(parse_topology, options.topology):
            for number in options.micro_batches:
                config = configuration(case, topology.num_devices, number, options.gather)
                plan = make_plan(config, topology)
                assert topology.chip is not None, "virtual devices have no memory of their own"
                least = least_bytes(plan, config, case.axis, topology.chip.usable_memory)
                sent = sum(one.bytes_sent for one in plan.collectives)
                peak = "too much" if plan.peak_bytes is None else f"{plan.peak_bytes / GIB:.2f}"
                ratio = "" if plan.peak_bytes is None else f"{sent / least:.3f}"
                print(
                    f"| {name} | {topology.name} | {case.axis} {topology.num_devices} | {number} | "
                    f"{sent / GB:,.2f} | {least / GB:,.2f} | {ratio} | {peak} |",
                    flush=True,
                )
                print(f"{name}: {plan.exchange}", file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
