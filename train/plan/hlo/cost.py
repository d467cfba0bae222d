"""Counts FLOPs and memory traffic of a compiled program on one device, including all loop runs."""

import math
import re

import numpy as np

from .kernels import kernel_flops
from .parser import Computation, HloArray, HloProgram, Instruction, integers, operands, root

_NO_TRAFFIC = frozenset(
    """parameter constant get-tuple-element tuple bitcast while conditional call partition-id
    replica-id after-all copy-done slice-done fusion-done all-gather-done all-reduce-done iota
    reduce-scatter-done collective-permute-done async-done async-update opt-barrier""".split()
)
"""Opcodes that do not move data, or whose data are counted when the operation starts."""
_SLICES = ("dynamic-slice", "slice", "gather")
_DIM_LABELS = re.compile(r"dim_labels=(\w+_\w+->\w+)")
_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")


def matmul_flops(program: HloProgram) -> int:
    """Returns the sum of 2 · m · n · k over all matmuls in one run, including known kernels."""
    counts = {"dot": _dot_flops, "convolution": _convolution_flops, "custom-call": kernel_flops}
    total = 0.0
    for instruction, computation, runs in program.instructions(fused=True):
        if count := counts.get(instruction.opcode):
            total += runs * count(instruction, computation)
    return round(total)


def _dot_flops(dot: Instruction, computation: Computation) -> int:
    left = operands(dot, computation)[0].shape
    # `depth` is k of the matmul, and the result has m · n elements.
    depth = math.prod(left[axis] for axis in integers(dot.find(_CONTRACTED)))
    return 2 * depth * math.prod(dot.shape)


def _convolution_flops(convolution: Instruction, computation: Computation) -> int:
    """Returns the FLOPs of a matmul that is printed as a convolution.

    The TPU compiler prints all matmuls as convolutions. The batch and outer axes become spatial
    axes with padding and holes, which are never multiplied.
    """
    lhs, rhs, out = re.split("_|->", convolution.find(_DIM_LABELS))
    left, right = operands(convolution, computation)[:2]
    result = convolution.shape
    # The number of input features.
    depth = right.shape[rhs.index("i")]
    for axis in filter(str.isdigit, out):
        size, window = left.shape[lhs.index(axis)], right.shape[rhs.index(axis)]
        length = result[out.index(axis)]
        pairs = _window_pairs(convolution, int(axis), size, window, length=length)
        # Multiply by the mean number of window elements that contribute to a result.
        depth *= pairs / length
    return round(2 * math.prod(result) * depth)


def _window_pairs(
    convolution: Instruction, axis: int, size: int, window: int, *, length: int
) -> int:
    """Counts the pairs of an output index and a window index that read an element of the input.

    All other pairs read padding, or a hole between elements of a dilated input.

    Args:
        convolution: The instruction.
        axis: The index of the spatial axis.
        size: Length of the input along the axis.
        window: Length of the window.
        length: Length of the output.
    """

    def setting(name: str, default: str) -> str:
        match = re.search(rf"window=\{{[^}}]*\b{name}=([\dx_-]+)", convolution.attributes)
        return match[1].split("x")[axis] if match else default

    stride, window_dilation = int(setting("stride", "1")), int(setting("rhs_dilate", "1"))
    padding, input_dilation = (
        int(setting("pad", "0_0").split("_")[0]),
        int(setting("lhs_dilate", "1")),
    )
    # indices[o, w] is the index in the dilated input that is read for output o and window index w.
    outputs, offsets = np.arange(length)[:, None], np.arange(window)[None]
    indices = outputs * stride + offsets * window_dilation - padding
    is_inside = (indices >= 0) & (indices <= (size - 1) * input_dilation)
    is_element = indices % input_dilation == 0
    return int((is_inside & is_element).sum())


