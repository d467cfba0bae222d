"""Keep a ledger of what train steps cost: they are compiled for the CPU, and nothing is run.

    python tests/benchmarks/ledger.py [--write | --check] [CASE …]

Compares the figures of today with those in `ledger.json`. `--write` replaces them there (of all
cases, or of those named), `--check` exits with status 1 if one has grown by more than 1 %.
Figures are those of one device, with every repetition of a loop counted:

- temporaries: buffers beside the arguments and the results of the step;
- flops: 2 · m · n · k of every matrix product, with what is recomputed;
- bytes accessed: what the instructions read and write;
- each kind of collective: how many run, and the bytes that a device sends in them.

They depend on the versions of jax and jaxlib, which the ledger names; other versions are refused.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flaxzoo.train import Objective

LEDGER = Path(__file__).with_suffix(".json")
TOLERANCE = 0.01
NUM_DEVICES = 8
OTHER_VERSIONS = 3
"""The exit status where the ledger was written with other versions of jax and jaxlib."""

Figures = dict[str, float]


@dataclasses.dataclass(frozen=True)
class Case:
    """A train step: dropout and remat as in the recipes, AdamW, parameters in float32."""

    config: Any
    """The model's."""
    objective: "Objective"
    batch: dict[str, Any]
    """Arrays, or their shapes and dtypes."""
    fsdp: int = 1
    """The number of devices that parameters are sharded over."""


def causal(config: Any, rows: int, length: int, fsdp: int = 1) -> Case:
    """Make the step of a causal language model."""
    import jax
    from flaxzoo import train

    array = jax.ShapeDtypeStruct((rows, length), "int32")
    names = ("input_ids", "labels", "segment_ids", "position_ids")
    return Case(config, train.CAUSAL, dict.fromkeys(names, array), fsdp)


def gpt2(rows: int, length: int, fsdp: int = 1) -> Case:
    """Make the step of GPT-2 small."""
    from flaxzoo import models

    return causal(models.preset("gpt2"), rows, length, fsdp)


def llama_small(rows: int, length: int) -> Case:
    """Make the step of a Llama of GPT-2's width and depth, with grouped heads."""
    from flaxzoo import models

    sizes = {"num_layers": 12, "d_model": 768, "num_heads": 12, "num_kv_heads": 4, "d_ff": 2048}
    config: Any = models.preset("llama2-7b")
    return causal(dataclasses.replace(config, **sizes), rows, length)


def bert(name: str) -> Case:
    """Make the step of BERT-base on both objectives, as `bert.py` times it."""
    import bert as benchmark
    from flaxzoo import models, train

    return Case(
        models.preset("bert-base"), train.PRETRAINING, benchmark.batch(*benchmark.CASES[name])
    )


def transformer(rows: int, source: int, target: int) -> Case:
    """Make the step of the Transformer base, as `translation.py` times it."""
    import jax
    import translation as benchmark
    from flaxzoo import train

    tokens = jax.ShapeDtypeStruct((rows, source), "int32")
    targets = jax.ShapeDtypeStruct((rows, target), "int32")
    names = ("input_ids", "segment_ids", "position_ids")
    batch = dict.fromkeys(names, tokens)
    batch |= dict.fromkeys((*(f"decoder_{name}" for name in names), "labels"), targets)
    return Case(benchmark.config(dropout=0.1), train.seq2seq(), batch)


CASES: dict[str, Callable[[], Case]] = {
    "gpt2 4 × 256": lambda: gpt2(4, 256),
    "gpt2 8 × 256, fsdp 8": lambda: gpt2(8, 256, fsdp=8),
    "bert-base 8 × 128": lambda: bert("bert-step"),
    "bert-base 2 × 512": lambda: bert("bert-step-512"),
    "llama small 4 × 256": lambda: llama_small(4, 256),
    "transformer-base 16 × 64": lambda: transformer(16, 64, 64),
}


def compile_step(case: Case) -> Any:
    """Compile a case's step for virtual devices, without an array."""
    import jax
    import optax
    from flaxzoo import models, train
    from flaxzoo.train.distributed.sharding import batch_sharding, make_mesh
    from flaxzoo.train.engine.sharded_step import make_sharded_step

    model = models.create(case.config, models.Execution(remat="dots"))
    tx = optax.adamw(1e-4, weight_decay=0.01)
    key = jax.eval_shape(lambda: jax.random.key(0))
    batch = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in case.batch.items()}
    if case.fsdp == 1:
        step = jax.jit(train.make_train_step(model.apply, case.objective, tx), donate_argnums=0)
        state = jax.eval_shape(
            lambda: train.init_state(models.init_params(model, jax.random.key(0)), tx)
        )
    else:
        mesh = make_mesh(train.MeshConfig(data=1, fsdp=case.fsdp))
        sharded = make_sharded_step(model, case.objective, tx, mesh)
        step, state = sharded.step, sharded.state
        batch = {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=batch_sharding(mesh, x.shape))
            for name, x in batch.items()
        }
    return step.trace(state, batch, key).lower().compile()


