"""Sums on CPUs are correct with every supported version of jaxlib."""

import os
import subprocess
import sys

import jaxlib.version
import pytest

PROGRAM = """
import jax, jax.numpy as jnp
{first}
import flaxzoo
x = jnp.arange(32_769.0)[:, None] * jnp.array([1.0, 0.0, 0.0])
squared_norm = jax.vmap(lambda row: jnp.sum((jnp.eye(3) @ row) ** 2))
print(int(jax.jit(squared_norm)(x)[-1]))
"""


def run(first=""):
    environment = {**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    program = PROGRAM.format(first=first)
    return subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )


def test_the_sum_of_the_last_row_is_correct():
    # jaxlib 0.10.2 alone prints 1071645696.
    assert int(run().stdout) == 32_768**2


@pytest.mark.skipif(
    jaxlib.version.__version__ != "0.10.2", reason="only jaxlib 0.10.2 has wrong sums"
)
def test_a_program_that_ran_jax_before_is_warned():
    assert "jaxlib 0.10.2" in run("jax.devices()").stderr
