"""A tool that runs a Python program without access to the network or to files."""

import contextlib
import dataclasses
import json
import os
import platform
import selectors
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

from .....data.common.fields import require
from . import sandbox_child
from .tool import Tool


@dataclasses.dataclass(frozen=True)
class Limits:
    """The resource limits of a program. A program that exceeds a limit is ended."""

    seconds: int = 5
    """The maximum elapsed time, and also the maximum processor time."""
    bytes_of_memory: int = 256 << 20
    bytes_of_files: int = 1 << 20
    """The maximum size of all files in the program's folder. This folder is empty at first and is
    deleted at the end.
    """
    bytes_of_output: int = 16 << 10
    """The maximum size of the output. A program that prints more is ended."""


def run_python(program: str, limits: Limits = Limits()) -> str:
    """Runs a Python program with the standard library, and returns what it prints.

    The program runs in a separate process without access to the network, other processes or files
    (see `sandbox_child`), which requires Linux and user namespaces. The program ends when this
    process ends, and leaves no files.

    Args:
        program: the program.
        limits: the resources that the program may use.

    Returns:
        The output of the program; after an error, also the last line of the traceback.

    Raises:
        UserError: a program cannot be confined on this machine, so it did not run.
    """
    require(
        sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64"),
        f"a program cannot be confined on {sys.platform} {platform.machine()}, and does not run: "
        "use Linux on x86_64 or aarch64, or leave this tool out",
    )
    given = {
        "program": program,
        "parent": os.getpid(),
        "visible": _folders_of_python(),
        "limits": dataclasses.asdict(limits),
    }
    # Run without the user's environment (-I) and without site-packages (-S).
    command = [_interpreter(), "-I", "-S", "-X", "utf8", sandbox_child.__file__]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={},
        start_new_session=True,
        close_fds=True,
    )
    # Send the program, and read its output until it ends or reaches a limit.
    try:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the program ended before it read its input
            process.stdin.write(json.dumps(given).encode())
            process.stdin.close()
        output, end = _read(process, limits)
    finally:
        _kill(process)
    # If the first line is missing, the program was not confined and did not run.
    confined = output.startswith(sandbox_child.CONFINED)
    text = output.removeprefix(sandbox_child.CONFINED).decode(errors="replace").rstrip("\n")
    require(
        confined or end,
        f"a program cannot be confined on this machine, and did not run ({text}): allow "
        "namespaces for users, or leave this tool out",
    )
    # Describe the end of a program that was ended by a signal or that has an exit status.
    code = process.returncode
    if not end and code - 128 in set(signal.Signals):
        end = f"ended by {signal.Signals(code - 128).name}"
    elif not end and code > 1:
        end = f"exit status {code}"
    note = f"[{end}]" if end else ""
    return "\n".join(filter(None, [text, note])) or "[no output]"


def _read(process: "subprocess.Popen[bytes]", limits: Limits) -> tuple[bytes, str]:
    """Reads the output of a program up to the limits.

    Returns:
        The output, and the reason why it is incomplete, or "" if the program ended by itself.
    """
    assert process.stdout is not None
    output, until = b"", time.monotonic() + limits.seconds
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while True:
            left = until - time.monotonic()
            if left <= 0 or not selector.select(left):
                return output, f"ended after {limits.seconds} seconds"
            piece = os.read(process.stdout.fileno(), 4096)
            if not piece:
                process.wait()
                return output, ""
            output += piece
            # The first line, which confirms the isolation, is not part of the output.
            most = limits.bytes_of_output + len(sandbox_child.CONFINED)
            if len(output) > most:
                return (
                    output[:most],
                    f"ended after {limits.bytes_of_output:,} bytes of output",
                )


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """Ends the process and all processes that it started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    if process.stdout is not None:
        process.stdout.close()
    process.wait()


def _interpreter() -> str:
    """Returns the path of the interpreter itself instead of a link in a virtual environment."""
    return os.path.realpath(sys.executable)


def _folders_of_python() -> list[str]:
    """Returns the folders that the interpreter and its library need."""
    names = {
        str(Path(_interpreter()).parent),
        sysconfig.get_paths()["stdlib"],
        str(sysconfig.get_config_var("LIBDIR")),
        *("/lib", "/lib64", "/usr/lib", "/usr/lib64"),
    }
    # Leave out a folder that is inside another folder of the list, which already makes it visible.
    real = sorted({os.path.realpath(name) for name in names if os.path.isdir(name)})
    return [
        folder
        for folder in real
        if not any(folder != other and folder.startswith(f"{other}/") for other in real)
    ]


def python_program(limits: Limits = Limits()) -> Tool:
    """Returns the tool `python`, which runs a program. Users must request it by name."""

    def run(program: str) -> str:
        return run_python(program, limits)

    return Tool(
        "python",
        "Runs a Python program and shows what it prints.",
        {"program": "The program."},
        run,
    )
