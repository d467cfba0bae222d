"""Types of arrays and of trees of arrays.

Arrays have jaxtyping's types, or plain ones where it is not installed: a model then runs where
there is nothing but jax and flax, as on a bare image of a GPU machine.
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
            """`Float[Array, "B T"]` is `Array`."""

            def __class_getitem__(cls, item: Any) -> Any:
                return item[0]

        Bool = Float = Int = Key = UInt = _Shaped

PyTree: TypeAlias = Any
"""Any nesting of dicts, tuples and dataclasses whose leaves are arrays, or their shapes or
shardings."""
Params: TypeAlias = dict[str, PyTree]
"""A model's parameters by path, `{"layers": {"attention": {"query": {"kernel": …}}}}`."""

__all__ = ["Array", "ArrayLike", "Bool", "Float", "Int", "Key", "Params", "PyTree", "UInt"]
