"""Maps parameters to the tensors of Hugging Face files and their layouts.

A mapping is data, a list of `TensorRule`. A tensor name with `{i}` means layer i; the
parameter is then the stack of all layers. The same rules import and export, so that each direction
inverts the other.

Before anything is read, `locate` compares both sides and reports all differences in one error:
parameters that no rule fills, rules that match no parameter, missing tensors, and tensors that no
rule reads.
"""

import collections
import dataclasses
import fnmatch
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Protocol, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from ...data.common.errors import UserError

Shape: TypeAlias = tuple[int, ...]
Index: TypeAlias = tuple[slice, ...]
HostOrDeviceArray: TypeAlias = np.ndarray | jax.Array

ALIGNMENT = 64
"""Alignment, in bytes, of memory that jax uses without a copy."""
BLOCK = 2**18
"""Number of bytes of a file that are copied at a time."""
BLOCKS_KEPT = 16
"""Number of blocks after which the pages of the file are released."""


class WeightsError(UserError):
    """Weights, configuration and tensor mapping do not match."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a Hugging Face tensor holds one or several parameters, concatenated along its outputs.

    A parameter is `[*inputs, *outputs]`; the tensor is a matrix `[outputs, inputs]` with the axes
    of each side merged. A key kernel `[D, K, H]` of K grouped heads, for example, is the matrix
    `[K·H, D]` in the layout `LINEAR`.
    """

    input_axes: int = 1
    """Number of leading axes of the parameter that are inputs."""
    transposed: bool = True
    """Whether the tensor has outputs first (torch's Linear) or inputs first (GPT-2's Conv1D)."""
    flat: bool = False
    """Whether the tensor is a vector, without an axis for the inputs."""
    by_head: bool = False
    """Whether parameters with outputs `[N, H]` are interleaved by head (queries, keys and values of
    GPT-NeoX and BLOOM) instead of concatenated. If the parameters have several numbers of heads,
    each group of N / K query heads is followed by its key head and its value head (Falcon)."""

    def hf_shape(self, flax: Sequence[Shape]) -> Shape:
        """Returns the shape of the tensor that holds parameters of the given shapes."""
        inputs = math.prod(flax[0][: self.input_axes])
        outputs = sum(math.prod(shape[self.input_axes :]) for shape in flax)
        if self.flat:
            return (outputs,)
        return (outputs, inputs) if self.transposed else (inputs, outputs)

    def split(self, tensor: np.ndarray, part: int, flax: Sequence[Shape]) -> np.ndarray:
        """Returns one parameter of a tensor that holds several, as a view if its order allows one.

        Args:
          tensor: A tensor of a Hugging Face file.
          part: Index of the parameter.
          flax: Shape of every parameter in the tensor.
        """
        if self.by_head:
            # The numbers of heads of all parameters, and the size of a head.
            heads, size = [shape[self.input_axes] for shape in flax], flax[part][-1]
            each = [number // min(heads) for number in heads]  # heads of a group
            own = slice(sum(each[:part]), sum(each[: part + 1]))
            if self.flat:
                # A bias: [outputs] to [K, heads of a group, H].
                return tensor.reshape(min(heads), sum(each), size)[:, own].reshape(flax[part])
            rows = tensor.reshape(min(heads), sum(each), size, -1)[:, own]  # [K, ·, H, inputs]
            return np.moveaxis(rows, -1, 0).reshape(flax[part])
        widths = [math.prod(shape[self.input_axes :]) for shape in flax]
        start = sum(widths[:part])
        outputs = slice(start, start + widths[part])
        if self.flat:
            return tensor[outputs].reshape(flax[part])
        matrix = tensor.T if self.transposed else tensor  # [inputs, outputs]
        return matrix[:, outputs].reshape(flax[part])

    def join(self, params: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the tensor that holds the given parameters."""
        if self.by_head:
            # [inputs, N, H] to [N, H, inputs].
            inputs_last = [x if self.flat else np.moveaxis(x, 0, -1) for x in params]
            groups = min(len(x) for x in inputs_last)
            grouped = [x.reshape(groups, -1, *x.shape[1:]) for x in inputs_last]
            joined = np.concatenate(grouped, axis=1)  # [K, heads of a group, H, …]
            return joined.reshape(-1) if self.flat else joined.reshape(-1, joined.shape[-1])
        inputs = math.prod(params[0].shape[: self.input_axes])
        matrix = np.concatenate([x.reshape(inputs, -1) for x in params], axis=1)
        if self.flat:
            return matrix[0]
        return matrix.T if self.transposed else matrix


@dataclasses.dataclass(frozen=True)
class ConvolutionLayout(Layout):
    """A kernel `[taps, inputs, outputs]` as torch's Conv1d, `[outputs, inputs, taps]`."""

    def hf_shape(self, flax: Sequence[Shape]) -> Shape:
        """Returns the shape of the tensor."""
        return tuple(reversed(flax[0]))

    def split(self, tensor: np.ndarray, part: int, flax: Sequence[Shape]) -> np.ndarray:
        """Returns the kernel of a tensor, as a view."""
        del part, flax
        return tensor.T

    def join(self, params: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the tensor that holds the kernel."""
        return params[0].T


VECTOR = Layout(input_axes=0, flat=True)
"""A parameter of any shape as a vector: scales of norms, and biases, with or without heads."""
ROW = Layout(input_axes=0, transposed=False)
"""A parameter of any shape as a matrix with one row."""
TABLE = Layout(transposed=False)
"""An unchanged matrix: embeddings, and kernels stored with inputs first."""
LINEAR = Layout()
"""A kernel as torch's Linear; its outputs may have several axes, such as `[D, N, H]`."""
FROM_HEADS = Layout(input_axes=2)
"""A kernel as torch's Linear that reads heads: its inputs are `[N, H]`."""
BY_HEAD = Layout(by_head=True)
"""Kernels of queries, keys and values as one torch Linear, head by head."""
BY_HEAD_VECTOR = Layout(input_axes=0, flat=True, by_head=True)
"""The biases of `BY_HEAD` kernels."""
CONVOLUTION = ConvolutionLayout()
TABLE_FROM_HEADS = Layout(input_axes=2, transposed=False)
"""A kernel that reads heads, stored with inputs first."""


@dataclasses.dataclass(frozen=True)
class TensorRule:
    """One or several parameters and the Hugging Face tensor that holds them."""

    flax: tuple[str, ...]
    """Paths of the parameters, such as `layers/attention/query/kernel`."""
    hf: str
    """Name of the tensor; with `{i}`, one tensor for each layer, with `{e}` for each expert."""
    layout: Layout
    first: int = 0
    """The number `i` of the first stacked tensor: 1 if the first layer has none (ModernBERT)."""
    layers: tuple[int, ...] | None = None
    """The stacked layers that have the tensor; in the others the parameter is 0. If None, all."""
    inner: int = 1
    """Number of stacked tensors `{j}` for each `{i}` (the layers of a group in ALBERT)."""

    @property
    def num_stacked(self) -> int:
        """The number of leading axes of the parameters whose entries are separate tensors."""
        return sum(index in self.hf for index in ("{i}", "{e}"))

    def indices(self, flax: Sequence[Shape]) -> Iterator[tuple[int, ...]]:
        """Yields the index of each tensor in the parameters, in the order of `tensors`."""
        for index in np.ndindex(*flax[0][: self.num_stacked]):
            if self.layers is None or index[0] in self.layers:
                yield index

    def tensors(self, flax: Sequence[Shape]) -> Iterator[tuple[str, Shape]]:
        """Yields name and shape of each tensor, given the shapes of the parameters."""
        # One tensor per layer and expert: leave out the stacked axes.
        shape = self.layout.hf_shape([shape[self.num_stacked :] for shape in flax])
        for index in self.indices(flax):
            numbers = dict(zip("ie", index, strict=False))
            numbers["i"], numbers["j"] = divmod(numbers.get("i", 0) + self.first, self.inner)
            yield self.hf.format(**numbers), shape


@dataclasses.dataclass(frozen=True)
class IgnoredTensor:
    """A redundant tensor (a buffer or a tied alias): never loaded, only checked for consistency."""

    hf: str
    """Name of the tensor; `*` matches any layer."""
    same_as: str | None = None
    """The tensor that this one is tied to."""
    value: Callable[[], np.ndarray] | None = None
    """Computes the values implied by the configuration."""
    exported: bool = False
    """Whether exported files must contain it; it then has a `value`."""
    checked: bool = True
    """Whether the tensor in files must equal `value`; False for tensors that nothing reads."""


@dataclasses.dataclass(frozen=True)
class TensorMapping:
    """The tensors of one model."""

    rules: tuple[TensorRule, ...]
    ignored: tuple[IgnoredTensor, ...] = ()
    prefix: str = ""
    """Prefix of the body's tensors, such as `bert.`, which files may omit."""
    legacy_names: tuple[tuple[str, str], ...] = ()
    """Parts of names and their replacements in older files, applied in order."""

    def find(self, name: str, names: Set[str]) -> str | None:
        """Returns the name in `names` that stores a tensor, or None."""
        # A file of the body alone omits the prefix, and a file with a head adds it.
        bare = name.removeprefix(self.prefix)
        for candidate in (name, bare, self.prefix + bare):
            if candidate in names:
                return candidate
            # Older files differ in several parts of a name: apply the replacements in order.
            legacy = candidate
            for part, replacement in self.legacy_names:
                legacy = legacy.replace(part, replacement)
                if legacy in names:
                    return legacy
        return None


# Rules that many families share.


def linear(
    flax: str | tuple[str, ...], hf: str, layout: Layout = LINEAR, *, bias: bool = True
) -> tuple[TensorRule, ...]:
    """Returns the rules of a linear map, given its tensor prefix and one or more parameter paths.

    Several maps of the same input form one tensor.
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
      names: Hugging Face name of each part, such as `self_attn.q_proj` for `attention/query`. A
        part that ends in `norm` is a norm; any other is a linear map; one that ends in
        `attention/output` reads heads. Several parts may form one linear map.
      layout: How linear maps are stored. Defaults to torch's Linear.
      output_layout: How linear maps that read heads are stored.
      linear_bias: Whether linear maps have biases.
      attention_bias: The same for attention, if it differs.
      norm_bias: Whether norms have biases.
    """
    rules: list[TensorRule] = []
    for parts, name in names.items():
        paths = [f"{flax}/{part}" for part in ((parts,) if isinstance(parts, str) else parts)]
        tensor = f"{hf}.{name}"
        # A norm has a scale where a linear map has a kernel.
        if paths[0].endswith("norm"):
            rules += norm(paths[0], tensor, bias=norm_bias)
        else:
            stored = output_layout if paths[0].endswith("attention/output") else layout
            of_attention = attention_bias is not None and "attention/" in paths[0]
            bias = attention_bias if of_attention else linear_bias
            rules += linear(tuple(paths), tensor, stored, bias=bool(bias))
    return rules


def lm_head(tied_to: str | None) -> tuple[list[TensorRule], list[IgnoredTensor]]:
    """Returns the rule of the output projection, or its alias if it is tied.

    Args:
      tied_to: The name of the embedding that the projection is tied to, or None.
    """
    if tied_to is None:
        return [*embedding("output_embedding", "lm_head")], []
    return [], [IgnoredTensor("lm_head.weight", same_as=f"{tied_to}.weight")]


# Import.


@runtime_checkable
class TensorSource(Protocol):
    """Named tensors that are read one at a time."""

    def shapes(self) -> dict[str, Shape]:
        """Returns the shape of every tensor, by name."""
        ...

    def read(self, name: str) -> np.ndarray:
        """Returns one tensor."""
        ...

    def release(self) -> None:
        """Frees the memory of tensors that were read and copied."""
        ...

    def file_of(self, name: str) -> str:
        """Returns the file that contains a tensor, for messages."""
        ...


@dataclasses.dataclass(frozen=True)
class TensorLocation:
    """Where a parameter is stored: its part of a rule's tensors, one per layer."""

    rule: TensorRule
    part: int
    """Index of the parameter in the rule."""
    names: tuple[str, ...]
    """Names of the tensors in the files."""


def locate(
    mapping: TensorMapping,
    flax: Mapping[str, Shape],
    tensors: TensorSource,
    source: str,
    *,
    stored: Mapping[str, object] = {},
) -> dict[str, TensorLocation]:
    """Returns where each parameter is stored, by path.

    Args:
      mapping: The tensor mapping of the model.
      flax: Shape of each parameter, by its path.
      tensors: The tensors of the files.
      source: Their folder, for messages.
      stored: The content of its `config.json`, to name the field that is probably wrong.

    Raises:
      WeightsError: Names or shapes do not match; the message names some of them, and the field
        of the configuration that explains the shapes.
    """
    shapes = tensors.shapes()
    locations: dict[str, TensorLocation] = {}
    mismatches = _Mismatches()
    used: set[str] = set()
    for rule in mapping.rules:
        # A rule without its parameters is a mistake in the mapping or in the configuration.
        absent = [path for path in rule.flax if path not in flax]
        if absent:
            mismatches.without_parameter += absent
            continue
        # Check that each tensor exists under one of its names and has the expected shape.
        names = []
        wanted_tensors = rule.tensors([flax[path] for path in rule.flax])
        # A mapping may list far more tensors than the files have. Checking one more than that is
        # enough to find a missing one.
        for wanted, expected in itertools.islice(wanted_tensors, len(shapes) + 1):
            name = mapping.find(wanted, shapes.keys())
            if name is None:
                mismatches.missing.append(wanted)
                continue
            names.append(name)
            if shapes[name] != expected:
                mismatches.sizes += zip(shapes[name], expected, strict=False)
                mismatches.misshapen.append(
                    f"{name} in {tensors.file_of(name)} is {list(shapes[name])}, not "
                    f"{list(expected)}"
                )
        used.update(names)
        for part, path in enumerate(rule.flax):
            locations[path] = TensorLocation(rule, part, tuple(names))
    # Check that every parameter has a rule, and that every tensor is read or known as redundant.
    mismatches.unfilled += [path for path in flax if path not in locations]
    used.update(_check_ignored(mapping, tensors, mismatches))
    mismatches.unread += [name for name in shapes if name not in used]
    mismatches.raise_any(source, stored)
    return locations


def _check_ignored(
    mapping: TensorMapping, tensors: TensorSource, mismatches: "_Mismatches"
) -> Iterator[str]:
    """Yields the names of ignored tensors, and records those that are not redundant."""
    names = tensors.shapes().keys()
    for ignored in mapping.ignored:
        # A file of the body alone omits the prefix.
        bare = ignored.hf.removeprefix(mapping.prefix)
        patterns = bare, mapping.prefix + bare
        for name in (n for n in names if any(fnmatch.fnmatchcase(n, p) for p in patterns)):
            yield name
            tied = None if ignored.same_as is None else mapping.find(ignored.same_as, names)
            if tied and not _equal(tensors.read(name), tensors.read(tied), tensors):
                mismatches.contradicting.append(f"{name} is tied to {tied}, but differs")
            if ignored.value is None or not ignored.checked:
                continue
            if not _close(tensors.read(name), ignored.value()):
                mismatches.contradicting.append(
                    f"{name} differs from what its configuration implies"
                )


def _equal(x: np.ndarray, y: np.ndarray, tensors: TensorSource) -> bool:
    return x.shape == y.shape and all(np.array_equal(x[b], y[b]) for b in _blocks(x, tensors))


def _close(x: np.ndarray, y: np.ndarray) -> bool:
    """Returns whether constants agree within the precision of their storage."""
    tolerance = 1e-5 if x.dtype.itemsize >= 4 else 1e-2
    return x.shape == y.shape and bool(np.allclose(x.astype(np.float32), y, atol=tolerance))


@dataclasses.dataclass
class _Mismatches:
    """All differences between files, mapping and model, by name."""

    missing: list[str] = dataclasses.field(default_factory=list)
    unread: list[str] = dataclasses.field(default_factory=list)
    unfilled: list[str] = dataclasses.field(default_factory=list)
    without_parameter: list[str] = dataclasses.field(default_factory=list)
    misshapen: list[str] = dataclasses.field(default_factory=list)
    contradicting: list[str] = dataclasses.field(default_factory=list)
    sizes: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    """Actual and expected sizes of the axes of misshapen tensors."""

    def raise_any(self, source: str, stored: Mapping[str, object]) -> None:
        """Raises a one-line WeightsError that names the first differences of each kind, if any."""
        kinds = {
            "it lacks": self.missing,
            "nothing reads": self.unread,
            "no tensor fills the parameters": self.unfilled,
            "the model has no parameters": self.without_parameter,
            "wrong shapes:": self.misshapen,
            "contradictions:": self.contradicting,
        }
        parts = [f"{kind} {_first_of(names)}" for kind, names in kinds.items() if names]
        if parts:
            listed = "; ".join([*self._suspects(stored), *parts])
            raise WeightsError(f"{source} does not fit its configuration: {listed}")

    def _suspects(self, stored: Mapping[str, object]) -> Iterator[str]:
        """Yields a note on the field of `config.json` that probably causes the mismatched sizes."""
        wrong = collections.Counter(pair for pair in self.sizes if pair[0] != pair[1])
        # The size that differs most often is probably wrong in the configuration.
        candidates = [pair for pair, _ in wrong.most_common()]
        if not wrong:  # missing layers, or layers that nothing reads
            for names, more in ((self.missing, False), (self.unread, True)):
                layers = [int(x[1]) for name in names if (x := re.search(r"\.(\d+)\.", name))]
                if layers:
                    first, past = min(layers), max(layers) + 1
                    candidates.append((past, first) if more else (first, past))
        # A field with the expected size is the suspect, as the files have another size.
        for there, expected in candidates:
            names = [
                name for name, value in stored.items() if value is not True and value == expected
            ]
            if names:
                yield f"{' or '.join(names)} {expected} is the suspect, as the tensors say {there}"
                return


def _first_of(names: Sequence[str]) -> str:
    """Returns the first three names, and how many more there are."""
    more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def read_parameter(
    location: TensorLocation,
    tensors: TensorSource,
    *,
    flax: Mapping[str, Shape],
    dtype: DTypeLike,
    index: Index,
) -> np.ndarray:
    """Reads a slice of one parameter, tensor by tensor.

    Args:
      location: Where the parameter is stored.
      tensors: The tensors of the files.
      flax: Shape of every parameter, by its path.
      dtype: The type of the result.
      index: A slice for each axis of the parameter.

    Raises:
      WeightsError: A tensor does not hold floating-point numbers.
    """
    rule = location.rule
    shapes = [flax[path] for path in rule.flax]
    # jax uses aligned memory on the host without a copy.
    lengths = zip(shapes[location.part], index, strict=True)
    shape = tuple(len(range(size)[part]) for size, part in lengths)
    memory = np.empty(math.prod(shape) * np.dtype(dtype).itemsize + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    result = memory[start : start + memory.size - ALIGNMENT].view(dtype).reshape(shape)

    names, targets = location.names, [result]
    if stacked := rule.num_stacked:  # the first axes count tensors
        every = np.full(shapes[location.part][:stacked], None, object)
        for position, name in zip(rule.indices(shapes), names, strict=True):
            every[position] = name
        names = every[index[:stacked]].ravel().tolist()
        # A slice of the result for each tensor.
        targets, index = list(result.reshape(-1, *shape[stacked:])), index[stacked:]
        shapes = [shape[stacked:] for shape in shapes]
    # Copy block by block; the conversion to `dtype` happens in the assignment.
    for name, target in zip(names, targets, strict=True):
        if name is None:  # a layer without the tensor
            target[...] = 0
            continue
        tensor = tensors.read(name)
        if not jnp.issubdtype(tensor.dtype, jnp.floating):
            raise WeightsError(
                f"{name} in {tensors.file_of(name)} holds {tensor.dtype}, not floating-point "
                "numbers"
            )
        view = rule.layout.split(tensor, location.part, shapes)[index]
        for block in _blocks(view, tensors):
            target[block] = view[block]
    return result


def _blocks(view: np.ndarray, tensors: TensorSource) -> Iterator[Index]:
    """Yields slices in file order, each small enough for the processor's cache.

    This makes the copy of a transposed view five times as fast and keeps no tensor in memory.
    """
    # The axis with the largest stride varies slowest in the file.
    axis = int(np.argmax(view.strides))
    step = max(1, BLOCK // max(1, view.strides[axis]))
    before = (slice(None),) * axis
    for number, start in enumerate(range(0, view.shape[axis], step), 1):
        yield (*before, slice(start, start + step))
        if number % BLOCKS_KEPT == 0:
            tensors.release()
    tensors.release()


# Export.


@dataclasses.dataclass(frozen=True)
class ExportedTensor:
    """A Hugging Face tensor that is computed from parameters when it is written."""

    name: str
    shape: Shape
    make: Callable[[], np.ndarray]


def export_tensors(
    mapping: TensorMapping, params: Mapping[str, HostOrDeviceArray]
) -> Iterator[ExportedTensor]:
    """Yields every tensor of a model.

    Args:
      mapping: The tensor mapping of the model.
      params: Its parameters, by their paths.

    Raises:
      WeightsError: The mapping and the model do not have the same parameters.
    """
    mapped = {path for rule in mapping.rules for path in rule.flax}
    if mapped != params.keys():
        names = ", ".join(sorted(mapped ^ params.keys()))
        raise WeightsError(
            f"the tensor mapping and the model do not have the same parameters: {names}"
        )

    for rule in mapping.rules:
        yield from rule_tensors(rule, params)
    # Some redundant tensors must be in the files, because transformers expects them.
    for ignored in mapping.ignored:
        if ignored.exported and ignored.value is not None:
            yield ExportedTensor(ignored.hf, ignored.value().shape, ignored.value)


def rule_tensors(
    rule: TensorRule, params: Mapping[str, HostOrDeviceArray]
) -> Iterator[ExportedTensor]:
    """Yields the tensors of a rule, given the parameters by their paths."""

    def make(index: tuple[int, ...]) -> np.ndarray:
        # Copy one layer, or one expert of a layer, from the device at a time.
        arrays = [np.asarray(params[path][index]) for path in rule.flax]
        return np.ascontiguousarray(rule.layout.join(arrays))

    shapes = [params[path].shape for path in rule.flax]
    for index, (name, shape) in zip(rule.indices(shapes), rule.tensors(shapes), strict=True):
        yield ExportedTensor(name, shape, functools.partial(make, index))
