"""Measure train steps, generation and attention on a GPU: one command, cheapest case first.

    python tests/benchmarks/gpu.py --output gpu.jsonl [--no-peer] [--minutes 25] [CASE …]
    python tests/benchmarks/gpu.py --tiny --output smoke.jsonl      # every case on a CPU, tiny
    python tests/benchmarks/gpu.py --plan h200:1                    # what train steps need, no GPU

Needs what a GPU machine for JAX and PyTorch has (jax with CUDA, flax, optax, torch, transformers)
and flaxzoo on PYTHONPATH. Each case runs in a process of its own and appends one line of JSON to
the output as soon as it is measured; a case that fails appends its error, and the next one begins.
Cases that the output has already are left out. No case begins after `--minutes`, and one that is
not done by then is stopped. At the end a table shows all rows of the output.

Compute is in bfloat16, parameters and moments in float32, tokens are random, and a step is called
as `flaxzoo train` calls it. After 5 warm-up steps 50 are timed, or as many as fit into 30 seconds.
The first case checks that kernels and precision are right: a fast wrong kernel is worth nothing.

Unless `--no-peer` is given, `torch_peer.py` does the same work in PyTorch and takes turns with the
case step by step.
"""

import argparse
import dataclasses
import functools
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flaxzoo.train import TrainConfig

WARMUP_STEPS = 5
MOST_STEPS = 50
MOST_SECONDS = 30.0
PROMPT = 128
"""Tokens of a prompt, and new tokens."""
ATTENTION_SIZES = (16, 1024)
"""Sequences and their length; 12 heads of 64."""
TORCH_PEER = Path(__file__).with_name("torch_peer.py")
STEP_TOLERANCE = 1e-2
FORWARD_TOLERANCE, GRADIENT_TOLERANCE = 2e-2, 5e-2
"""Of a kernel's attention against XLA's, relative to the largest number."""
NUM_CHECKED_STEPS = 3


@dataclasses.dataclass(frozen=True)
class Training:
    """A train step of a recipe."""

    recipe: str
    batch_size: int
    length: int
    remat: str = "dots"
    dropout_rate: float | None = None
    """None: that of the recipe."""
    preset: str | None = None
    """The published size that the recipe trains."""
    vocab_size: int | None = None
    """The size of its vocabulary, if not the recipe's."""
    peer: str = "gpt2"
    """The same model, as `torch_peer.py` names it."""


@dataclasses.dataclass(frozen=True)
class Generation:
    """Greedy generation with GPT-2 small: prompts and new tokens, 128 of each."""

    batch_size: int


CASES: dict[str, Training | Generation | str] = {
    "check": "check",
    "attention": "attention",
    "generate 1": Generation(1),
    "gpt2": Training("gpt2", 32, 1024, dropout_rate=0.1),
    "gpt2 without dropout": Training("gpt2", 32, 1024, dropout_rate=0.0),
    "bert-large 128": Training("bert-large-128", 64, 128, peer="bert-large"),
    "bert-large 512": Training("bert-large-512", 16, 512, peer="bert-large"),
    "generate 64": Generation(64),
    "transformer-big": Training("wmt14-en-de-big", 98, 256, peer="transformer-big"),
    "gpt2-medium": Training("gpt2-medium", 16, 1024, dropout_rate=0.1, peer="gpt2-medium"),
    "gpt2-medium without dropout": Training(
        "gpt2-medium", 16, 1024, dropout_rate=0.0, peer="gpt2-medium"
    ),
    "llama-1b": Training(
        "llama", 8, 1024, preset="llama3.2-1b", vocab_size=128_256, peer="llama-1b"
    ),
    "gpt2-xl": Training("gpt2-xl", 8, 1024, "full", dropout_rate=0.1, peer="gpt2-xl"),
}
TINY = {"num_layers": 2, "d_model": 32, "num_heads": 2, "vocab_size": 64, "max_length": 16}
Step = Callable[[], object]
Row = dict[str, Any]


