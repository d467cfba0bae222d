"""Eight virtual devices, run-time checks of shapes, and nothing outside temporary folders.

All of it must be set before jax and flaxzoo are first imported.
"""

import dataclasses
import functools
import gc
import importlib.metadata
import os
import tempfile
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
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"

import jaxtyping
import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Shares compiled programs between runs of the tests, and with their subprocesses.

    Each worker of pytest-xdist has its own, for jax does not write an entry at once: another
    process may find half of it.
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


def check_shapes() -> None:
    """Has every annotated function of ours check its arguments and its answer."""
    import flax.struct

    make_node = flax.struct.dataclass

    def unchecked(*args: Any, **kwargs: Any) -> Any:
        # A tree may hold shapes or shardings where its annotations say arrays.
        node = make_node(*args, **kwargs)
        node.__no_type_check__ = True  # which jaxtyping respects
        return node

    flax.struct.dataclass = unchecked  # type: ignore[assignment]
    jaxtyping.install_import_hook(["flaxzoo.models", "flaxzoo.train"], "beartype.beartype")


MOST_MAPS = 20_000
"""Linux lets a process map some 65,000 pieces of memory, and a compiled program takes several."""


@pytest.fixture(scope="module", autouse=True)
def forget_programs():
    """Drops what earlier tests compiled before the process runs out of maps, and dies of it."""
    yield
    maps = Path("/proc/self/maps")
    if maps.is_file() and maps.read_text().count("\n") > MOST_MAPS:
        import jax

        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="session", autouse=True)
def flaxzoo_cache(tmp_path_factory: pytest.TempPathFactory):
    """No test writes to the home folder."""
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

    config_of = {"gpt": models.GPTConfig, "bert": models.BertConfig}[family]
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
        _, params = models.separate_layers(stacked, params)
    return Tiny(config, execution, model, params)


@pytest.fixture(scope="session")
def tiny() -> Any:
    """`tiny(**fields)`: a tiny GPT, or with `family="bert"` a BERT.

    Fields of its config and of its execution, mixed.

    Equal sizes have equal parameters, however they are run.
    """
    return _tiny
