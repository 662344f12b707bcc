"""System calls of a command on files: recorded, and made to fail, by strace."""

import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from trouble.runs import Command, End, finish, start

_TRACED = (
    *("openat", "write", "pwrite64", "writev", "lseek", "ftruncate", "fsync", "fdatasync"),
    *("rename", "renameat", "renameat2", "link", "linkat", "symlink", "unlink", "unlinkat"),
    *("mkdir", "mkdirat", "rmdir", "sendfile", "copy_file_range", "fallocate"),
)
_LINE = re.compile(r"(?P<pid>\d+) +(?P<name>\w+)\((?P<args>.*)\) += (?P<result>-?\d+)(?P<rest>.*)")
_UNFINISHED = re.compile(r"(?P<begin>(?P<pid>\d+) +\w+\(.*) <unfinished \.\.\.>")
_RESUMED = re.compile(r"(?P<pid>\d+) +<\.\.\. \w+ resumed>(?P<end>.*)")
_HEX = re.compile(r"\\x([0-9a-f]{2})")


@dataclass(frozen=True)
class Call:
    """A system call that succeeded, or that was made to fail.

    Attributes:
        name: Its name, such as `fsync`.
        thread: The number of its thread.
        ordinal: How many calls of this name its thread had made, with this one.
        arguments: Its arguments as text: paths with their quotes, descriptors with their paths.
        result: The number that it returned.
        opened: The path of the file that it opened; "" for others.
    """

    name: str
    thread: int
    ordinal: int
    arguments: Sequence[str]
    result: int
    opened: str = ""

    @cached_property
    def paths(self) -> list[str]:
        """Return the absolute paths that it is about."""
        if self.name == "openat":
            return [_joined(self.arguments[0], self.arguments[1])]
        if self.name in ("renameat", "renameat2", "linkat"):
            return [_joined(*self.arguments[:2]), _joined(*self.arguments[2:4])]
        if self.name in ("unlinkat", "mkdirat"):
            return [_joined(*self.arguments[:2])]
        if self.name in ("rename", "link"):
            return [_text(argument) for argument in self.arguments[:2]]
        if self.name == "symlink":
            return [_text(self.arguments[1])]
        if self.name in ("unlink", "mkdir", "rmdir"):
            return [_text(self.arguments[0])]
        if self.name == "copy_file_range":
            return [_path_of(self.arguments[2]), _path_of(self.arguments[0])]
        if self.name == "sendfile":
            return [_path_of(argument) for argument in self.arguments[:2]]
        return [_path_of(self.arguments[0])]

    @cached_property
    def content(self) -> bytes:
        """Return the bytes that a `write` or `pwrite64` wrote."""
        return _bytes(self.arguments[1])[: self.result]


def _bytes(quoted: str) -> bytes:
    return bytes.fromhex("".join(_HEX.findall(quoted)))


def _text(quoted: str) -> str:
    return os.fsdecode(_bytes(quoted))


def _path_of(descriptor: str) -> str:
    """Return the path that strace shows, in hexadecimal digits, behind a descriptor."""
    return _text(descriptor.partition("<")[2]).removesuffix(" (deleted)")


def _joined(directory: str, path: str) -> str:
    return os.path.normpath(Path(_path_of(directory), _text(path)))


def traced(command: Command, inject: str = "") -> tuple[End, list[Call]]:
    """Run a command under strace; return its end, and its calls.

    Args:
        command: The command; `prepare` it first.
        inject: An `inject=` expression of strace, which makes calls fail.
    """
    strace = shutil.which("strace")
    if strace is None:
        raise SystemExit("strace is not installed, by which system calls are recorded: install it.")
    log, output = command.root.with_name("strace.txt"), command.root.with_name("output.txt")
    log.unlink(missing_ok=True)
    ready = os.pipe()
    child = start(command, output, ready)
    options = ["-f", "-qq", "-y", "-xx", "-s", "100000000", "-o", str(log), "-p", str(child)]
    options += ["-e", f"trace={','.join(_TRACED)}", "-e", "signal=none"]
    tracer = subprocess.Popen(
        [strace, *options, *(["-e", inject] if inject else [])], stderr=subprocess.PIPE
    )
    try:
        _wait_until_traced(child, tracer)
        os.write(ready[1], b"x")
        end = finish(child, output)
    finally:
        tracer.wait(30)
        for descriptor in ready:
            os.close(descriptor)
    return end, list(_read(log))


def _wait_until_traced(child: int, tracer: subprocess.Popen[bytes]) -> None:
    while f"TracerPid:\t{tracer.pid}" not in Path(f"/proc/{child}/status").read_text():
        if tracer.poll() is not None:
            assert tracer.stderr is not None
            os.kill(child, 9)
            raise SystemExit(f"strace cannot trace here: {tracer.stderr.read().decode()}")


def _read(log: Path) -> Iterator[Call]:
    counts: Counter[tuple[str, str]] = Counter()
    begun: dict[str, str] = {}
    for line in log.read_text("ascii").splitlines():
        if match := _UNFINISHED.fullmatch(line):
            begun[match["pid"]] = match["begin"]
            continue
        if match := _RESUMED.fullmatch(line):
            line = begun.pop(match["pid"]) + match["end"]
        match = _LINE.fullmatch(line)
        if match is None:
            continue
        key = match["pid"], match["name"]
        counts[key] += 1
        failed, injected = int(match["result"]) < 0, "(INJECTED)" in match["rest"]
        if failed and not injected:
            continue
        opened = _path_of(match["rest"].strip()) if match["name"] == "openat" else ""
        arguments = match["args"].split(", ")
        result = int(match["result"])
        yield Call(match["name"], int(match["pid"]), counts[key], arguments, result, opened)
