"""Weights are data: the one engine that reads a family's table, in either direction.

A table says, row by row, which of our parameters another library keeps under which name, and how
it lays them out. A name with `{i}` is that of layer i; ours is then a stack of all layers. The
same rows import and export, so what one does the other undoes.

Before anything is read, four sets are checked and raised together: our parameters that no row
fills, rows that match nothing of ours, tensors that the file lacks, and those nobody asked for.
"""

import dataclasses
import fnmatch
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np

from ...data.errors import UserError

Shape = tuple[int, ...]
Index = tuple[slice, ...]

ALIGNMENT = 64
"""Of memory that jax takes over without a copy, in bytes."""
BLOCK = 2**18
"""Of how many bytes of a file are copied at once."""
BLOCKS_KEPT = 16
"""After how many of them the file's pages are given back."""


class WeightsError(UserError):
    """Weights and table, or weights and configuration, do not go together."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a tensor of theirs holds one or several of our arrays, side by side along its outputs.

    Ours are `[*inputs, *outputs]`, theirs the matrix `[outputs, inputs]`.
    """

    input_axes: int = 1
    """How many axes of ours are inputs."""
    transposed: bool = True
    """Whether theirs has outputs first (torch's Linear); else inputs (GPT-2's Conv1D)."""
    flat: bool = False
    """Whether theirs has no axis for the inputs: a vector."""

    def shape(self, ours: Sequence[Shape]) -> Shape:
        """Of their tensor, given those of our arrays."""
        inputs = math.prod(ours[0][: self.input_axes])
        outputs = sum(math.prod(shape[self.input_axes :]) for shape in ours)
        if self.flat:
            return (outputs,)
        return (outputs, inputs) if self.transposed else (inputs, outputs)

    def take(self, theirs: np.ndarray, part: int, ours: Sequence[Shape]) -> np.ndarray:
        """Our array number `part` in their tensor; a view."""
        widths = [math.prod(shape[self.input_axes :]) for shape in ours]
        start = sum(widths[:part])
        outputs = slice(start, start + widths[part])
        if self.flat:
            return theirs[outputs].reshape(ours[part])
        matrix = theirs.T if self.transposed else theirs
        return matrix[:, outputs].reshape(ours[part])

    def join(self, ours: Sequence[np.ndarray]) -> np.ndarray:
        """Their tensor of our arrays."""
        inputs = math.prod(ours[0].shape[: self.input_axes])
        matrix = np.concatenate([x.reshape(inputs, -1) for x in ours], axis=1)
        if self.flat:
            return matrix[0]
        return matrix.T if self.transposed else matrix


VECTOR = Layout(input_axes=0, flat=True)
"""Ours of any shape, theirs a vector: biases, also of heads, and norms."""
ROW = Layout(input_axes=0, transposed=False)
"""Theirs a matrix of one row."""
TABLE = Layout(transposed=False)
"""The same on both sides: embeddings, and matrices with inputs first."""
LINEAR = Layout()
"""Torch's Linear; our outputs may have several axes, as heads do."""
FROM_HEADS = Layout(input_axes=2)
"""Torch's Linear behind heads: our inputs are `[N, H]`."""
TABLE_FROM_HEADS = Layout(input_axes=2, transposed=False)
"""Inputs first, behind heads."""


@dataclasses.dataclass(frozen=True)
class Row:
    """Parameters of ours, and the tensor that holds them."""

    ours: tuple[str, ...]
    theirs: str
    """With `{i}` one tensor for each layer of a stack."""
    layout: Layout

    @property
    def stacked(self) -> bool:
        """Whether ours have a leading axis of layers."""
        return "{i}" in self.theirs


@dataclasses.dataclass(frozen=True)
class Known:
    """A tensor that says nothing new: a buffer, or another name of a tied one; only compared."""

    theirs: str
    """`*` stands for any layer."""
    same_as: str | None = None
    """The tensor that it is tied to."""
    value: Callable[[], np.ndarray] | None = None
    """What it holds by its configuration."""
    written: bool = False
    """Whether files need to have it, all the same; it then has a value."""


@dataclasses.dataclass(frozen=True)
class Table:
    """Everything about the tensors of one model."""

    rows: tuple[Row, ...]
    known: tuple[Known, ...] = ()
    prefix: str = ""
    """Of the body's tensors, e.g. `bert.`; files have it or not."""
    legacy: tuple[tuple[str, str], ...] = ()
    """Parts of names, and what older files have in their place."""

    def find(self, name: str, names: Set[str]) -> str | None:
        """Under which of its names a tensor is among `names`."""
        bare = name.removeprefix(self.prefix)
        for candidate in (name, bare, self.prefix + bare):
            older = candidate
            for part, before in self.legacy:
                older = older.replace(part, before)
            if candidate in names:
                return candidate
            if older in names:
                return older
        return None