def configuration(
    case: Training, tiny: bool, dtype: str = "bfloat16", attention: str = "auto"
) -> "TrainConfig":
    """Return the run whose step a case times."""
    from flaxzoo import train
    from flaxzoo.train.plan.placeholders import without_data

    config: Any = train.recipe(case.recipe, case.preset)
    model, data = config.model, dataclasses.replace(config.data, length=case.length)
    if case.dropout_rate is not None:
        model = dataclasses.replace(model, dropout_rate=case.dropout_rate)
    if case.vocab_size is not None:
        model = dataclasses.replace(model, vocab_size=case.vocab_size)
    if tiny:
        sizes = {name: value for name, value in TINY.items() if hasattr(model, name)}
        if model.kv_heads != model.num_heads:
            sizes["num_kv_heads"] = 1
        model = dataclasses.replace(model, **sizes)
        tokenizer = dataclasses.replace(data.tokenizer, vocab_size=TINY["vocab_size"])
        fewer: Row = {"max_predictions": 4} if hasattr(data, "max_predictions") else {}
        data = dataclasses.replace(data, length=TINY["max_length"], tokenizer=tokenizer, **fewer)
    config = dataclasses.replace(
        config,
        model=model,
        data=data,
        batch_size=2 if tiny else case.batch_size,
        micro_batches=1,
        mesh=train.MeshConfig(),
        execution=dataclasses.replace(
            config.execution, dtype=dtype, remat=case.remat, attention=attention
        ),
    )
    return without_data(config, lambda line: None)


def training_step(case: Training, tiny: bool) -> tuple[Step, Row]:
    """Return a function that takes a train step, and what is known before it is timed."""
    from flaxzoo.train.config import objective_of
    from flaxzoo.train.engine.compile import compile_trainer
    from flaxzoo.train.plan.batch_specs import model_flops, synthetic_batch

    config = configuration(case, tiny)
    trainer = compile_trainer(config, objective_of(config))
    batch, state = synthetic_batch(config), trainer.init()
    started = time.perf_counter()
    trainer.lower(state, batch).compile()
    compile_seconds = time.perf_counter() - started

    def run() -> float:
        nonlocal state
        state, metrics = trainer.step(state, batch)
        return float(metrics["loss"])

    facts = {
        "rows": config.batch_size,
        "tokens": config.batch_size * config.data.length,
        "model_flops": model_flops(config),
        "compile_s": round(compile_seconds, 2),
        "kernel": trainer.memory_summary.rsplit("; ", 1)[-1],
    }
    return run, facts


def generation(case: Generation, tiny: bool) -> tuple[Step, Row]:
    """Return a function that continues random prompts, and what is known before it is timed."""
    import jax
    import numpy as np
    from flaxzoo import models

    config: Any = models.preset("gpt2")
    length = PROMPT
    if tiny:
        config, length = dataclasses.replace(config, **TINY), TINY["max_length"] // 2
    dtype = "float32" if tiny else "bfloat16"
    model = models.create(config, models.Execution(layers="separate", dtype=dtype))
    draw = np.random.default_rng(0)
    prompts = draw.integers(1, config.vocab_size, (case.batch_size, length)).tolist()
    params = jax.jit(lambda: models.init_params(model, jax.random.key(0)))()
    generator = models.Generator(model, params)
    request = models.GenerationRequest(max_new_tokens=length)

    def run() -> int:
        tokens = np.concatenate(list(generator.stream(prompts, request)), axis=1)
        assert tokens.shape == (case.batch_size, length), tokens.shape
        return int(tokens[0, -1])

    started = time.perf_counter()
    run()
    compile_seconds = round(time.perf_counter() - started, 2)
    tokens = case.batch_size * length
    return run, {"rows": case.batch_size, "tokens": tokens, "compile_s": compile_seconds}


