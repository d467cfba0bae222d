"""Compare the memory of the chunked cross-entropy with that of full logits.

    python tests/benchmarks/loss_memory.py

Prints the temp buffers (MiB) of the compiled loss and gradient for a sequence of T positions of
width 256 and a vocabulary of V, in float32, on the devices at hand: "chunks" for flaxzoo's chunked
projection, "whole" for logits [1, T, V]. Nothing is run.
"""

import jax
import jax.numpy as jnp
import optax
from flaxzoo.models.nn.heads import Projection
from flaxzoo.train.losses.cross_entropy import cross_entropy

WIDTH = 256
LENGTHS = (512, 1024, 2048, 4096, 8192)
VOCABULARIES = (8192, 32768, 131072)


def chunks(hidden, kernel, labels, weights):
    """Compute the loss by flaxzoo's chunked projection."""
    return cross_entropy(Projection(hidden, kernel), labels, weights).loss


def whole(hidden, kernel, labels, weights):
    """Compute the loss from full logits."""
    logits = Projection(hidden, kernel).logits()
    return jnp.sum(weights * optax.softmax_cross_entropy_with_integer_labels(logits, labels))


def temp_bytes(loss, length: int, vocabulary: int) -> int:
    """Return the bytes of the compiled gradient beside its arguments and results."""
    arrays = (
        jax.ShapeDtypeStruct((1, length, WIDTH), jnp.float32),
        jax.ShapeDtypeStruct((vocabulary, WIDTH), jnp.float32),
        jax.ShapeDtypeStruct((1, length), jnp.int32),
        jax.ShapeDtypeStruct((1, length), jnp.float32),
    )
    compiled = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*arrays).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes


def main() -> None:
    """Print the table."""
    print(f"{'V':>8} {'T':>6} {'chunks':>10} {'whole':>10}  ratio")
    for vocabulary in VOCABULARIES:
        for length in LENGTHS:
            ours, plain = (temp_bytes(f, length, vocabulary) / 2**20 for f in (chunks, whole))
            print(f"{vocabulary:>8} {length:>6} {ours:>10.1f} {plain:>10.1f}  {plain / ours:.1f}")


if __name__ == "__main__":
    main()
