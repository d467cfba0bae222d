"""Parses the text of a compiled program into instructions, and counts how often each one runs.

The text of a compiled module (`compiled.as_text()`) is the program of one device. A scan over
layers becomes a `while`, and its condition determines the number of runs. XLA's cost analysis
counts the body of a `while` only once.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

from ....data.common.errors import UserError

BYTES = {
    **{"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "s32": 4, "u32": 4, "s64": 8, "u64": 8},
    **{"bf16": 2, "f16": 2, "f32": 4, "f64": 8, "c64": 8, "c128": 16},
}
"""Maps each type to the bytes of an element. Unlisted types (tokens and handles) have 0 bytes."""

_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](\{[^{}]*\})?")
_LINE = re.compile(r"\s+(ROOT )?%?([\w.-]+) = (.*?) ([\w-]+)\((.*)")
"""Matches an instruction, such as `  ROOT %c = f32[2]{0} add(%a, %b), metadata={…}`."""
_HEADER = re.compile(r"(ENTRY )?%?([\w.-]+) \(.*\{$")
_CALLED = re.compile(r"\b(?:calls|to_apply)=%?([\w.-]+)")
_BRANCHES = re.compile(
    r"(branch_computations=\{[^}]*|true_computation=\S+ false_computation=%[\w.-]+)"
)
"""Matches the branches of a conditional. A conditional on an index lists its branches, and a
conditional on a predicate names two branches."""
_NAME = re.compile(r"%([\w.-]+)")
_INTEGER = re.compile(r"[su]\d+\[\]")
_KERNEL_METADATA = re.compile(r"kernel_metadata=\{\n.*\n\}")
"""Matches an attribute of custom kernels that is printed over several lines."""
_TRITON_PROGRAM = re.compile(r'\bir = "(?:[^"\\]|\\.)*"')
"""Matches the program of a Triton kernel, which may contain arbitrary bytes."""
_TRIP_COUNT = re.compile(r'known_trip_count[^\d]*"?n"?[^\d]*(\d+)')


@dataclasses.dataclass(frozen=True)
class HloArray:
    """The type of an array in a program."""

    dtype: str
    shape: tuple[int, ...]
    on_chip: bool
    """Whether the array is in on-chip memory (a TPU's VMEM), not in the device's main memory."""

    @property
    def bytes(self) -> int:
        """The size in bytes, without the padding to whole tiles."""
        return BYTES.get(self.dtype, 0) * math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a program."""

    name: str
    opcode: str
    operands: tuple[str, ...]
    """Names of the instructions whose results are the operands."""
    attributes: str
    """The text after the operands. For constants and parameters, it includes the text in
    parentheses."""
    result: str
    """The result's type, as printed."""
    is_root: bool
    """Whether the instruction produces the result of its computation."""

    @functools.cached_property
    def arrays(self) -> tuple[HloArray, ...]:
        """The types of the result: a single type, or the types of all elements of a tuple."""
        return tuple(
            HloArray(dtype, tuple(integers(dims)), "S(1)" in layout)
            for dtype, dims, layout in _ARRAY.findall(self.result)
        )

    @property
    def bytes(self) -> int:
        """Size of the whole result in bytes."""
        return sum(array.bytes for array in self.arrays)

    @property
    def hbm_bytes(self) -> int:
        """Size in bytes of the part of the result that is in main memory."""
        return sum(array.bytes for array in self.arrays if not array.on_chip)

    @property
    def called(self) -> str:
        """Name of the computation that a fusion, call or reduction runs; otherwise empty."""
        return self.find(_CALLED)

    def find(self, pattern: re.Pattern[str], default: str = "") -> str:
        """Returns the first group of a pattern in the attributes, or the default."""
        match = pattern.search(self.attributes)
        return match[1] if match else default

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the result, or of its first array if the result is a tuple."""
        return self.arrays[0].shape

    @property
    def integer(self) -> int:
        """Value of a constant integer, or 0 for other instructions."""
        if self.opcode != "constant" or not _INTEGER.match(self.result):
            return 0
        return int(self.attributes.split(")")[0])

    def attribute(self, name: str) -> str:
        """Returns an attribute that is a name or number, such as the `body` of a loop."""
        return self.find(re.compile(rf"\b{name}=%?([\w.-]+)"))


Computation = dict[str, Instruction]
"""Maps names to instructions, in the order of execution."""


def integers(text: str) -> list[int]:
    """Returns the integers in a printed list without brackets, such as `2,3` or an empty text."""
    return [int(n) for n in text.split(",") if n]


def operands(instruction: Instruction, computation: Computation) -> list[Instruction]:
    """Returns the instructions whose results are the operands of an instruction."""
    return [computation[name] for name in instruction.operands]


def root(computation: Computation) -> Instruction:
    """Returns the instruction that produces the result of the computation."""
    return next(x for x in computation.values() if x.is_root)


@dataclasses.dataclass(frozen=True)
class HloProgram:
    """A program for one device."""

    computations: dict[str, Computation]
    entry: str
    """Name of the first computation."""

    def runs(self, *, fused: bool = False) -> Iterator[tuple[Computation, float]]:
        """Yields every computation that runs, with its number of runs.

        Each of the n branches of a conditional counts as 1 / n runs, as if the branches took turns.

        Args:
            fused: Whether to include the computations of fusions.
        """
        yield from self._runs(self.entry, 1.0, fused)

    def instructions(
        self, *, fused: bool = False
    ) -> Iterator[tuple[Instruction, Computation, float]]:
        """Yields each instruction that runs, with its computation and its number of runs."""
        for computation, count in self.runs(fused=fused):
            for instruction in computation.values():
                yield instruction, computation, count

    def _runs(self, name: str, count: float, fused: bool) -> Iterator[tuple[Computation, float]]:
        computation = self.computations[name]
        yield computation, count
        for instruction in computation.values():
            for called, times in self._called(instruction, fused):
                yield from self._runs(called, count * times, fused)

    def _called(self, instruction: Instruction, fused: bool) -> list[tuple[str, float]]:
        """Returns the computations that an instruction runs, with the number of runs of each."""
        opcode = instruction.opcode
        if opcode == "while":
            return [(instruction.attribute("body"), float(self.trip_count(instruction)))]
        if opcode == "conditional":
            names = _NAME.findall(instruction.find(_BRANCHES))
            return [(name, 1 / len(names)) for name in names]
        if opcode in ("call", "async-start") or (fused and opcode == "fusion"):
            return [(instruction.called, 1.0)]
        return []

    def trip_count(self, loop: Instruction) -> int:
        """Returns how often a `while` runs its body.

        The number comes from the compiler's annotation, if there is one. Otherwise, it is the limit
        of the loop divided by the step of the counter. The limit is the largest integer in the
        condition.
        """
        if annotated := _TRIP_COUNT.search(loop.attributes):
            return int(annotated[1])
        condition = self.computations[loop.attribute("condition")]
        # If the condition has no positive constant, the limit is unknown; count one run.
        limit = max(x.integer for x in condition.values()) or 1
        # Divide and round up.
        return -(-limit // self._loop_step(loop, condition))

    def _loop_step(self, loop: Instruction, condition: Computation) -> int:
        """Returns the increment of a loop's counter per run, such as 2 for a loop unrolled once."""
        body = self.computations[loop.attribute("body")]
        # The condition reads the counter from the loop's state by its index.
        read = next((x for x in condition.values() if x.opcode == "get-tuple-element"), None)
        state = root(body)
        if read is None or state.opcode != "tuple":
            return 1
        counter = body[state.operands[int(read.attribute("index"))]]
        step = sum(x.integer for x in operands(counter, body))
        return max(step, 1) if counter.opcode == "add" else 1


def parse_hlo(text: str) -> HloProgram:
    """Parses the text of a compiled module."""
    computations: dict[str, Computation] = {}
    entry, current = "", {}
    # Remove text that contains line feeds or looks like instructions.
    text = _KERNEL_METADATA.sub("kernel_metadata={}", text)
    for line in _TRITON_PROGRAM.sub('ir = ""', text).split("\n"):
        if header := _HEADER.match(line):
            current = computations[header[2]] = {}
            if header[1]:
                entry = header[2]
        elif match := _LINE.match(line):
            instruction = _instruction(*match.groups(default=""))
            current[instruction.name] = instruction
    return HloProgram(computations, entry)


def _instruction(is_root: str, name: str, result: str, opcode: str, rest: str) -> Instruction:
    """Returns an instruction from the groups of `_LINE`."""
    end = _end_of_operands(rest)
    names = tuple(_NAME.findall(rest[:end]))
    return Instruction(
        name=name,
        opcode=opcode,
        operands=names,
        attributes=rest[end + 1 :] if names else rest,
        result=result,
        is_root=bool(is_root),
    )


def _end_of_operands(text: str) -> int:
    """Returns the index of the parenthesis that closes the list of operands."""
    depth = 1
    for index, character in enumerate(text):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if depth == 0:
            return index
    raise UserError(f"a parenthesis is not closed in {text[:80]!r}")
