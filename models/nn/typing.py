"""The types of arrays: jaxtyping's, or plain arrays where it is not installed.

A model then runs where there is nothing but jax and flax, as on a bare image of a GPU machine.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxtyping import Array, ArrayLike, Bool, Float, Int, Key
else:
    try:
        from jaxtyping import Array, ArrayLike, Bool, Float, Int, Key
    except ModuleNotFoundError:
        from jax import Array
        from jax.typing import ArrayLike

        class _Shaped:
            """`Float[Array, "B T"]` is `Array`."""

            def __class_getitem__(cls, item: Any) -> Any:
                return item[0]

        Bool = Float = Int = Key = _Shaped

__all__ = ["Array", "ArrayLike", "Bool", "Float", "Int", "Key"]