@runtime_checkable
class Tensors(Protocol):
    """Named tensors that are read one by one."""

    def shapes(self) -> dict[str, Shape]:
        """Of all there are, by name."""
        ...

    def read(self, name: str) -> np.ndarray:
        """One of them."""
        ...

    def forget(self) -> None:
        """Frees what was read: copies are made."""
        ...

    def where(self, name: str) -> str:
        """The file it lies in, for messages."""
        ...


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a parameter lies: part of a row's tensors, one for each layer."""

    row: Row
    part: int
    names: tuple[str, ...]


def locate(
    table: Table, ours: Mapping[str, Shape], tensors: Tensors, source: str
) -> dict[str, Place]:
    """Where each of our parameters lies.

    Args:
      table: of the model.
      ours: shape of each parameter, by its path.
      tensors: what there is.
      source: what they are called in messages.

    Raises:
      WeightsError: names or shapes do not go together; all of them are named.
    """
    theirs = tensors.shapes()
    places: dict[str, Place] = {}
    problems = _Problems()
    used: set[str] = set()
    for row in table.rows:
        shapes = [ours.get(path) for path in row.ours]
        if None in shapes:
            problems.idle += [path for path in row.ours if path not in ours]
            continue
        names = []
        for wanted, expected in _tensors_of(row, [s for s in shapes if s is not None]):
            name = table.find(wanted, theirs.keys())
            if name is None:
                problems.missing.append(wanted)
                continue
            names.append(name)
            if theirs[name] != expected:
                problems.misshapen.append(
                    f"{name} in {tensors.where(name)} is {list(theirs[name])}, not {list(expected)}"
                )
        used.update(names)
        places |= {path: Place(row, part, tuple(names)) for part, path in enumerate(row.ours)}
    problems.unfilled += [path for path in ours if path not in places]
    used.update(_known(table, tensors, problems))
    problems.unread += [name for name in theirs if name not in used]
    problems.raise_any(source)
    return places


def _tensors_of(row: Row, ours: Sequence[Shape]) -> Iterator[tuple[str, Shape]]:
    """Name and shape of each tensor of a row."""
    if not row.stacked:
        yield row.theirs, row.layout.shape(ours)
        return
    expected = row.layout.shape([shape[1:] for shape in ours])
    for i in range(ours[0][0]):
        yield row.theirs.format(i=i), expected


def _known(table: Table, tensors: Tensors, problems: "_Problems") -> Iterator[str]:
    """Names of the tensors that say nothing new; those that do after all are noted."""
    names = tensors.shapes().keys()
    for known in table.known:
        patterns = known.theirs, known.theirs.removeprefix(table.prefix)
        for name in (n for n in names if any(fnmatch.fnmatchcase(n, p) for p in patterns)):
            yield name
            tied = None if known.same_as is None else table.find(known.same_as, names)
            if tied and not _same(tensors.read(name), tensors.read(tied), tensors):
                problems.contradicting.append(f"{name} is tied to {tied}, but differs")
            if known.value is not None and not _close(tensors.read(name), known.value()):
                problems.contradicting.append(f"{name} differs from what its configuration says")


def _close(x: np.ndarray, y: np.ndarray) -> bool:
    """Whether constants are the same, however they were computed and stored."""
    tolerance = 1e-5 if x.dtype.itemsize >= 4 else 1e-2
    return x.shape == y.shape and bool(np.allclose(x.astype(np.float32), y, atol=tolerance))


@dataclasses.dataclass
class _Problems:
    """Whatever does not go together; a name in each list says of what."""

    missing: list[str] = dataclasses.field(default_factory=list)
    unread: list[str] = dataclasses.field(default_factory=list)
    unfilled: list[str] = dataclasses.field(default_factory=list)
    idle: list[str] = dataclasses.field(default_factory=list)
    misshapen: list[str] = dataclasses.field(default_factory=list)
    contradicting: list[str] = dataclasses.field(default_factory=list)

    def raise_any(self, source: str) -> None:
        """Raises a WeightsError that names them all, in one line."""
        told = {
            "it lacks": self.missing,
            "nothing reads": self.unread,
            "nothing fills our": self.unfilled,
            "rows name parameters that the model has not:": self.idle,
            "shapes differ from the configuration's:": self.misshapen,
            "contradictions:": self.contradicting,
        }
        parts = [f"{what} {', '.join(names)}" for what, names in told.items() if names]
        if parts:
            raise WeightsError(f"{source} does not fit its configuration: {'; '.join(parts)}")


