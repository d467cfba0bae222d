"""What a compiled program computes and moves on one device, with the loops it stands in."""

import math
import re

import numpy as np

from .kernels import kernel_flops
from .parser import Computation, HloProgram, Instruction

_FREE = frozenset(
    """parameter constant get-tuple-element tuple bitcast while conditional call partition-id
    replica-id after-all copy-done slice-done all-gather-done all-reduce-done iota
    collective-permute-done async-done async-update opt-barrier""".split()
)
"""What moves nothing, or what was counted where it began."""
_SLICES = ("dynamic-slice", "slice", "gather")


def matrix_flops(program: HloProgram) -> int:
    """2 · m · n · k of every matrix product in one run on one device, those of kernels included."""
    total = 0.0
    for computation, times in program.runs(fused=True):
        for instruction in computation.values():
            if instruction.opcode in ("dot", "convolution"):
                total += times * _product_flops(instruction, computation)
            elif instruction.opcode == "custom-call":
                total += times * kernel_flops(instruction, computation)
    return round(total)


def _product_flops(instruction: Instruction, computation: Computation) -> int:
    left = computation[instruction.operands[0]].arrays[0].shape
    result = math.prod(instruction.arrays[0].shape)
    if instruction.opcode == "dot":
        return 2 * result * math.prod(left[i] for i in _dims("lhs_contracting", instruction))
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    assert labels is not None, instruction.name
    lhs, rhs, out = labels.groups()
    right = computation[instruction.operands[1]].arrays[0].shape
    taken = right[rhs.index("i")]
    for dimension in (c for c in out if c.isdigit()):
        sizes = left[lhs.index(dimension)], right[rhs.index(dimension)]
        length = instruction.arrays[0].shape[out.index(dimension)]
        taken *= _pairs(instruction, int(dimension), *sizes, length) / length
    return round(2 * result * taken)


def _dims(name: str, instruction: Instruction) -> list[int]:
    found = re.search(rf"{name}_dims=\{{([\d,]*)\}}", instruction.attributes)
    return [int(n) for n in found[1].split(",") if n] if found else []


def _pairs(instruction: Instruction, dimension: int, size: int, window: int, length: int) -> int:
    """Pairs of an output's and the window's places that meet an element, not padding or a hole.

    A TPU's products are convolutions, whose batch and outer axes are windows over such holes.
    """

    def setting(name: str, default: str) -> str:
        found = re.search(rf"window=\{{[^}}]*\b{name}=([\dx_-]+)", instruction.attributes)
        return found[1].split("x")[dimension] if found else default

    stride, dilation = int(setting("stride", "1")), int(setting("lhs_dilate", "1"))
    apart = int(setting("rhs_dilate", "1"))
    before = int(setting("pad", "0_0").split("_")[0])
    places = np.arange(length)[:, None] * stride + np.arange(window)[None] * apart - before
    inside = (places >= 0) & (places <= (size - 1) * dilation) & (places % dilation == 0)
    return int(inside.sum())


def memory_traffic(program: HloProgram) -> int:
    """Bytes that one run reads from and writes to a device's main memory.

    As XLA counts them: what each instruction that is not fused into another takes and answers; of
    an array that it only takes slices of, the slices.
    """
    total = 0.0
    for computation, times in program.runs():
        for instruction in computation.values():
            if instruction.opcode not in _FREE:
                total += times * _traffic(instruction, computation, program)
    return round(total)


def _traffic(instruction: Instruction, computation: Computation, program: HloProgram) -> int:
    opcode = instruction.opcode
    if opcode == "slice-start":  # of ((what it is taken of), the slice, …)
        return instruction.arrays[1].bytes
    if opcode.endswith("-start"):  # a copy that runs beside other work, from or to main memory
        return instruction.arrays[0].bytes if instruction.arrays else 0
    if opcode == "fusion" and instruction.called:
        return _fusion_traffic(instruction, computation, program)
    written = _far(instruction)
    operands = [computation[name] for name in instruction.operands if name in computation]
    if opcode in _SLICES:
        return 2 * written
    if opcode == "dynamic-update-slice":
        return 2 * _far(operands[1])
    return written + sum(map(_far, operands))


def _fusion_traffic(instruction: Instruction, computation: Computation, program: HloProgram) -> int:
    fused = program.computations[instruction.called or ""]
    total = 0
    for number, name in enumerate(instruction.operands):
        given = computation.get(name)
        if given is not None and _far(given):
            total += min(_far(given), _read(_parameter(fused, number), fused, program))
    return total + _fusion_writes(instruction, fused)


def _parameter(fused: Computation, number: int) -> Instruction:
    return next(
        x
        for x in fused.values()
        if x.opcode == "parameter" and int(x.attributes.split(")")[0]) == number
    )


def _read(array: Instruction, fused: Computation, program: HloProgram) -> int:
    """Bytes that a fusion reads of an array: of one that it only takes slices of, the slices."""
    users = [x for x in fused.values() if array.name in x.operands]
    if not users:
        return array.bytes
    total = 0
    for user in users:
        if user.opcode in _SLICES:
            total += user.bytes
        elif _is_in_place(user):
            total += _read(user, fused, program)
        elif user.opcode == "fusion":  # within a fusion
            inner = program.computations[user.called or ""]
            given = _parameter(inner, user.operands.index(array.name))
            total += _read(given, inner, program)
        elif user.opcode != "dynamic-update-slice" or user.operands[0] != array.name:
            total += array.bytes  # what is updated in place is not read
    return total


def _fusion_writes(instruction: Instruction, fused: Computation) -> int:
    root = next(x for x in fused.values() if x.is_root)
    answers = [fused[name] for name in root.operands] if root.opcode == "tuple" else [root]
    if len(answers) != len(instruction.arrays):
        return _far(instruction)
    total = 0
    for answer, array in zip(answers, instruction.arrays, strict=True):
        if array.near:
            continue
        while _is_in_place(answer) and answer.operands[0] in fused:
            answer = fused[answer.operands[0]]
        updated = answer.opcode == "dynamic-update-slice"
        total += fused[answer.operands[1]].bytes if updated else array.bytes
    return total


def _is_in_place(instruction: Instruction) -> bool:
    """Whether it only calls the array by another shape or tiling."""
    same = "output_to_operand_aliasing={{}: (0, {})}" in instruction.attributes
    return (instruction.opcode == "fusion" and same) or instruction.opcode in ("bitcast", "copy")


def _far(instruction: Instruction) -> int:
    """Bytes of what lies in main memory."""
    return sum(x.bytes for x in instruction.arrays if not x.near)
