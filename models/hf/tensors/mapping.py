"""Maps parameters to the tensors of Hugging Face files.

A mapping is data, a list of `TensorRule`. A tensor name with `{i}` names one tensor in each
layer i; the parameter is then the stack of all layers. The same rules are used for import and
export, so that each direction inverts the other.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence, Set

import numpy as np

from ....data.common.errors import UserError
from ....data.common.fields import require
from .layout import FROM_HEADS, LINEAR, TABLE, VECTOR, Layout, Shape


class WeightsError(UserError):
    """Raised if weights, configuration and tensor mapping do not match."""


@dataclasses.dataclass(frozen=True)
class TensorRule:
    """One or several parameters, and the Hugging Face tensor that stores them."""

    flax: tuple[str, ...]
    """Paths of the parameters, such as `layers/attention/query/kernel`."""
    hf: str
    """Name of the tensor. With `{i}` there is one tensor for each layer, with `{e}` for each
    expert."""
    layout: Layout
    first: int = 0
    """The value of `{i}` for the first stacked tensor: 1 if the first layer lacks the tensor
    (ModernBERT).
    """
    layers: tuple[int, ...] | None = None
    """The indices of the stacked layers that have the tensor; in other layers, the parameter is 0.
    If None, all layers have the tensor.
    """
    inner: int = 1
    """Number of values of `{j}` for each value of `{i}` (the layers of a group in ALBERT)."""

    @property
    def num_stacked(self) -> int:
        """The number of leading axes (layers, experts) whose entries are separate tensors."""
        return sum(index in self.hf for index in ("{i}", "{e}"))

    def indices(self, flax: Sequence[Shape]) -> Iterator[tuple[int, ...]]:
        """Yields the index of each tensor along the stacked axes, in the order of `tensors`."""
        for index in np.ndindex(*flax[0][: self.num_stacked]):
            if self.layers is None or index[0] in self.layers:
                yield index

    def tensors(self, flax: Sequence[Shape]) -> Iterator[tuple[str, Shape]]:
        """Yields the name and shape of each tensor, given the shapes of the parameters."""
        # Each layer and expert has a separate tensor: leave out the stacked axes.
        shape = self.layout.hf_shape([shape[self.num_stacked :] for shape in flax])
        for index in self.indices(flax):
            numbers = dict(zip("ie", index, strict=False))
            numbers["i"], numbers["j"] = divmod(numbers.get("i", 0) + self.first, self.inner)
            yield self.hf.format(**numbers), shape


@dataclasses.dataclass(frozen=True)
class IgnoredTensor:
    """A redundant tensor (a buffer or a tied alias), which is never loaded, only checked."""

    hf: str
    """Name of the tensor; `*` matches any layer."""
    same_as: str | None = None
    """The tensor that this tensor is tied to."""
    value: Callable[[], np.ndarray] = lambda: np.zeros(0)
    """Computes the tensor's values, which follow from the configuration."""
    exported: bool = False
    """Whether exported files must contain the tensor; such a tensor has a `value`."""
    checked: bool = False
    """Whether the tensor in files must equal `value`. False for tensors that no library reads."""


@dataclasses.dataclass(frozen=True)
class TensorMapping:
    """How the parameters of a model are stored as tensors."""

    rules: tuple[TensorRule, ...]
    ignored: tuple[IgnoredTensor, ...] = ()
    prefix: str = ""
    """Prefix of the body's tensors, such as `bert.`, which files may omit."""
    legacy_names: tuple[tuple[str, str], ...] = ()
    """Substrings of tensor names and their replacements in older files, applied in order."""

    @property
    def paths(self) -> set[str]:
        """The paths of the parameters that the rules describe."""
        return {path for rule in self.rules for path in rule.flax}

    def check_paths(self, paths: Set[str]) -> None:
        """Checks that the rules describe the parameters of a model, given their paths.

        Raises:
          WeightsError: A parameter has no rule, or a rule has no parameter.
        """
        names = ", ".join(sorted(self.paths ^ paths))
        problem = f"the tensor mapping and the model do not have the same parameters: {names}"
        require(not names, problem, WeightsError)

    def find(self, name: str, names: Set[str]) -> str:
        """Returns the name in `names` under which a tensor is stored, or else `name`."""
        return next(filter(names.__contains__, self._candidates(name)), name)

    def _candidates(self, name: str) -> Iterator[str]:
        """Yields the names under which files may store a tensor, the most likely first."""
        # A file that contains only the body omits the prefix, and a file with a head has it.
        bare = name.removeprefix(self.prefix)
        for candidate in (name, bare, self.prefix + bare):
            # In older files several substrings of a name may differ: apply the replacements in
            # order.
            yield from itertools.accumulate(
                self.legacy_names, lambda name, parts: name.replace(*parts), initial=candidate
            )


