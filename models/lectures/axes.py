"""Logical axes of the parameters that only the lecture variants have."""

from ..registry import AxisRules

_LAYERS = r"((encoder|decoder)/)?layers"

LECTURE_AXES: AxisRules = {
    rf"{_LAYERS}/attention/(query|key|value)_convolution/taps": ("layers", None, "heads", None),
    rf"{_LAYERS}/attention/relative_(keys|values)/embedding": ("layers", None, None),
    rf"{_LAYERS}/((cross_)?attention|feed_forward)_residual/scalar": ("layers",),
}