def hbm_bytes(program: HloProgram) -> int:
    """Returns the bytes that one run reads from and writes to a device's main memory.

    Bytes are counted as in XLA: the operands and results of every instruction, unless it is fused
    into a different instruction. If only slices of an array are used, only the bytes of the slices
    are counted.
    """
    total = 0.0
    for instruction, computation, runs in program.instructions():
        if instruction.opcode not in _NO_TRAFFIC:
            total += runs * _instruction_bytes(instruction, computation, program)
    return round(total)


def _instruction_bytes(
    instruction: Instruction, computation: Computation, program: HloProgram
) -> int:
    opcode = instruction.opcode
    # The result has the form ((the whole array), the slice, …).
    if opcode == "slice-start":
        return instruction.arrays[1].bytes
    if opcode in ("fusion", "fusion-start"):
        return _fusion_bytes(instruction, computation, program)
    # This is an asynchronous copy between main memory and on-chip memory.
    if opcode.endswith("-start"):
        return instruction.arrays[0].bytes if instruction.arrays else 0
    read = operands(instruction, computation)
    # The instruction reads the slice from the array, and writes it to the result.
    if opcode in _SLICES:
        return 2 * instruction.hbm_bytes
    # The update is read from its operand, and written into the array in place.
    if opcode == "dynamic-update-slice":
        return 2 * read[1].hbm_bytes
    return instruction.hbm_bytes + sum(x.hbm_bytes for x in read)


def _fusion_bytes(fusion: Instruction, computation: Computation, program: HloProgram) -> int:
    """Returns the bytes that a fusion reads from its operands and writes to its results."""
    fused = program.computations[fusion.called]
    total = 0
    for index, operand in enumerate(operands(fusion, computation)):
        parameter = _parameter(fused, index)
        total += min(operand.hbm_bytes, _bytes_read(parameter, fused, program))
    result = root(fused)
    roots = operands(result, fused) if result.opcode == "tuple" else [result]
    # An instruction such as a reduction of several arrays computes several results.
    values = [value for value in roots for _ in value.arrays]
    arrays = fusion.arrays
    # The result of an asynchronous fusion has the form ((operands), results, a number).
    if fusion.opcode == "fusion-start":
        arrays = arrays[-1 - len(values) : -1]
    results = zip(values, arrays, strict=True)
    return total + sum(_bytes_written(value, array, fused) for value, array in results)


def _parameter(fused: Computation, index: int) -> Instruction:
    """Returns the instruction `parameter(index)` of a fused computation."""
    parameters = (x for x in fused.values() if x.opcode == "parameter")
    return next(x for x in parameters if x.attributes.startswith(f"{index})"))


def _bytes_read(array: Instruction, fused: Computation, program: HloProgram) -> int:
    """Returns the bytes of an array that a fusion reads, which may be only slices of it."""
    users = [x for x in fused.values() if array.name in x.operands]
    if not users:
        return array.bytes
    total = 0
    for user in users:
        if user.opcode in _SLICES:
            total += user.bytes
        elif _is_relayout(user):
            total += _bytes_read(user, fused, program)
        elif user.opcode == "fusion":
            # Count the bytes inside the nested fusion that reads the array.
            inner = program.computations[user.called]
            parameter = _parameter(inner, user.operands.index(array.name))
            total += _bytes_read(parameter, inner, program)
        elif user.opcode != "dynamic-update-slice" or user.operands[0] != array.name:
            # All other users read the whole array. An array that is updated in place is not read.
            total += array.bytes
    return total


def _bytes_written(value: Instruction, array: HloArray, fused: Computation) -> int:
    """Returns the bytes that a fusion writes for one result, which may be updated in place."""
    if array.on_chip:
        return 0
    while _is_relayout(value):
        value = fused[value.operands[0]]
    is_update = value.opcode == "dynamic-update-slice"
    return fused[value.operands[1]].bytes if is_update else array.bytes


def _is_relayout(instruction: Instruction) -> bool:
    """Returns whether an instruction only changes the shape or tiling of its operand."""
    aliases_operand = "output_to_operand_aliasing={{}: (0, {})}" in instruction.attributes
    return instruction.opcode in ("bitcast", "copy") or (
        instruction.opcode == "fusion" and aliases_operand
    )
