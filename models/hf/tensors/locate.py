"""Finds the tensors that store each parameter.

Before any tensor is read, `locate` compares the model with the files, and reports all differences
in one error: missing tensors, tensors of other shapes, and tensors that no rule reads.
"""

import collections
import dataclasses
import fnmatch
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ....data.common.fields import require
from .layout import Shape
from .mapping import TensorMapping, WeightsError
from .read import TensorLocation, TensorSource, blocks


def locate(
    mapping: TensorMapping,
    flax: Mapping[str, Shape],
    tensors: TensorSource,
    source: str,
    *,
    stored: Mapping[str, object] = {},
) -> dict[str, TensorLocation]:
    """Returns the location of each parameter in the files, by the parameter's path.

    Args:
      mapping: The tensor mapping of the model.
      flax: Shape of each parameter, by its path.
      tensors: The tensors of the files.
      source: The folder of the files, for messages.
      stored: The content of the folder's `config.json`, to name the field that is probably wrong.

    Raises:
      WeightsError: Names or shapes do not match; the message names some of them, and the field
        of the configuration that explains the difference.
    """
    shapes = tensors.shapes()
    locations: dict[str, TensorLocation] = {}
    mismatches = _Mismatches()
    used: set[str] = set()
    mapping.check_paths(flax.keys())
    for rule in mapping.rules:
        # Check that each tensor exists under one of its names and has the expected shape.
        names = []
        wanted_tensors = rule.tensors([flax[path] for path in rule.flax])
        # A mapping may list far more tensors than the files have. Checking one tensor more than the
        # files have is enough to find a missing tensor.
        for wanted, expected in itertools.islice(wanted_tensors, len(shapes) + 1):
            name = mapping.find(wanted, shapes.keys())
            if name not in shapes:
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
    # Check that every tensor is read or known to be redundant.
    used.update(_check_ignored(mapping, tensors, mismatches))
    mismatches.unread += itertools.filterfalse(used.__contains__, shapes)
    mismatches.raise_any(source, stored)
    return locations


def _check_ignored(
    mapping: TensorMapping, tensors: TensorSource, mismatches: "_Mismatches"
) -> Iterator[str]:
    """Yields the names of ignored tensors, and records those that contradict the other tensors."""
    names = tensors.shapes().keys()
    for ignored in mapping.ignored:
        # A file that contains only the body omits the prefix.
        bare = ignored.hf.removeprefix(mapping.prefix)
        stored = {*fnmatch.filter(names, bare), *fnmatch.filter(names, mapping.prefix + bare)}
        for name in sorted(stored):
            yield name
            if ignored.same_as is not None:
                tied = mapping.find(ignored.same_as, names)
                if tied in names and not _equal(tensors.read(name), tensors.read(tied), tensors):
                    mismatches.contradicting.append(f"{name} is tied to {tied}, but differs")
            if ignored.checked and not _close(tensors.read(name), ignored.value()):
                mismatches.contradicting.append(
                    f"{name} differs from what its configuration implies"
                )


def _equal(x: np.ndarray, y: np.ndarray, tensors: TensorSource) -> bool:
    return x.shape == y.shape and all(np.array_equal(x[b], y[b]) for b in blocks(x, tensors))


def _close(x: np.ndarray, y: np.ndarray) -> bool:
    """Returns whether two constants are equal up to the precision of their stored values."""
    tolerance = 1e-5 if x.dtype.itemsize >= 4 else 1e-2
    return x.shape == y.shape and bool(np.allclose(x.astype(np.float32), y, atol=tolerance))


@dataclasses.dataclass
class _Mismatches:
    """All differences between the files, the mapping and the model, as lists of names."""

    missing: list[str] = dataclasses.field(default_factory=list)
    unread: list[str] = dataclasses.field(default_factory=list)
    misshapen: list[str] = dataclasses.field(default_factory=list)
    contradicting: list[str] = dataclasses.field(default_factory=list)
    sizes: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    """The pairs (actual size, expected size) of all axes of tensors with a wrong shape."""

    def raise_any(self, source: str, stored: Mapping[str, object]) -> None:
        """Raises a one-line WeightsError with the first differences of each kind, if any exist."""
        kinds = {
            "it lacks": self.missing,
            "nothing reads": self.unread,
            "wrong shapes:": self.misshapen,
            "contradictions:": self.contradicting,
        }
        parts = [f"{kind} {_first_of(names)}" for kind, names in kinds.items() if names]
        listed = "; ".join([*self._suspects(stored), *parts])
        require(not parts, f"{source} does not fit its configuration: {listed}", WeightsError)

    def _suspects(self, stored: Mapping[str, object]) -> Iterator[str]:
        """Yields a note that names the field of `config.json` that is probably wrong."""
        wrong = collections.Counter(pair for pair in self.sizes if pair[0] != pair[1])
        # The most frequent pair of sizes is probably caused by a wrong field of the configuration.
        candidates = [pair for pair, _ in wrong.most_common()]
        # The files may have fewer or more layers than the configuration states.
        for names in (self.missing, self.unread):
            layers = [*map(int, re.findall(r"(?m)^.*?\.(\d+)\.", "\n".join(names)))]
            if layers:
                first, past = min(layers), max(layers) + 1
                candidates.append((first, past) if names is self.missing else (past, first))
        # A field whose value is the expected size is probably wrong, because the files have a
        # different size.
        for actual, expected in candidates:
            names = [
                name for name, value in stored.items() if type(value) is int and value == expected
            ]
            if names:
                fields = " or ".join(names)
                yield f"{fields} {expected} is probably wrong: the tensors have {actual}"
                return


def _first_of(names: Sequence[str]) -> str:
    """Returns the first three names, and the number of remaining names."""
    more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
