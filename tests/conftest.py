"""Eight virtual devices, run-time checks of shapes, and nothing outside temporary folders.

All of it must be set before jax and flaxzoo are first imported.
"""

import collections
import dataclasses
import functools
import gc
import hashlib
import importlib.metadata
import itertools
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # "cuda" for the tests that need a GPU
# Programs here run for milliseconds: most of a test is compilation.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        # By default a process ends if one of its devices is 40 s behind, as on a busy machine.
        "--xla_cpu_collective_call_terminate_timeout_seconds=300",
        # A train step compiles in a third of the time. Later versions do not know the flag.
        "--xla_cpu_use_fusion_emitters=false"
        if importlib.metadata.version("jaxlib").startswith("0.10.")
        else "",
        # Cut into one piece rather than 32, a program compiles with a fifth less work.
        "--xla_cpu_parallel_codegen_split_count=1",
    ]
)
# By default each operation of a program carries its Python stack, which takes a tenth or more of
# the time of a test that compiles sharded steps.
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"
# A device blocks a thread for each collective that it waits in: with one thread for each core or
# device, those that wait for different ones of a program wait forever on a busy machine.
os.environ.setdefault("NPROC", "32")
# Tensors here are tiny: a second thread of torch would mostly spin while it waits for the first.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"

import jaxtyping
import numpy as np
import pytest

# Tracing makes many long-lived objects, so collect garbage less often.
gc.set_threshold(100_000, 50, 100)


