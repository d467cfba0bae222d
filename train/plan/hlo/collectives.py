"""Finds the collectives of a compiled program: their bytes, counts and device groups."""

import dataclasses
import math
import re
from collections.abc import Iterator

import numpy as np

from ...engine.grad_cache import OUTPUTS
from .parser import Computation, HloProgram, Instruction, integers, operands, root

OF_OUTPUTS = " of output vectors"
"""The suffix that marks the kind of a collective that gathers output vectors. A loss that compares
the examples of a batch needs the output vectors of all devices."""
KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

_CHANNEL = re.compile(r"channel_id=(\d+)")
_SOURCE = re.compile(r'op_name="([^"]*)"')
_MESH = re.compile(r"replica_groups=mesh\[(.*?)\](?:,\s*device_ids=(\S+))?\s*\{(.*?)\}")
_MESH_AXIS = re.compile(r"'(\w+)'=(\d+)")
_USED_AXIS = re.compile(r"'(\w+)'(?::\((\d+)\)(\d+))?")
_DEVICE_ORDER = re.compile(r"\(\[([\d,]+)\](?:T\(([\d,]+)\))?\)")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_LISTED = re.compile(r"replica_groups=\{\{([\d,]+)\}")
_PERMUTED = re.compile(r"source_target_pairs=\{\{([\d,{}]+?)\}\}")
_MEGASCALE_KIND = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_MEGASCALE_SLICES = re.compile(r'_xla_megascale_target="\{([\d,:]+)\}')


@dataclasses.dataclass(frozen=True)
class CollectiveOp:
    """An instruction that exchanges data between the devices of a group."""

    kind: str
    bytes_sent: int
    """The number of bytes that each device in a ring of n devices sends per run: (n - 1) / n of the
    whole array, and twice this number for an all-reduce."""
    count: int
    """How many times the instruction runs in a step."""
    group: tuple[int, ...]
    """The devices of the first group, as indices into the mesh."""


def collective_ops(program: HloProgram, num_devices: int) -> list[CollectiveOp]:
    """Returns the collectives in one run of a program, except those within a single device."""
    collectives: dict[str, CollectiveOp] = {}
    unfused = {id(instruction) for instruction, _, _ in program.instructions()}
    for index, (kind, instruction, operand_bytes, runs) in enumerate(_instructions(program)):
        group = first_group(instruction.attributes, num_devices)
        if len(group) == 1:
            continue
        # A gather that overlaps with other work is printed in several parts, which are fused with
        # this work. All parts have the same channel. Different collectives can also share a channel
        # (all collectives of a `shard_map` use channel 1), but they differ in kind, size or source
        # line.
        channel, source = instruction.find(_CHANNEL), instruction.find(_SOURCE)
        is_fused = channel and id(instruction) not in unfused
        key = f"{kind} {channel} {operand_bytes} {source}" if is_fused else f"line {index}"
        bytes_sent = _ring_bytes(kind, operand_bytes, len(group))
        # The compiler may combine an all-reduce of output vectors with all-reduces of gradients.
        is_joined = kind == "all-reduce" and len(instruction.arrays) > 1
        if OUTPUTS in source and not is_joined:
            kind += OF_OUTPUTS
        collectives[key] = CollectiveOp(kind, bytes_sent, math.ceil(runs), group)
    return [*collectives.values(), *_between_slices(program, num_devices)]


def _instructions(program: HloProgram) -> Iterator[tuple[str, Instruction, int, float]]:
    """Yields each collective's kind, instruction, bytes of operands, and number of runs."""
    for instruction, computation, runs in program.instructions(fused=True):
        kind = instruction.opcode.removesuffix("-start")
        if kind not in KINDS:
            continue
        if kind == "all-reduce" and _is_reduce_scatter(instruction, computation):
            kind = "reduce-scatter"
        operand_bytes = sum(x.bytes for x in operands(instruction, computation))
        yield kind, instruction, operand_bytes, runs


def _is_reduce_scatter(all_reduce: Instruction, computation: Computation) -> bool:
    """Returns whether only a slice of the sum is used. TPUs print a reduce-scatter in this form."""
    result = root(computation)
    return result.opcode == "dynamic-slice" and result.operands[0] == all_reduce.name