def attention_inputs(tiny: bool) -> Any:
    """Return queries, keys and values [3, B, T, N, H]; the queries are scaled."""
    import jax
    import jax.numpy as jnp

    shape = (3, 2, 64, 2, 16) if tiny else (3, *ATTENTION_SIZES, 12, 64)
    inputs = jax.random.normal(jax.random.key(0), shape, jnp.float32)
    return inputs.at[0].multiply(shape[-1] ** -0.5).astype(jnp.bfloat16)


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of batch for attention in causal order."""

    segments: Any = None
    window: int | None = None
    dropout_rate: float = 0.0


def attention_kinds(tiny: bool) -> dict[str, Kind]:
    """Return the kinds of batches by name."""
    import jax.numpy as jnp

    _, batch, length, *_ = attention_inputs(tiny).shape
    position = jnp.arange(length)
    lengths = length - jnp.arange(batch) * length // (2 * batch)
    padded = jnp.where(position < lengths[:, None], 1, 0)
    packed = jnp.broadcast_to(1 + position // (length // 4), (batch, length))
    return {
        "causal": Kind(),
        "padded": Kind(padded),
        "packed": Kind(packed),
        "window": Kind(window=4 if tiny else 256),
        "dropped": Kind(dropout_rate=0.1),
    }


def attention_functions(tiny: bool) -> dict[str, dict[str, Callable[..., Any]]]:
    """Return, for each kind of batch, attention with its gradient by each implementation."""
    import jax
    import jax.numpy as jnp
    from flaxzoo import models
    from flaxzoo.models.nn.attention import attention_weights, weighted_values
    from flaxzoo.models.nn.dropout import drop_weights, head_keys
    from flaxzoo.models.nn.fused_attention import FusedAttention
    from flaxzoo.models.nn.masks import AttentionMask

    _, batch, length, heads, _ = attention_inputs(tiny).shape
    rows = models.row_keys(jax.random.key(1), batch)

    def by_xla(kind: Kind, query: Any, key: Any, value: Any) -> Any:
        mask = AttentionMask(length, length, None, kind.segments, causal=True, window=kind.window)
        key, value = jnp.einsum("BSKH->BKHS", key), jnp.einsum("BSKH->BKSH", value)
        weights = attention_weights(query, key, mask.materialize(), scale=1.0)
        weights = drop_weights(weights, kind.dropout_rate, rows)
        return weighted_values(weights.astype(value.dtype), value)

    def by_kernel(name: str, kind: Kind, *inputs: Any) -> Any:
        rate, segments = kind.dropout_rate, kind.segments
        return FusedAttention(name, True, kind.window, dropout_rate=rate).apply(
            {},
            *inputs,
            segments=None if segments is None else (segments, segments),
            use_window=None,
            keys=head_keys(rows, heads) if rate else None,
        )

    def made(forward: Callable[..., Any]) -> Callable[..., Any]:
        def loss(inputs: Any) -> tuple[Any, Any]:
            output = forward(*inputs)
            return (output.astype(jnp.float32) ** 2).sum(), output

        return jax.jit(jax.grad(loss, has_aux=True))

    def of_kind(kind: Kind) -> dict[str, Callable[..., Any]]:
        kernels = ["triton"] if kind.dropout_rate else ["cudnn", "triton"]
        if jax.devices()[0].platform == "cpu":
            kernels = []
        found = {name: functools.partial(by_kernel, name, kind) for name in kernels}
        functions = {"xla": functools.partial(by_xla, kind), **found}
        return {name: made(forward) for name, forward in functions.items()}

    return {name: of_kind(kind) for name, kind in attention_kinds(tiny).items()}


def check(tiny: bool) -> Row:
    """Compare kernels of attention with XLA, and bfloat16 with float32; raise if they differ."""
    import jax.numpy as jnp

    inputs = attention_inputs(tiny)
    row: Row = {}

    def compare(name: str, ours: Any, theirs: Any, tolerance: float) -> None:
        ours, theirs = jnp.asarray(ours, jnp.float32), jnp.asarray(theirs, jnp.float32)
        error = float(jnp.abs(ours - theirs).max() / jnp.abs(theirs).max())
        row[name] = error
        if not error <= tolerance:
            raise AssertionError(f"{name} differs by {error:.3g}, more than {tolerance}")

    for kind, functions in attention_functions(tiny).items():
        results = {name: function(inputs) for name, function in functions.items()}
        expected = results.pop("xla")
        for name, (gradient, output) in results.items():
            compare(f"{kind}, {name}, forward", output, expected[1], FORWARD_TOLERANCE)
            compare(f"{kind}, {name}, gradient", gradient, expected[0], GRADIENT_TOLERANCE)
    for name, rate in {"steps": 0.0, "steps with dropout": 0.1}.items():
        case = Training("gpt2", 8, 1024, dropout_rate=rate)
        exact = first_metrics(case, tiny, "float32", "xla")
        steps = first_metrics(case, tiny, "bfloat16", "auto")
        for metric in ("loss", "gradient_norm"):
            found, expected = ([one[metric] for one in all_] for all_ in (steps, exact))
            compare(f"{NUM_CHECKED_STEPS} {name}, {metric}", found, expected, STEP_TOLERANCE)
    return row


def first_metrics(case: Training, tiny: bool, dtype: str, attention: str) -> list[dict[str, float]]:
    """Return the metrics of the first steps in a precision, by a kernel of attention."""
    from flaxzoo.train.config import objective_of
    from flaxzoo.train.engine.compile import compile_trainer
    from flaxzoo.train.plan.batch_specs import synthetic_batch

    config = configuration(case, tiny, dtype, attention)
    trainer = compile_trainer(config, objective_of(config))
    state, found = trainer.init(), []
    for seed in range(NUM_CHECKED_STEPS):
        state, metrics = trainer.step(state, synthetic_batch(config, seed))
        found.append({name: float(value) for name, value in metrics.items()})
    return found


def peer_command(case: Training | Generation | str, tiny: bool, kind: str = "causal") -> list[str]:
    """Return the command that does the work of a case in PyTorch."""
    if isinstance(case, Training):
        work, sizes = "step", (case.batch_size, case.length)
    elif isinstance(case, Generation):
        work, sizes = "generate", (case.batch_size, PROMPT)
    else:
        work, sizes = "attention", ATTENTION_SIZES
    batch_size, length = (2, TINY["max_length"]) if tiny else sizes
    options = {"work": work, "batch": batch_size, "length": length, "kind": kind}
    if isinstance(case, Training):
        rate = 0.1 if case.dropout_rate is None else case.dropout_rate
        options |= {"model": case.peer, "dropout": rate}
    words = [f"--{name}={value}" for name, value in options.items()]
    return [sys.executable, str(TORCH_PEER), *words, *(["--tiny"] if tiny else [])]


def timed(run: Step, peer: "Peer | None", tiny: bool) -> Row:
    """Time steps of ours and of a peer in turns; return medians and minima in milliseconds."""
    for _ in range(1 if tiny else WARMUP_STEPS):
        run()
    ours: list[float] = []
    theirs: list[float] = []
    while len(ours) < (2 if tiny else MOST_STEPS) and sum(ours) < MOST_SECONDS:
        started = time.perf_counter()
        run()
        ours.append(time.perf_counter() - started)
        if peer is not None:
            theirs.append(peer.step())
    row: Row = {"steps": len(ours), "ms": _ms(statistics.median(ours)), "ms_min": _ms(min(ours))}
    if theirs:
        row |= {"peer_ms": _ms(statistics.median(theirs)), "peer_ms_min": _ms(min(theirs))}
        row["peer_time_ratio"] = round(statistics.median(theirs) / statistics.median(ours), 3)
    return row


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


class Peer:
    """Another implementation in a process of its own, which takes a step when it is told to."""

    def __init__(self, command: list[str]) -> None:
        """Starts it, and waits until it has compiled."""
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._read("ready")

    def step(self) -> float:
        """Takes a step; returns its seconds."""
        self._tell("go")
        return self._read("s")["s"]

    def end(self) -> Row:
        """Ends it; returns its report."""
        self._tell("end")
        report = self._read("ms")
        self._process.communicate()
        return report

    def _tell(self, word: str) -> None:
        assert self._process.stdin is not None
        print(word, file=self._process.stdin, flush=True)

    def _read(self, name: str) -> Row:
        """Returns the next line of JSON that has a field of this name."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{") and name in (found := json.loads(line)):
                return found
        self._process.communicate()
        raise RuntimeError(f"the peer ended with status {self._process.returncode}")


