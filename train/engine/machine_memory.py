"""Finds the memory available to a program on the machine, in its container, or on a device."""

import contextlib
import functools
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import jax

from ..distributed.multiprocess import greatest_everywhere

PROC = Path("/proc")
CONTROL_GROUPS = Path("/sys/fs/cgroup")
LIMIT_FILES = {
    "memory.max": (  # version 2 of control groups
        "memory.current",
        ("inactive_file", "active_file", "slab_reclaimable"),
    ),
    "memory.limit_in_bytes": (  # version 1
        "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
}
"""Maps the file with the limit of a control group to the file with its usage, and to the names of
the statistics that count caches. The kernel reclaims caches on demand."""


@runtime_checkable
class Device(Protocol):
    """The part of `jax.Device` used here; type checkers reject `jax.Device` itself as a type."""

    platform: str

    def memory_stats(self) -> dict[str, int] | None:
        """Returns byte counts by name, such as `bytes_in_use`, or None if they are unknown."""
        ...


def available_bytes(devices: Sequence[Device]) -> int | None:
    """Returns how much memory is left for the arrays of this process.

    Args:
        devices: Devices of this process. CPU devices share the memory of the machine.

    Returns:
        For CPU devices, the free bytes of the machine; for accelerators, the free bytes of the
        fullest one; None if unknown.
    """
    if devices[0].platform == "cpu":
        return available_on_machine()
    stats = memory_stats(devices)
    if not all("bytes_limit" in x for x in stats):
        return None
    return min(x["bytes_limit"] - x.get("bytes_in_use", 0) for x in stats)


def memory_stats(devices: Sequence[Device]) -> list[dict[str, int]]:
    """Returns the memory statistics of each device; an empty dict if a device reports none."""
    return [device.memory_stats() or {} for device in devices]


def device_memory(devices: Sequence[Device]) -> int:
    """Returns the smallest memory limit of the devices, in bytes.

    Returns 0 if the limit is unknown. Also returns 0 for CPU devices, because they share the memory
    of the machine.
    """
    if devices[0].platform == "cpu":
        return 0
    return min(x.get("bytes_limit", 0) for x in memory_stats(devices))


@functools.cache
def memory_of_each() -> int | None:
    """Returns the smallest memory limit of any device in any process, in bytes; None if unknown.

    The first call is collective: all processes must make it together.
    """
    limit = device_memory(jax.local_devices())
    # Only a maximum over processes is available. Negating the limit before and after gives the
    # minimum.
    mebibytes = -greatest_everywhere(-(limit >> 20))  # the number of bytes would need 64 bits
    return mebibytes << 20 or None


def available_on_machine() -> int | None:
    """Returns the free bytes of memory and swap space, limited by the container."""
    # On Linux, `MemAvailable` includes caches that can be freed.
    meminfo = PROC / "meminfo"
    if meminfo.is_file():
        kibibytes = dict(re.findall(r"(\w+): +(\d+)", meminfo.read_text(encoding="utf-8")))
        free = (int(kibibytes["MemAvailable"]) + int(kibibytes.get("SwapFree", 0))) << 10
    elif "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):  # macOS reports no free memory
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        return None
    return min([free, *_left_in_control_groups()])


def _left_in_control_groups() -> list[int]:
    """Returns the bytes left in each control group of this process, and in its parent groups."""
    cgroup_file = PROC / "self" / "cgroup"
    if not cgroup_file.is_file():
        return []
    left: list[int] = []
    for line in cgroup_file.read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        # In version 2, the list of controllers is empty.
        if controllers not in ("", "memory"):
            continue
        inner = CONTROL_GROUPS / controllers / path.lstrip("/")
        # In a container, the path may be a path on the host, so only the outermost folder may
        # exist.
        for folder in (inner, *inner.parents):
            if not folder.is_relative_to(CONTROL_GROUPS):
                break
            for limit_file, (usage_file, reclaimable) in LIMIT_FILES.items():
                # Most folders lack these files, and the limit of an unlimited group is the word
                # `max`.
                with contextlib.suppress(OSError, ValueError):
                    limit, usage = _read_int(folder / limit_file), _read_int(folder / usage_file)
                    # Usage includes caches, which the kernel frees under memory pressure.
                    reclaimed = _statistics(folder / "memory.stat", reclaimable)
                    left.append(limit - max(0, usage - reclaimed))
    return left


def _read_int(file: Path) -> int:
    return int(file.read_text(encoding="utf-8"))


def _statistics(file: Path, names: Sequence[str]) -> int:
    """Returns the sum of the named statistics of a control group; a missing statistic adds 0."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError:
        return 0
    rows = dict(re.findall(r"(\w+) (\d+)", text))
    return sum(int(rows.get(name, 0)) for name in names)
