"""What a compiled program exchanges between devices: by kind, with the loops it stands in."""

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from .parser import Computation, HloProgram, Instruction

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

_MESH = re.compile(r"replica_groups=mesh\[(.*?)\](?:,\s*device_ids=(\S+))?\s*\{(.*?)\}")
_USED = re.compile(r"'(\w+)'(?::\((\d+)\)(\d+))?")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_LISTED = re.compile(r"replica_groups=\{\{([\d,]+)\}")
_HOSTS_KIND = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_HOSTS_SLICES = re.compile(r'_xla_megascale_target="\{([\d,:]+)\}')
_PAIR = re.compile(r"source_target_pairs=\{\{(\d+),(\d+)\}")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One instruction that exchanges data within groups of devices."""

    kind: str
    bytes_sent: int
    """By each device in one run, in a ring: of n devices' whole array all but 1 / n, of an
    all-reduce twice."""
    times: int
    """How often it runs in a step."""
    group: tuple[int, ...]
    """The devices of the first group, by their place in the mesh."""


def collectives(program: HloProgram, num_devices: int) -> list[Collective]:
    """All that a program exchanges in one run, each once."""
    found: dict[str, Collective] = {}
    for number, (kind, instruction, operand_bytes, times) in enumerate(_all(program)):
        channel = re.search(r"channel_id=(\d+)", instruction.attributes)
        # A gather that runs beside other work is printed in each part of it; others may have the
        # same channel.
        key = f"{kind} {channel[1]} {operand_bytes}" if channel else f"line {number}"
        group = first_group(instruction.attributes, num_devices)
        if len(group) > 1:
            answered = instruction.bytes
            if instruction.opcode.endswith("-start") and len(instruction.arrays) > 1:
                answered -= operand_bytes if kind != "all-reduce" else 0
            sent = _bytes_sent(kind, operand_bytes, answered, len(group))
            found[key] = Collective(kind, sent, math.ceil(times), group)
    return [*found.values(), *_between_slices(program, num_devices)]


def _all(program: HloProgram) -> Iterator[tuple[str, Instruction, int, float]]:
    for computation, times in program.runs(fused=True):
        for instruction in computation.values():
            kind = instruction.opcode.removesuffix("-start")
            if kind in KINDS:
                if kind == "all-reduce" and _is_scattered(instruction, computation):
                    kind = "reduce-scatter"
                operands = (computation.get(name) for name in instruction.operands)
                yield kind, instruction, sum(x.bytes for x in operands if x is not None), times


def _between_slices(program: HloProgram, num_devices: int) -> Iterator[Collective]:
    """What the TPU's compiler leaves to the hosts of slices: each device sends its own part."""
    for computation, times in program.runs():
        for instruction in computation.values():
            kind = _HOSTS_KIND.search(instruction.attributes)
            slices = _HOSTS_SLICES.search(instruction.attributes)
            if instruction.opcode != "send" or kind is None or slices is None:
                continue
            number, part = _count(slices[1]), instruction.arrays[0].bytes
            name = kind[1].lower().replace("_", "-")
            whole = part * number if name == "all-gather" else part
            sent = _bytes_sent(name, part, whole, number)
            group = tuple(range(0, num_devices, num_devices // number))
            yield Collective(name, sent, math.ceil(times), group)


def _count(listed: str) -> int:
    """How many numbers there are in `1,2` or `1:4`, which is one to four."""
    total = 0
    for item in listed.split(","):
        first, _, last = item.partition(":")
        total += int(last or first) - int(first) + 1
    return total


def _is_scattered(reduction: Instruction, computation: Computation) -> bool:
    """Whether it is fused with a slice of it: so the TPU's compiler writes a reduce-scatter."""
    root = next(x for x in computation.values() if x.is_root)
    return root.opcode == "dynamic-slice" and root.operands[0] == reduction.name


def _bytes_sent(kind: str, taken: int, answered: int, devices: int) -> int:
    if kind == "collective-permute":
        return taken
    whole = {"all-gather": answered, "all-reduce": 2 * taken}.get(kind, taken)
    return whole * (devices - 1) // devices


def first_group(attributes: str, num_devices: int) -> tuple[int, ...]:
    """The devices that exchange with device 0; all of them where the text does not say."""
    if pair := _PAIR.search(attributes):
        return int(pair[1]), int(pair[2])
    if listed := _LISTED.search(attributes):
        return tuple(map(int, listed[1].split(",")))
    if iota := _IOTA.search(attributes):
        shape, sizes, order = (_numbers(x) for x in iota.groups(default=""))
        ids = np.arange(num_devices).reshape(sizes)
        return tuple(ids.transpose(order or None).reshape(shape)[0].tolist())
    if mesh := _MESH.search(attributes):
        axes, order, used = mesh.groups(default="")
        return _group_of_mesh(axes, order, used, num_devices)
    return tuple(range(num_devices))


def _group_of_mesh(axes: str, order: str, used: str, num_devices: int) -> tuple[int, ...]:
    """`mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}`, or of an axis a part, `{'b':(1)2}`."""
    spanned = {name: (before, size) for name, before, size in _USED.findall(used)}
    shape: list[int] = []
    chosen: list[Any] = []
    for name, text in re.findall(r"'(\w+)'=(\d+)", axes):
        length = int(text)
        before, size = spanned.get(name, ("1", "1"))
        before, size = (int(before), int(size)) if before else (1, length)
        shape += [before, size, length // before // size]
        chosen += [0, slice(None), 0]
    ids = np.arange(num_devices)
    if layout := re.fullmatch(r"\(\[([\d,]+)\](?:T\(([\d,]+)\))?\)", order):
        sizes, permutation = (_numbers(x) for x in layout.groups(default=""))
        ids = ids.reshape(sizes).transpose(permutation or None)
    return tuple(ids.reshape(shape)[tuple(chosen)].flatten().tolist())


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n]