def finished(function: Callable[..., Any], inputs: Any) -> object:
    """Return the result of a function when the device has computed it."""
    import jax

    return jax.block_until_ready(function(inputs))


def measure(name: str, tiny: bool, with_peer: bool) -> Row:
    """Measure one case in this process."""
    import jax
    from flaxzoo.train.plan.chips import PEAK_FLOPS

    case = CASES[name]
    device = jax.devices()[0]
    row: Row = {"case": name, "device": device.device_kind, "jax": jax.__version__}
    if case == "check":
        return row | check(tiny)
    if case == "attention":
        return row | attention_row(tiny, with_peer)
    assert not isinstance(case, str)
    is_training = isinstance(case, Training)
    run, facts = training_step(case, tiny) if is_training else generation(case, tiny)
    peer = Peer(peer_command(case, tiny)) if with_peer else None
    row |= facts | timed(run, peer, tiny)
    seconds = row["ms"] / 1e3
    row |= {"tokens_s": round(row["tokens"] / seconds), "rows_s": round(row["rows"] / seconds, 1)}
    peak = PEAK_FLOPS.get(device.device_kind)
    if is_training and peak is not None:
        row["utilization"] = round(row["model_flops"] / seconds / jax.device_count() / peak, 4)
    memory = device.memory_stats()
    if memory is not None:
        row["peak_bytes"] = memory["peak_bytes_in_use"]
    if peer is not None:
        row["peer"] = peer.end()
    return row