# Rules that many families share.


def linear(
    flax: str | tuple[str, ...], hf: str, layout: Layout = LINEAR, *, bias: bool = True
) -> tuple[TensorRule, ...]:
    """Returns the rules of a linear map, given its tensor prefix and one or more parameter paths.

    If there are several paths, the linear maps have the same input and are stored as one tensor.
    """
    paths = (flax,) if isinstance(flax, str) else flax
    kernel = TensorRule(tuple(f"{path}/kernel" for path in paths), f"{hf}.weight", layout)
    biases = TensorRule(tuple(f"{path}/bias" for path in paths), f"{hf}.bias", VECTOR)
    return (kernel, biases) if bias else (kernel,)


def norm(flax: str, hf: str, *, bias: bool = True) -> tuple[TensorRule, ...]:
    """Returns the rules of a norm; an RMS norm has no bias."""
    scale = TensorRule((f"{flax}/scale",), f"{hf}.weight", VECTOR)
    return (scale, TensorRule((f"{flax}/bias",), f"{hf}.bias", VECTOR)) if bias else (scale,)


def embedding(flax: str, hf: str) -> tuple[TensorRule, ...]:
    """Returns the rule of an embedding `[V, D]`, or of an output projection in the same layout."""
    return (TensorRule((f"{flax}/embedding",), f"{hf}.weight", TABLE),)


def layer_rules(
    flax: str,
    hf: str,
    names: Mapping[str, str] | Mapping[str | tuple[str, ...], str],
    *,
    layout: Layout = LINEAR,
    output_layout: Layout = FROM_HEADS,
    linear_bias: bool = True,
    attention_bias: bool | None = None,
    norm_bias: bool = True,
) -> list[TensorRule]:
    """Returns the rules of a stack of layers.

    Args:
      flax: Path of the stack, such as `layers`.
      hf: Prefix of the tensors of one layer, such as `model.layers.{i}`.
      names: Hugging Face name of each module, such as `self_attn.q_proj` for `attention/query`. A
        module whose path ends in `norm` is a norm; any other module is a linear map. A linear map
        reads heads if its path ends in `attention/output`. Several modules may be stored as one
        linear map.
      layout: How linear maps are stored. Defaults to torch's Linear.
      output_layout: How linear maps that read heads are stored.
      linear_bias: Whether linear maps have biases.
      attention_bias: Whether linear maps of attention have biases. Defaults to `linear_bias`.
      norm_bias: Whether norms have biases.
    """
    rules: list[TensorRule] = []
    for parts, name in names.items():
        paths = [f"{flax}/{part}" for part in ((parts,) if isinstance(parts, str) else parts)]
        tensor = f"{hf}.{name}"
        # A norm has a parameter `scale` in place of a linear map's `kernel`.
        if paths[0].endswith("norm"):
            rules += norm(paths[0], tensor, bias=norm_bias)
        else:
            stored = output_layout if paths[0].endswith("attention/output") else layout
            of_attention = attention_bias is not None and "attention/" in paths[0]
            bias = attention_bias if of_attention else linear_bias
            rules += linear(tuple(paths), tensor, stored, bias=bool(bias))
    return rules


def lm_head(tied_to: str | None) -> tuple[list[TensorRule], list[IgnoredTensor]]:
    """Returns the rule of the output projection; if it is tied, returns the ignored tensor instead.

    Args:
      tied_to: The name of the embedding that the projection is tied to, or None.
    """
    if tied_to is None:
        return [*embedding("output_embedding", "lm_head")], []
    return [], [IgnoredTensor("lm_head.weight", same_as=f"{tied_to}.weight")]