def pytest_configure(config: pytest.Config) -> None:
    """Shares compiled programs between runs of the tests, and with their subprocesses.

    Each worker of pytest-xdist has its own folder, because jax does not write entries atomically.
    """
    if config.pluginmanager.hasplugin("cacheprovider"):
        folder = str(config.cache.mkdir("jax-compilation"))  # type: ignore[union-attr]
    else:
        folder = os.path.join(tempfile.gettempdir(), "flaxzoo-tests-jax-compilation")
    worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = os.path.join(folder, worker)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    check_shapes()
    share_context()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--all` and `--sample`."""
    parser.addoption("--all", action="store_true", help="run all tests but those of full size")
    parser.addoption(
        "--sample",
        metavar="SEED",
        help="of each slow test with parameters, run one case that SEED chooses; run all cases in "
        "tests/integration",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Gives each test one of the three marks of `tests/README.md`, and deselects other tiers.

    Modules of quick tests alone come last: a worker of pytest-xdist that has nothing more to do
    takes tests from the end of another's, and must not wait there for a long one.
    """
    here = Path(__file__).parent
    modules_of_long_tests = set()
    functions = set()
    for item in items:
        function = item.nodeid.partition("[")[0]
        item.stash[IS_FIRST_CASE] = function not in functions
        functions.add(function)
        room = item.path.relative_to(here).parts[0]
        if room in ("integration", "parity"):
            item.add_marker(pytest.mark.integration)
        elif item.get_closest_marker("slow") is None:
            item.add_marker(pytest.mark.unit)
        if item.get_closest_marker("slow") is not None:
            modules_of_long_tests.add(item.path)
    chosen = [item for item in items if _is_in_tier(item, config)]
    if config.option.sample is not None:
        chosen = _sample(chosen, config.option.sample)
    config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
    items[:] = sorted(chosen, key=lambda item: item.path not in modules_of_long_tests)


def pytest_collection_finish() -> None:
    """Makes Orbax save a replicated array from one device.

    By default each of the eight devices saves a part of it, and jax compiles a slice for each part
    of each shape, which takes longer than the rest of the save. Subprocesses keep the default.
    """
    if "orbax.checkpoint" not in sys.modules:
        return
    import jax
    import orbax.checkpoint as ocp

    handler = ocp.type_handlers.get_type_handler(jax.Array)
    handler._use_replica_parallel = False  # type: ignore[attr-defined]


def _is_in_tier(item: pytest.Item, config: pytest.Config) -> bool:
    """Whether a test runs: by `-m`, by its name on the command line, by `--all`, or as quick."""
    markers = {marker.name for marker in item.iter_markers()}
    if any("::" in argument for argument in config.args):
        return True
    if "full_size" in markers:
        return "full_size" in config.option.markexpr
    return config.option.all or config.option.markexpr != "" or bool(markers & {"unit", "law"})


def _sample(items: list[pytest.Item], seed: str) -> list[pytest.Item]:
    """Returns the items of `--sample`, with all items of `tests/integration`."""

    def order(item: pytest.Item) -> str:
        return hashlib.sha256(f"{seed} {item.nodeid}".encode()).hexdigest()

    cases = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("slow") and "/integration/" not in item.nodeid:
            cases[item.nodeid.partition("[")[0]].append(item)
    left_out = {item for of_test in cases.values() for item in sorted(of_test, key=order)[1:]}
    return [item for item in items if item not in left_out]


CHECKED = (
    "models",
    "train/engine",
    "train/losses",
    "train/objectives",
    "train/optim",
    "train/distributed",
)
"""Folders whose long tests check shapes too, in the first case of each test."""
CHECKED_IN_ALL_CASES = ("models", "models/decoding", "models/families", "models/nn")
"""Folders, without the folders in them, whose cases are families or parts of models."""
IS_FIRST_CASE = pytest.StashKey[bool]()


RUNNING: list[pytest.Item] = []
"""The current test."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item):
    """Checks shapes in unit tests; whole runs and comparisons are a sixth faster without.

    The first test that uses a shared fixture decides whether its functions are checked.
    """
    folder = item.path.parent.relative_to(Path(__file__).parent)
    is_checked_room = any(Path(room) in (folder, *folder.parents) for room in CHECKED)
    is_checked_case = item.stash[IS_FIRST_CASE] or folder.as_posix() in CHECKED_IN_ALL_CASES
    checked = item.get_closest_marker("unit") is not None or (is_checked_room and is_checked_case)
    jaxtyping.config.update("jaxtyping_disable", not checked)
    RUNNING.append(item)
    try:
        return (yield)
    finally:
        RUNNING.pop()


def check_shapes() -> None:
    """Makes every annotated function of ours check its arguments and its result.

    Functions within functions are not checked, because each call would make their checks again.
    """
    import flax.struct

    make_node = flax.struct.dataclass

    def unchecked(*args: Any, **kwargs: Any) -> Any:
        # A tree may hold shapes or shardings where its annotations say arrays.
        node = make_node(*args, **kwargs)
        node.__no_type_check__ = True  # which jaxtyping respects
        return node

    flax.struct.dataclass = unchecked  # type: ignore[assignment]
    jaxtyped = jaxtyping.jaxtyped

    def jaxtyped_once(*args: Any, **kwargs: Any) -> Any:
        check = jaxtyped(*args, **kwargs)
        if args:
            return check  # called by another package
        return lambda made: made if "<locals>" in getattr(made, "__qualname__", "") else check(made)

    jaxtyping.jaxtyped = jaxtyped_once  # type: ignore[assignment]  # which the hook calls
    jaxtyping.install_import_hook(["flaxzoo.models", "flaxzoo.train"], "beartype.beartype")


def share_context() -> None:
    """Makes jax lower programs in one MLIR context.

    By default it creates a context for each program, a fifth of the time of a tiny one. A context
    keeps the constants of its programs, so each serves 300 of them.
    """
    from jax._src.interpreters import mlir

    make_context = mlir.make_ir_context
    context_of = functools.lru_cache(maxsize=1)(lambda number: make_context())
    programs = itertools.count()
    mlir.make_ir_context = lambda: context_of(next(programs) // 300)


MOST_MAPS = 20_000
"""Linux lets a process map some 65,000 pieces of memory, and a compiled program takes several."""


@pytest.fixture(scope="module", autouse=True)
def forget_programs():
    """Drops compiled programs before the process runs out of memory maps."""
    yield
    maps = Path("/proc/self/maps")
    if maps.is_file() and maps.read_text().count("\n") > MOST_MAPS:
        import jax

        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="module", autouse=True)
def steps_of_runs() -> Iterator[None]:
    """Compiles the step of each configuration once in a module."""
    from .support.compile_once import compile_once

    # A test that patches something may compile another step from an equal configuration.
    with compile_once(lambda: "monkeypatch" not in getattr(RUNNING[-1], "fixturenames", ())):
        yield


@pytest.fixture(scope="session", autouse=True)
def flaxzoo_cache(tmp_path_factory: pytest.TempPathFactory):
    """Keeps the tests from writing to the home folder."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("FLAXZOO_CACHE", str(folder))
        yield folder


@dataclasses.dataclass(frozen=True, eq=False)
class Tiny:
    """A model of a few thousand parameters, none of them at its initial value."""

    config: Any
    execution: Any
    model: Any
    params: Any

    @functools.cached_property
    def apply(self) -> Any:
        """`apply(params, **inputs)`, compiled once per shape."""

        def apply(params: Any, output_attentions: bool = False, **inputs: Any) -> Any:
            return self.model.apply(
                {"params": params}, output_attentions=output_attentions, **inputs
            )

        import jax

        return jax.jit(apply, static_argnames="output_attentions")

    def __call__(self, **inputs: Any) -> Any:
        return self.apply(self.params, **inputs)

    def logits(self, **inputs: Any) -> Any:
        """The output's logits as a numpy array."""
        import numpy as np

        return np.asarray(self(**inputs).logits)


TINY = {"vocab_size": 29, "max_length": 16, "num_layers": 2, "d_model": 16, "num_heads": 4}
TINY_EXECUTION = ("dtype", "param_dtype", "layers", "remat")


@functools.cache
def _tiny(family: str = "gpt", **fields: Any) -> Tiny:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from flaxzoo import models
    from flaxzoo.models.registry import families

    config_of = families()[family].config
    execution = models.Execution(**{k: v for k, v in fields.items() if k in TINY_EXECUTION})
    sizes = {k: v for k, v in fields.items() if k not in TINY_EXECUTION}
    config = config_of(**{"dropout_rate": 0.0, **TINY, **sizes})
    stacked = models.create(config, models.Execution(param_dtype=execution.param_dtype))

    def parameter(path: Any, x: Any) -> Any:
        # Away from the symmetries of initial values (zero biases, flat attention), yet near enough
        # that no layer norm divides by almost nothing, which would amplify rounding.
        center = 1.0 if path[-1].key == "scale" else 0.0
        return jnp.asarray(rng.normal(center, 0.2, x.shape).astype(x.dtype))

    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: models.init_params(stacked, jax.random.key(0)))
    params = jax.tree_util.tree_map_with_path(parameter, shapes)
    model = models.create(config, execution)
    if execution.layers == "separate":
        _, params = models.unstack_layers(stacked, params)
    return Tiny(config, execution, model, params)


@pytest.fixture(scope="session")
def tiny() -> Any:
    """`tiny(**fields)`: a tiny GPT, or with `family="bert"` a BERT, and so on.

    Fields of its config and of its execution, mixed.

    Equal sizes have equal parameters, however they are run.
    """
    return _tiny


@pytest.fixture(scope="session")
def assert_close() -> Any:
    """`assert_close(actual, expected)`: asserts that numbers differ by float32's rounding only."""

    def assert_close(actual: Any, expected: Any, atol: float = 1e-5) -> None:
        np.testing.assert_allclose(actual, expected, rtol=0, atol=atol)

    return assert_close


def _train_config(**fields: Any) -> Any:
    from flaxzoo import models, train
    from flaxzoo.data import CausalLMData, TokenizerConfig

    return train.TrainConfig(
        **{
            "model": models.GPTConfig(
                vocab_size=48,
                max_length=16,
                num_layers=2,
                d_model=32,
                num_heads=4,
                dropout_rate=0.1,
            ),
            "data": CausalLMData(
                source="builtin:python-docs",
                length=16,
                tokenizer=TokenizerConfig(vocab_size=48),
            ),
            # Adam divides by the size of a gradient: a larger epsilon keeps gradients
            # that are zero but for rounding from becoming whole steps.
            "optimizer": train.OptimizerConfig(
                peak_learning_rate=1e-2, epsilon=1e-3, warmup_steps=1
            ),
            "steps": 3,
            "batch_size": 16,
            "evaluate_every": 1,
            "checkpoint_every": 1,
            **fields,
        }
    )


@pytest.fixture(scope="session")
def train_config() -> Any:
    """`train_config(**fields)`: three steps of a tiny GPT with dropout."""
    return _train_config


@pytest.fixture(scope="session")
def batches() -> list[dict[str, np.ndarray]]:
    """Three batches of 16 packed rows; the real tokens of a row are from 1 to 16."""
    rng = np.random.default_rng(0)
    made = []
    for _ in range(3):
        ids = rng.integers(0, 48, (16, 17))
        real = (
            np.arange(16)
            < np.array([16, 1, 9, 16, 3, 14, 2, 16, 1, 1, 2, 16, 12, 5, 7, 1])[:, None]
        )
        second = np.arange(16) >= 6
        made.append(
            {
                "input_ids": np.where(real, ids[:, :-1], 0).astype(np.int32),
                "labels": np.where(real, ids[:, 1:], 0).astype(np.int32),
                "segment_ids": np.where(real, 1 + second, 0).astype(np.int32),
                "position_ids": np.where(second, np.arange(16) - 6, np.arange(16)).astype(np.int32)
                * real,
            }
        )
    return [{k: v.astype(np.int32) for k, v in batch.items()} for batch in made]


@pytest.fixture(scope="module")
def on_one_device() -> Iterator[None]:
    """Compiles for one of the eight devices, which is quicker."""
    from .support.devices import on_devices

    with on_devices(1):
        yield


@pytest.fixture(scope="session")
def work_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the data of `encoders.py`, and the runs on it that several tests look at."""
    from .support.encoders import write_documents, write_labelled

    folder = tmp_path_factory.mktemp("tasks")
    write_documents(folder / "documents.txt")
    write_labelled(folder)
    return folder


def _pretrained(work_folder: Path, name: str, **fields: Any) -> Path:
    from flaxzoo import train

    from .support.devices import on_devices
    from .support.encoders import pretraining

    with on_devices(1):
        train.train(pretraining(work_folder, **fields), work_folder / name, quiet=True)
    return work_folder / name


@pytest.fixture(scope="session")
def pretrained(work_folder: Path) -> Path:
    """The run folder of a tiny BERT with both objectives."""
    return _pretrained(work_folder, "pretrained")


@pytest.fixture(scope="session")
def masked(work_folder: Path) -> Path:
    """The run folder of a tiny BERT with masked words alone."""
    return _pretrained(work_folder, "masked", next_sentence=False)


@pytest.fixture(scope="session")
def tuned(work_folder: Path, pretrained: Path) -> Any:
    """`tuned(kind)`: the result of fine-tuning that BERT for a kind of data."""
    from flaxzoo import train

    from .support.devices import on_devices
    from .support.encoders import fine_tuning

    @functools.cache
    def tuned(kind: str) -> Any:
        config = fine_tuning(work_folder, kind, init_from=str(pretrained))
        with on_devices(1):
            result = train.train(config, work_folder / kind, quiet=True)
        assert result.finished
        return result

    return tuned