def attention_row(tiny: bool, with_peer: bool) -> Row:
    """Time attention with its gradient by each implementation, for each kind of batch."""
    inputs = attention_inputs(tiny)
    row: Row = {}
    for kind, functions in attention_functions(tiny).items():
        for implementation, function in functions.items():
            run = functools.partial(finished, function, inputs)
            peer = Peer(peer_command("attention", tiny, kind)) if with_peer else None
            found = timed(run, peer, tiny)
            row |= {f"{kind}, {implementation}, {key}": x for key, x in found.items()}
            if peer is not None:
                peer.end()
    return row


def planned(names: list[str], topology: str) -> Iterator[str]:
    """Yield a line for each train step of these cases: what it needs, by the compiler alone."""
    from flaxzoo.train.plan.plan import Estimate, make_plan
    from flaxzoo.train.plan.report import format_seconds, verdict
    from flaxzoo.train.plan.topology import parse_topology

    devices = parse_topology(topology)
    for name in names:
        case = CASES[name]
        if isinstance(case, Training):
            plan = make_plan(configuration(case, tiny=False), devices)
            work = Estimate.from_plan(plan, devices)
            times = (work.matmuls, work.hbm, work.sequential)
            matmuls, hbm, step = map(format_seconds, times)
            yield (
                f"{name}: {plan.attention}; {verdict(plan, devices)}; matmuls {matmuls}, HBM "
                f"{hbm}, at most {step} by the rates of the chip"
            )


