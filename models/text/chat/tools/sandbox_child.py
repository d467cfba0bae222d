"""A script that runs a program in isolation. `python_program` starts this script on Linux.

The script performs these steps in order:

1. It enters new namespaces, with their own users, mounts, processes and network.
2. It creates a file system with a read-only Python and an empty folder in memory.
3. It limits time, memory, files and processes.
4. It gives up all capabilities.
5. It installs a filter that rejects system calls for new processes, sockets, mounts and namespaces.

If a step fails, the program does not run.
"""

import contextlib
import ctypes
import json
import os
import platform
import re
import resource
import select
import signal
import struct
import sys
import traceback
from collections.abc import Callable
from typing import TextIO

CONFINED = b"confined\n"
"""The line printed before the program's output. If it is missing, the program was not confined."""

_ROOT = "/proc"
"""The folder where the program's root file system is mounted."""
_NEW_USER, _NEW_FILES, _NEW_PIDS = 0x10000000, 0x00020000, 0x20000000
_NEW_NET, _NEW_IPC, _NEW_UTS = 0x40000000, 0x08000000, 0x04000000
_READ_ONLY, _NO_SUID, _NO_DEV, _REMOUNT, _BIND, _RECURSIVE, _PRIVATE = (
    *(1, 2, 4, 32, 4096, 16384),
    1 << 18,
)
_DETACH = 2
_SET_DEATH_SIGNAL, _SET_SECCOMP, _SET_NO_NEW_PRIVILEGES = 1, 22, 38

# The refused system calls for each machine: (the machine's code, {name of the call: its number}).
_CALLS = {
    "x86_64": (
        0xC000003E,
        {
            "socket": 41, "clone": 56, "fork": 57, "vfork": 58, "execve": 59, "ptrace": 101,
            "pivot_root": 155, "chroot": 161, "mount": 165, "umount2": 166, "capset": 126,
            "keyctl": 250, "unshare": 272, "perf_event_open": 298, "open_by_handle_at": 304,
            "setns": 308, "process_vm_readv": 310, "bpf": 321, "execveat": 322,
            "userfaultfd": 323, "io_uring_setup": 425, "open_tree": 428, "move_mount": 429,
            "fsopen": 430, "clone3": 435, "mount_setattr": 442,
            # calls that allocate memory outside all limits
            "shmget": 29, "semget": 64, "msgget": 68, "mq_open": 240, "add_key": 248,
            "request_key": 249, "memfd_create": 319,
            # calls that leave the process group, which is killed at the end of the time limit
            "setpgid": 109, "setsid": 112, "prctl": 157,
        },
    ),
    "aarch64": (
        0xC00000B7,
        {
            "umount2": 39, "mount": 40, "pivot_root": 41, "chroot": 51, "capset": 91,
            "unshare": 97, "ptrace": 117, "socket": 198, "keyctl": 219, "clone": 220,
            "execve": 221, "perf_event_open": 241, "open_by_handle_at": 265, "setns": 268,
            "process_vm_readv": 270, "bpf": 280, "execveat": 281, "userfaultfd": 282,
            "io_uring_setup": 425, "open_tree": 428, "move_mount": 429, "fsopen": 430,
            "clone3": 435, "mount_setattr": 442,
            "shmget": 194, "semget": 190, "msgget": 186, "mq_open": 180, "add_key": 217,
            "request_key": 218, "memfd_create": 279,
            "setpgid": 154, "setsid": 157, "prctl": 167,
        },
    ),
}  # fmt: skip
_X32 = 0x40000000  # calls of another ABI of x86_64 begin here

_libc = ctypes.CDLL(None, use_errno=True)


def _call(function: str, *arguments: object) -> None:
    """Calls a function of libc; raises OSError if it fails."""
    if getattr(_libc, function)(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{function}: {os.strerror(code)}")


def _mount(
    source: str, target: str, *, kind: str | None = None, flags: int, options: str = ""
) -> None:
    encoded = [None if x is None else x.encode() for x in (source, target, kind)]
    _call("mount", *encoded, ctypes.c_ulong(flags), options.encode())


def enter_namespaces() -> None:
    """Enters new user, mount, PID, network, IPC and UTS namespaces."""
    user, group = os.getuid(), os.getgid()
    _call("unshare", _NEW_USER | _NEW_FILES | _NEW_PIDS | _NEW_NET | _NEW_IPC | _NEW_UTS)
    # The kernel accepts a group map only from a process that has disabled setgroups.
    with contextlib.suppress(OSError), open("/proc/self/setgroups", "w") as file:
        file.write("deny")
    # The process becomes root only inside the new namespace, where it may mount folders.
    for name, id in (("uid_map", user), ("gid_map", group)):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(f"0 {id} 1")


def enter_empty_root(visible: list[str], bytes_of_files: int) -> None:
    """Replaces the root by a file system in memory, with some read-only folders of the machine.

    The file system is mounted over /proc inside the process's namespace, so that a killed process
    leaves no folder behind.

    Args:
        visible: the folders that Python needs.
        bytes_of_files: the maximum size of the program's files.
    """
    _mount("none", "/", flags=_RECURSIVE | _PRIVATE)
    size = f"size={bytes_of_files},nr_inodes=10000,mode=755"
    with open("/proc/self/mountinfo") as mounts:
        _mount("tmpfs", _ROOT, kind="tmpfs", flags=_NO_SUID | _NO_DEV, options=size)
        for folder in visible:
            target = _ROOT + folder
            os.makedirs(target, exist_ok=True)
            _mount(folder, target, flags=_BIND | _RECURSIVE)
            for mounted in _mounts_below(target, mounts):  # the read-only flag is not recursive
                # Keep the existing flags of a mount, because the machine may have locked them.
                kept = os.statvfs(mounted).f_flag & 0xFFF
                flags = _REMOUNT | _BIND | _READ_ONLY | _NO_SUID | _NO_DEV | kept
                _mount("none", mounted, flags=flags)
    # Make the file system the root (pivot_root), and detach the old root.
    for folder in ("work", "old"):
        os.mkdir(f"{_ROOT}/{folder}")
    os.chdir(_ROOT)
    _call("syscall", 155 if platform.machine() == "x86_64" else 41, b".", b"old")
    os.chdir("/")
    _call("umount2", b"/old", _DETACH)
    os.rmdir("/old")
    os.chdir("/work")


def _mounts_below(folder: str, mounts: TextIO) -> list[str]:
    """Returns the mount points in a folder, including the folder itself."""
    mounts.seek(0)
    written = [line.split()[4] for line in mounts]
    # The kernel writes spaces and similar characters as \\040.
    places = [re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), x) for x in written]
    return sorted({x for x in places if x == folder or x.startswith(f"{folder}/")})