def measure(case: Case) -> Figures:
    """Compile a case's step and read its figures."""
    from flaxzoo.train.plan.hlo.collectives import collective_ops
    from flaxzoo.train.plan.hlo.cost import hbm_bytes, matmul_flops
    from flaxzoo.train.plan.hlo.parser import parse_hlo

    executable = compile_step(case)
    program = parse_hlo(executable.as_text())
    figures: Figures = {
        "temporaries, MiB": round(executable.memory_analysis().temp_size_in_bytes / 2**20, 1),
        "flops": matmul_flops(program),
        "bytes accessed": hbm_bytes(program),
    }
    for found in collective_ops(program, case.fsdp):
        for name, amount in (("count", found.count), ("bytes", found.count * found.bytes_sent)):
            key = f"{found.kind}, {name}"
            figures[key] = figures.get(key, 0) + amount
    return dict(sorted(figures.items(), key=lambda item: "," in item[0] and "-" in item[0]))


def grown(before: Figures, today: Figures) -> list[str]:
    """List the figures that have grown by more than the tolerance; one that is new has grown."""
    return [name for name, value in today.items() if value > before.get(name, 0) * (1 + TOLERANCE)]


def versions() -> dict[str, str]:
    """Return the versions that the figures depend on."""
    return {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}


def print_comparison(name: str, before: Figures, today: Figures) -> None:
    """Print a line per figure; `!` marks one that has grown."""
    bad = grown(before, today)
    for figure in {**before, **today}:
        old, new = before.get(figure, 0), today.get(figure, 0)
        change = f"{new / old - 1:+8.2%}" if old else f"{'new':>8}"
        mark = " !" if figure in bad else ""
        print(f"{name:<26}{figure:<26}{old:>18,}{new:>18,}{change}{mark}")


def main() -> int:
    """Print the comparison and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--write", action="store_true", help="replace the figures in the ledger")
    way.add_argument("--check", action="store_true", help="exit with status 1 if one has grown")
    parser.add_argument("cases", nargs="*", metavar="CASE", choices=[*CASES, []])
    options = parser.parse_args()
    ledger = json.loads(LEDGER.read_text(encoding="utf-8")) if LEDGER.is_file() else {}
    figures: dict[str, Figures] = ledger.get("figures", {})
    if ledger and ledger["versions"] != versions() and not options.write:
        print(f"the ledger was written with {ledger['versions']}, and here is {versions()}")
        return OTHER_VERSIONS
    bad: list[str] = []
    for name in options.cases or CASES:
        started = time.monotonic()
        today = measure(CASES[name]())
        print_comparison(name, figures.get(name, {}), today)
        print(f"{name:<26}{'compiled in':<26}{time.monotonic() - started:>36,.1f} s", flush=True)
        bad += [f"{name}: {figure}" for figure in grown(figures.get(name, {}), today)]
        figures[name] = today
    if options.write:
        kept = {name: figures[name] for name in CASES if name in figures}
        text = json.dumps({"versions": versions(), "figures": kept}, indent=1, ensure_ascii=False)
        LEDGER.write_text(text + "\n", encoding="utf-8")
    if bad and options.check:
        print(f"grown by more than {TOLERANCE:.0%}: {'; '.join(bad)}")
        print("correct that, or accept it: python tests/benchmarks/ledger.py --write")
        return 1
    return 0


if __name__ == "__main__":
    # All that changes what is compiled is set here: the same figures on every machine.
    for variable in [name for name in os.environ if name.startswith(("JAX_", "XLA_"))]:
        del os.environ[variable]
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    # The figures are of the program before LLVM, which then has less to do.
    os.environ["XLA_FLAGS"] = (
        f"--xla_force_host_platform_device_count={NUM_DEVICES} --xla_cpu_max_isa=AVX2 "
        "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
        "--xla_cpu_parallel_codegen_split_count=1"
    )
    sys.exit(main())
