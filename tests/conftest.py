"""Eight virtual devices, run-time checks of shapes and types, and nothing outside temporary folders.

All of it must be set before jax and flaxzoo are first imported.
"""

import os
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"

import jaxtyping
import pytest

# Every annotated function of these packages checks its arguments and its answer.
jaxtyping.install_import_hook(["flaxzoo.models", "flaxzoo.train"], "beartype.beartype")


def pytest_configure(config: pytest.Config) -> None:
    """Shares compiled programs between runs of the tests (and with their subprocesses)."""
    if getattr(config, "cache", None) is not None:
        cache = str(config.cache.mkdir("jax-compilation"))
    else:
        cache = os.path.join(tempfile.gettempdir(), "flaxzoo-tests-jax-compilation")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = cache
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"


@pytest.fixture(scope="session", autouse=True)
def flaxzoo_cache(tmp_path_factory: pytest.TempPathFactory):
    """No test writes to the home folder."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("FLAXZOO_CACHE", str(folder))
        yield folder