def read_parameter(
    place: Place, tensors: Tensors, ours: Mapping[str, Shape], dtype: Any, index: Index
) -> np.ndarray:
    """A piece of one of our parameters, read from their tensors one after the other.

    Args:
      place: where it lies.
      tensors: theirs.
      ours: shapes of our parameters.
      dtype: of the piece.
      index: a slice of each axis.
    """
    row, shapes = place.row, [ours[path] for path in place.row.ours]
    own = shapes[place.part]
    piece = _aligned(tuple(len(range(n)[part]) for n, part in zip(own, index, strict=True)), dtype)
    names, targets = place.names, [piece]
    if row.stacked:
        names, targets, index = names[index[0]], list(piece), index[1:]
        shapes = [shape[1:] for shape in shapes]
    for name, target in zip(names, targets, strict=True):
        _copy(target, row.layout.take(_read(tensors, name), place.part, shapes)[index], tensors)
    return piece


def _aligned(shape: Shape, dtype: Any) -> np.ndarray:
    """Memory that a device of the host takes over as it is."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def _copy(target: np.ndarray, source: np.ndarray, tensors: Tensors) -> None:
    for block in _blocks(source, tensors):
        target[block] = source[block]


def _same(x: np.ndarray, y: np.ndarray, tensors: Tensors) -> bool:
    return x.shape == y.shape and all(np.array_equal(x[b], y[b]) for b in _blocks(x, tensors))


def _blocks(view: np.ndarray, tensors: Tensors) -> Iterator[Index]:
    """Along the rows of a file, as much at once as the processor's cache has room for.

    A transposed view is copied five times as fast in this way, and no tensor stays in memory.
    """
    axis = int(np.argmax(view.strides))
    step = max(1, BLOCK // max(1, view.strides[axis]))
    before = (slice(None),) * axis
    for number, start in enumerate(range(0, view.shape[axis], step), 1):
        yield (*before, slice(start, start + step))
        if number % BLOCKS_KEPT == 0:
            tensors.forget()
    tensors.forget()


def _read(tensors: Tensors, name: str) -> np.ndarray:
    """A tensor of floating-point numbers."""
    tensor = tensors.read(name)
    if not jnp.issubdtype(tensor.dtype, jnp.floating):
        raise WeightsError(
            f"{name} in {tensors.where(name)} holds {tensor.dtype}, not floating-point numbers"
        )
    return tensor


@dataclasses.dataclass(frozen=True)
class Written:
    """A tensor of theirs that is to be made of arrays of ours."""

    name: str
    shape: Shape
    make: Callable[[], np.ndarray]


def write_tensors(table: Table, params: Mapping[str, Any]) -> Iterator[Written]:
    """Every tensor of a model; each is made when it is asked for.

    Args:
      table: of the model.
      params: our arrays, by their paths.

    Raises:
      WeightsError: parameters and rows do not go together.
    """
    written = {path for row in table.rows for path in row.ours}
    if written != params.keys():
        names = ", ".join(sorted(written ^ params.keys()))
        raise WeightsError(f"the table and the model do not have the same parameters: {names}")
    for row in table.rows:
        arrays = [params[path] for path in row.ours]
        for i, (name, shape) in enumerate(_tensors_of(row, [x.shape for x in arrays])):
            layer = i if row.stacked else None
            yield Written(name, shape, functools.partial(_join, row.layout, arrays, layer))
    for known in table.known:
        if known.written and known.value is not None:
            yield Written(known.theirs, known.value().shape, known.value)


def _join(layout: Layout, arrays: Sequence[Any], layer: int | None) -> np.ndarray:
    own = arrays if layer is None else [x[layer] for x in arrays]
    return np.ascontiguousarray(layout.join([np.asarray(x) for x in own]))


# Rows that occur in every table.


def linear(ours: str, theirs: str, layout: Layout = LINEAR, bias: bool = True) -> tuple[Row, ...]:
    """An affine map: its kernel and its bias."""
    kernel = Row((f"{ours}/kernel",), f"{theirs}.weight", layout)
    return (kernel, Row((f"{ours}/bias",), f"{theirs}.bias", VECTOR)) if bias else (kernel,)


def norm(ours: str, theirs: str) -> tuple[Row, ...]:
    """A layer norm: its scale and its bias."""
    return (
        Row((f"{ours}/scale",), f"{theirs}.weight", VECTOR),
        Row((f"{ours}/bias",), f"{theirs}.bias", VECTOR),
    )


def embedding(ours: str, theirs: str) -> tuple[Row, ...]:
    """A table of vectors."""
    return (Row((f"{ours}/embedding",), f"{theirs}.weight", TABLE),)