def _ring_bytes(kind: str, operand_bytes: int, num_devices: int) -> int:
    """Returns the number of bytes that each device in a ring of n devices sends.

    A reduce-scatter or an all-to-all sends (n - 1) / n of its operand. An all-reduce is a
    reduce-scatter followed by an all-gather. The result of an all-gather has the size of n
    operands.
    """
    others = num_devices - 1
    parts = {
        "all-gather": num_devices * others,
        "all-reduce": 2 * others,
        "collective-permute": num_devices,
    }.get(kind, others)
    return operand_bytes * parts // num_devices


def _between_slices(program: HloProgram, num_devices: int) -> Iterator[CollectiveOp]:
    """Yields the collectives between slices, which the TPU compiler delegates to the hosts.

    Such collectives are printed as `send` instructions. Each device sends its part of the array
    with such an instruction.
    """
    for instruction, _, runs in program.instructions():
        slices = instruction.find(_MEGASCALE_SLICES)
        if instruction.opcode != "send" or not slices:
            continue
        num_slices = 0
        # The text `1,2` means two slices, and `1:4` means four.
        for item in slices.split(","):
            first, _, last = item.partition(":")
            num_slices += int(last or first) - int(first) + 1
        name = instruction.find(_MEGASCALE_KIND).lower().replace("_", "-")
        bytes_sent = _ring_bytes(name, instruction.arrays[0].bytes, num_slices)
        # The group contains one device of each slice.
        group = tuple(range(0, num_devices, num_devices // num_slices))
        yield CollectiveOp(name, bytes_sent, math.ceil(runs), group)


def first_group(attributes: str, num_devices: int) -> tuple[int, ...]:
    """Returns the first device group of a collective, or all devices if no group is listed.

    Args:
        attributes: The collective's attributes. Groups are printed in one of four forms:
          `source_target_pairs={{0,1},…}`, `replica_groups={{0,2},{1,3}}`,
          `replica_groups=[4,2]<=[2,4]T(1,0)` (device numbers reshaped, transposed, reshaped), or
          `replica_groups=mesh['a'=2,'b'=4] {'b'}` (the axes of a mesh that a group spans).
        num_devices: The number of devices that the program runs on.
    """
    if permuted := _PERMUTED.search(attributes):
        pairs = [tuple(integers(pair)) for pair in permuted[1].split("},{")]
        # A device that keeps its array does not send it, so look for a pair of different devices.
        return next((pair for pair in pairs if pair[0] != pair[1]), pairs[0][:1])
    if listed := _LISTED.search(attributes):
        return tuple(integers(listed[1]))
    if iota := _IOTA.search(attributes):
        shape, sizes, order = map(integers, iota.groups(default=""))
        ids = np.arange(num_devices).reshape(sizes).transpose(order or None)
        return tuple(ids.reshape(shape)[0].tolist())
    if mesh := _MESH.search(attributes):
        axes, order, used = mesh.groups(default="")
        return _mesh_group(axes, order, used, num_devices)
    return tuple(range(num_devices))


def _mesh_group(axes: str, order: str, used: str, num_devices: int) -> tuple[int, ...]:
    """Returns the first group of `mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}`.

    A group may span a part of an axis: `{'b':(2)4}` is a part of axis b that has size 4, and all
    preceding parts together have size 2.
    """
    spanned = {name: (before, size) for name, before, size in _USED_AXIS.findall(used)}
    # Split every axis into three axes: before the spanned part, the part itself, and after it. A
    # group has all indices of the part; the first group has index 0 on the two other axes.
    shape: list[int] = []
    index: list[int | slice] = []
    for name, digits in _MESH_AXIS.findall(axes):
        length = int(digits)
        before, size = spanned.get(name, ("1", "1"))
        # If no numbers follow the axis, the group spans the whole axis.
        before, size = (int(before), int(size)) if before else (1, length)
        shape += [before, size, length // before // size]
        index += [0, slice(None), 0]
    ids = np.arange(num_devices)
    if layout := _DEVICE_ORDER.fullmatch(order):
        sizes, permutation = map(integers, layout.groups(default=""))
        ids = ids.reshape(sizes).transpose(permutation or None)
    return tuple(ids.reshape(shape)[tuple(index)].flatten().tolist())