def run_cases(names: list[str], output: Path, options: argparse.Namespace) -> int:
    """Measure cases in processes of their own; return the number of those that failed."""
    ends = time.monotonic() + 60 * options.minutes
    done = {row["case"] for row in read_rows(output) if "error" not in row}
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if options.tiny:
        environment["JAX_PLATFORMS"] = "cpu"
        environment.pop("XLA_FLAGS", None)  # one device
    failed = 0
    for name in (name for name in names if name not in done):
        left = ends - time.monotonic()
        if left <= 0:
            print(f"{name}: left out, {options.minutes:g} minutes are over", flush=True)
            continue
        command = [sys.executable, __file__, "--one", name]
        command += ["--tiny"] if options.tiny else []
        command += ["--no-peer"] if options.no_peer else []
        line = _line_of(name, command, environment, left)
        failed += "error" in json.loads(line)
        with output.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        print(line, flush=True)
        if failed and name == "check":
            break  # a fast wrong kernel is worth nothing
    return failed


def _line_of(name: str, command: list[str], environment: dict[str, str], seconds: float) -> str:
    """Return the line of JSON that a process prints for its case, or one with its error."""
    # A process group of its own, so that a peer ends with the case that is stopped.
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        printed, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return json.dumps({"case": name, "error": f"stopped after {seconds:.0f} s"})
    lines = [line for line in printed.splitlines() if line.startswith("{")]
    if process.returncode or not lines:
        error = errors.strip().splitlines()[-1:] or [f"status {process.returncode}"]
        return json.dumps({"case": name, "error": error[0]})
    return lines[-1]


def read_rows(output: Path) -> list[Row]:
    """Return the rows that were measured so far."""
    lines = output.read_text(encoding="utf-8").splitlines() if output.is_file() else []
    return [json.loads(line) for line in lines]


COLUMNS = (
    *("case", "ms", "ms_min", "tokens_s", "utilization", "GiB", "compile_s"),
    *("torch ms", "torch GiB", "torch ÷ ours"),
)


def table(rows: list[Row]) -> str:
    """Return rows as a table; the cases without a step of their own have a line a number."""
    lines: list[tuple[str, ...]] = [COLUMNS]
    below: list[str] = []
    for row in rows:
        if "error" in row or "ms" not in row:
            facts = {key: x for key, x in row.items() if key not in ("case", "device", "jax")}
            below += [f"{row['case']}: {key} {x}" for key, x in facts.items()]
            continue
        peer: Row = row.get("peer", {})
        values = (
            *(row["case"], row["ms"], row["ms_min"], row["tokens_s"], row.get("utilization")),
            *(_gib(row.get("peak_bytes")), row["compile_s"]),
            *(row.get("peer_ms"), _gib(peer.get("peak_bytes")), row.get("peer_time_ratio")),
        )
        lines.append(tuple("" if value is None else str(value) for value in values))
        below += [f"{row['case']}: {row['kernel']}"] if "kernel" in row else []
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = (
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
    return "\n".join([*aligned, *below])


def _gib(size: int | None) -> str | None:
    return None if size is None else f"{size / 2**30:.1f}"


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("gpu.jsonl"), help="the rows, appended")
    parser.add_argument("--no-peer", action="store_true", help="do not measure PyTorch beside it")
    parser.add_argument("--minutes", type=float, default=25.0, help="when to stop; 25 by default")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes on a CPU: a trial")
    parser.add_argument("--plan", metavar="TOPOLOGY", help="compile the train steps for these GPUs")
    parser.add_argument("--one", choices=CASES, help="measure one case here and print its row")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of: {', '.join(CASES)}")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one, options.tiny, not options.no_peer)))
        return 0
    unknown = [name for name in options.cases if name not in CASES]
    if unknown:
        parser.error(f"no case named {unknown[0]!r}: choose from {', '.join(CASES)}")
    names = options.cases or list(CASES)
    if options.plan:
        for line in planned(names, options.plan):
            print(line, flush=True)
        return 0
    failed = run_cases(names, options.output, options)
    print(table(read_rows(options.output)))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
