"""Types of arrays and of trees of arrays.

Array types come from jaxtyping, or are plain types if jaxtyping is not installed. Models can
therefore be used with only jax and flax installed, as in a minimal GPU image.
"""

from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from jaxtyping import Array, ArrayLike, Bool, Float, Int, Key, UInt
else:
    try:
        from jaxtyping import Array, ArrayLike, Bool, Float, Int, Key, UInt
    except ModuleNotFoundError:
        from jax import Array
        from jax.typing import ArrayLike

        class _Shaped:
            """Stands in for jaxtyping: `Float[Array, "B T"]` is the same as `Array`."""

            def __class_getitem__(cls, item: Any) -> Any:
                return item[0]

        Bool = Float = Int = Key = UInt = _Shaped

PyTree: TypeAlias = Any
"""A tree of dicts, tuples and dataclasses with leaves such as arrays, shapes or shardings."""
Params: TypeAlias = dict[str, PyTree]
"""A model's parameters by path, `{"layers": {"attention": {"query": {"kernel": …}}}}`."""

__all__ = ["Array", "ArrayLike", "Bool", "Float", "Int", "Key", "Params", "PyTree", "UInt"]
