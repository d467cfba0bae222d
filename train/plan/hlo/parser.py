"""A compiled program as XLA prints it: instructions, and how often each of them runs.

The text of a compiled module (`compiled.as_text()`) is the program of one device.
A `while` runs its body as often as its condition says, which is what a scan over
layers becomes; XLA's own cost analysis counts such a body once.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

from ....data.errors import UserError

BYTES = {
    **{"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "s32": 4, "u32": 4, "s64": 8, "u64": 8},
    **{"bf16": 2, "f16": 2, "f32": 4, "f64": 8, "c64": 8, "c128": 16},
}
"""Of an element; what is not here (tokens, handles) takes no memory to speak of."""

_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](\{[^{}]*\})?")
_LINE = re.compile(r"\s+(ROOT )?%?([\w.-]+) = (.*)")
_HEADER = re.compile(r"(ENTRY )?%?([\w.-]+) \(.*\{$")
_CALLED = re.compile(r"\b(?:calls|to_apply)=%?([\w.-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_KERNEL_NOTES = re.compile(r"kernel_metadata=\{\n.*\n\}")
"""What a kernel notes of itself, on lines of its own."""
_TRIP_COUNT = re.compile(r'known_trip_count[^\d]*"?n"?[^\d]*(\d+)')


@dataclasses.dataclass(frozen=True)
class HloArray:
    """An array of a program."""

    dtype: str
    shape: tuple[int, ...]
    near: bool
    """Whether it lies beside the compute units, and not in the device's main memory."""

    @property
    def bytes(self) -> int:
        """Its size, without padding."""
        return BYTES.get(self.dtype, 0) * math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a program."""

    name: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    """All that stands behind the operands; of a constant or parameter also what is in brackets."""
    result: str
    """Its type, as it is printed."""
    is_root: bool

    @functools.cached_property
    def arrays(self) -> tuple[HloArray, ...]:
        """What it answers; of a tuple all that is in it."""
        return tuple(
            HloArray(dtype, tuple(int(n) for n in dims.split(",") if n), "S(1)" in layout)
            for dtype, dims, layout in _ARRAY.findall(self.result)
        )

    @property
    def bytes(self) -> int:
        """Size of all that it answers."""
        return sum(x.bytes for x in self.arrays)

    @property
    def called(self) -> str | None:
        """The computation that a fusion, call or reduction runs."""
        found = _CALLED.search(self.attributes)
        return found[1] if found else None

    def attribute(self, name: str) -> str:
        """One of the attributes, such as the name of a loop's `body`."""
        found = re.search(rf"\b{name}=%?([\w.-]+)", self.attributes)
        assert found is not None, (name, self.name)
        return found[1]


Computation = dict[str, Instruction]
"""Instructions by name, in the order in which they run."""


@dataclasses.dataclass(frozen=True)
class HloProgram:
    """A program for one device."""

    computations: dict[str, Computation]
    entry: str

    def runs(self, *, fused: bool = False) -> Iterator[tuple[Computation, float]]:
        """Every computation that runs, and how often; branches as if they took turns.

        Args:
          fused: whether to go into what is fused to one instruction as well.
        """
        yield from self._runs(self.entry, 1.0, fused)

    def _runs(self, name: str, times: float, fused: bool) -> Iterator[tuple[Computation, float]]:
        computation = self.computations[name]
        yield computation, times
        for instruction in computation.values():
            for called, number in self._called(instruction, fused):
                yield from self._runs(called, times * number, fused)

    def _called(self, instruction: Instruction, fused: bool) -> list[tuple[str, float]]:
        opcode = instruction.opcode
        if opcode == "while":
            return [(instruction.attribute("body"), float(self.trip_count(instruction)))]
        if opcode == "conditional":
            names = _branches(instruction)
            return [(name, 1 / len(names)) for name in names]
        into = opcode in ("call", "async-start") or (fused and opcode == "fusion")
        return [(instruction.called, 1.0)] if into and instruction.called else []

    def trip_count(self, loop: Instruction) -> int:
        """How often a `while` runs: as it is noted beside it, or the limit that it counts to."""
        noted = _TRIP_COUNT.search(loop.attributes)
        if noted:
            return int(noted[1])
        condition = self.computations[loop.attribute("condition")]
        limits = [_value(x) for x in condition.values() if _is_integer(x)]
        return -(-max(limits, default=1) // self._step(loop, condition))

    def _step(self, loop: Instruction, condition: Computation) -> int:
        """How far the body counts in one run: two where the compiler unrolled it once."""
        body = self.computations[loop.attribute("body")]
        read = next((x for x in condition.values() if x.opcode == "get-tuple-element"), None)
        root = next(x for x in body.values() if x.is_root)
        if read is None or root.opcode != "tuple":
            return 1
        counter = body[root.operands[int(read.attribute("index"))]]
        added = [_value(body[name]) for name in counter.operands if _is_integer(body[name])]
        return max(sum(added), 1) if counter.opcode == "add" else 1


def _branches(conditional: Instruction) -> list[str]:
    """The computations that it chooses from: numbered ones, or two."""
    found = _BRANCHES.search(conditional.attributes)
    if found:
        return [name.strip(" %") for name in found[1].split(",")]
    return [conditional.attribute(f"{which}_computation") for which in ("true", "false")]


def _is_integer(instruction: Instruction) -> bool:
    """Whether it is a constant whole number."""
    scalar = re.match(r"[su]\d+\[\]", instruction.result)
    return instruction.opcode == "constant" and scalar is not None


def _value(constant: Instruction) -> int:
    return int(constant.attributes.split(")")[0])


def parse_hlo(text: str) -> HloProgram:
    """Reads a module's text."""
    computations: dict[str, Computation] = {}
    entry, current = "", {}
    for line in _KERNEL_NOTES.sub("kernel_metadata={}", text).splitlines():
        if header := _HEADER.match(line):
            current = computations[header[2]] = {}
            if header[1]:
                entry = header[2]
        elif found := _LINE.match(line):
            instruction = _parse_line(found[2], found[3], is_root=found[1] is not None)
            current[instruction.name] = instruction
    return HloProgram(computations, entry)


def _parse_line(name: str, rest: str, is_root: bool) -> Instruction:
    """`f32[2]{0} add(%a, %b), metadata={…}`."""
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    result, rest = rest[:end], rest[end:].lstrip()
    opening = rest.index("(")
    closing = _closing(rest, opening)
    operands = tuple(re.findall(r"%([\w.-]+)", rest[opening:closing]))
    attributes = rest[closing + 1 :] if operands else rest[opening + 1 :]
    return Instruction(name, rest[:opening], operands, attributes, result, is_root)


def _closing(text: str, opening: int) -> int:
    """Where the bracket that opens there is closed."""
    depth = 0
    for place in range(opening, len(text)):
        depth += {"(": 1, ")": -1}.get(text[place], 0)
        if depth == 0:
            return place
    raise UserError(f"a bracket is not closed in {text[:80]!r}")