def limit_resources(limits: dict[str, int]) -> None:
    """Limits the processor time, the memory, the size of files and the number of open files."""
    for name, value in (
        ("RLIMIT_CPU", limits["seconds"]),
        ("RLIMIT_AS", limits["bytes_of_memory"]),
        ("RLIMIT_FSIZE", limits["bytes_of_files"]),
        ("RLIMIT_NOFILE", 32),
        ("RLIMIT_CORE", 0),
    ):
        resource.setrlimit(getattr(resource, name), (value, value))


def end_with_parent(is_orphan: Callable[[], bool]) -> None:
    """Makes the kernel kill this process when its parent ends.

    Args:
        is_orphan: returns whether the parent has already ended.
    """
    _call("prctl", _SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if is_orphan():
        os._exit(1)


def drop_privileges() -> None:
    """Gives up all capabilities, and refuses the system calls that could undo the isolation."""
    machine, calls = _CALLS[platform.machine()]
    _call("prctl", _SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    header = ctypes.create_string_buffer(struct.pack("Ii", 0x20080522, 0))
    none = ctypes.create_string_buffer(struct.pack("6I", 0, 0, 0, 0, 0, 0))
    _call("syscall", calls["capset"], header, none)
    # A BPF program for seccomp. A jump skips the given number of instructions.
    refuse = len(calls) + 1
    load, equal, above, result = 0x20, 0x15, 0x35, 0x06
    program = [
        (load, 0, 0, 4),  # load the machine's code
        (equal, 1, 0, machine),
        (result, 0, 0, 0x80000000),  # a call for another machine ends the process
        (load, 0, 0, 0),  # load the number of the call
        (above, refuse, 0, _X32),
        *((equal, len(calls) - i, 0, number) for i, number in enumerate(calls.values())),
        (result, 0, 0, 0x7FFF0000),  # allowed
        (result, 0, 0, 0x00050001),  # refused: operation not permitted
    ]
    # struct sock_filter [] and struct sock_fprog of the kernel.
    filters = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    stored = ctypes.create_string_buffer(filters)
    address = ctypes.cast(stored, ctypes.c_void_p).value
    loaded = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), address))
    _call("prctl", _SET_SECCOMP, 2, loaded, 0, 0)


def run_program(program: str) -> int:
    """Runs the program and prints the last line of an error; returns its status."""
    try:
        exec(compile(program, "program", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        if isinstance(end.code, int):
            return end.code & 0xFF
        if end.code is not None:
            print(end.code, file=sys.stderr)
        return 0 if end.code is None else 1
    except BaseException as error:
        sys.stdout.flush()
        print(traceback.format_exception_only(error)[-1].strip(), file=sys.stderr)
        return 1
    return 0


def main() -> int:
    """Reads the program and its limits from standard input, and runs it."""
    given = json.loads(sys.stdin.buffer.read())
    try:
        # The kernel forgets an earlier `end_with_parent` when the user namespace changes.
        enter_namespaces()
        end_with_parent(lambda: os.getppid() != given["parent"])
        ended, alive = os.pipe()  # readable when its other end is closed
        # Fork the first process of the new namespace. When it ends, all other processes of the
        # namespace end as well.
        child = os.fork()
        if child:
            _, status = os.waitpid(child, 0)
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
        os.close(alive)
        # The child: confine it step by step, then run the program.
        end_with_parent(lambda: bool(select.select([ended], [], [], 0)[0]))
        os.close(ended)
        enter_empty_root(given["visible"], given["limits"]["bytes_of_files"])
        limit_resources(given["limits"])
        drop_privileges()
    except (OSError, KeyError) as error:
        print(f"cannot be confined: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    os.write(1, CONFINED)
    status = run_program(given["program"])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    sys.exit(main())
