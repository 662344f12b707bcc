"""Power cuts: what of a command's files survives if the machine stops at one of its calls.

A file has the content that it had at its last fsync, and perhaps some later writes. A directory has
the entries that it had at its own last fsync, and perhaps some later changes.
"""

import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trouble.calls import Call, traced
from trouble.runs import Command, State, run


@dataclass(eq=False)
class _File:
    """A regular file: writes (number of the call, offset, bytes), -1 as offset truncates."""

    writes: list[tuple[int, int, bytes]] = field(default_factory=list)
    synced: int = 0

    def content(self, count: int) -> bytes:
        data = bytearray()
        for _, offset, written in self.writes[:count]:
            if offset < 0:
                size = int.from_bytes(written, "little")
                data = data[:size].ljust(size, b"\0")
                continue
            data = data.ljust(offset, b"\0")
            data[offset : offset + len(written)] = written
        return bytes(data)


@dataclass(eq=False)
class _Directory:
    """A directory: changes (number of the call, name, what it is now, `None` for nothing)."""

    changes: list[tuple[int, str, "_File | _Directory | None"]] = field(default_factory=list)
    synced: int = 0

    def entries(self, survives: Callable[[int], bool]) -> dict[str, "_File | _Directory"]:
        now: dict[str, _File | _Directory] = {}
        for index, (number, name, node) in enumerate(self.changes):
            if index < self.synced or survives(number):
                now.pop(name, None)
                if node is not None:
                    now[name] = node
        return now

    def listed(
        self, survives: Callable[[int], bool], count: Callable[[_File], int]
    ) -> "Iterator[tuple[str, bytes | None]]":
        """Yield the directories (`None`) and files (bytes: so many writes of each) below it."""
        for name, node in self.entries(survives).items():
            if isinstance(node, _File):
                yield name, node.content(count(node))
                continue
            yield name, None
            for inner, content in node.listed(survives, count):
                yield f"{name}/{inner}", content


@dataclass
class _Opened:
    """The last opening of a file for writing, also by duplicates of its descriptor."""

    file: _File
    offset: int = 0
    appends: bool = False


class Disk:
    """A directory tree under the calls of a command, with what of it is on the disk for certain."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._tree = _read_tree(root)
        self._opened: dict[str, _Opened] = {}
        self._number = 0

    def apply(self, call: Call) -> bool:
        """Follow one call; return whether it changed something, or wrote it through."""
        self._number += 1
        inside = [path for path in call.paths if self._is_inside(path)]
        if not inside and self._is_inside(call.opened):
            inside = [call.opened]
        if not inside:
            return False
        handle = getattr(self, f"_{call.name}")
        return bool(handle(call))

    def survivors(self, mode: str, random_: random.Random) -> "dict[str, bytes | None]":
        """Return the files (bytes) and directories (`None`) that a cut after the last call leaves.

        Args:
            mode: "synced": nothing but what was flushed. "any": each other change or not, by
                chance. "ordered": all changes of names up to one of them, as journals of file
                systems have it. In the latter two a file also has some of its later writes.
            random_: The source of chance.
        """
        last = random_.randint(0, self._number)
        chosen: dict[int, bool] = {}

        def survives(number: int) -> bool:
            if mode == "any":
                return chosen.setdefault(number, random_.random() < 0.5)
            return mode == "ordered" and number <= last

        def count(node: _File) -> int:
            more = 0 if mode == "synced" else len(node.writes) - node.synced
            return node.synced + random_.randint(0, more)

        return dict(self._tree.listed(survives, count))

    def final(self) -> "dict[str, bytes | None]":
        """Return what is there if nothing is lost."""
        return dict(self._tree.listed(lambda _: True, lambda node: len(node.writes)))

    def _is_inside(self, path: str) -> bool:
        return path.startswith(f"{self._root}/") or path == str(self._root)

    def _directory(self, path: str) -> tuple[_Directory, str]:
        """Return the directory of a path, and the name in it."""
        *above, name = os.path.relpath(path, self._root).split("/")
        directory = self._tree
        for step in above:
            node = directory.entries(lambda _: True)[step]
            assert isinstance(node, _Directory)
            directory = node
        return directory, name

    def _node(self, path: str) -> "_File | _Directory | None":
        if path == str(self._root):
            return self._tree
        directory, name = self._directory(path)
        return directory.entries(lambda _: True).get(name)

    def _set(self, path: str, node: "_File | _Directory | None") -> None:
        directory, name = self._directory(path)
        directory.changes.append((self._number, name, node))

    def _openat(self, call: Call) -> bool:
        path, flags = call.opened, call.arguments[2]
        if "O_DIRECTORY" in flags or ("O_WRONLY" not in flags and "O_RDWR" not in flags):
            return False
        if "O_TMPFILE" in flags:  # has no name, and is an attempt to write in its directory
            return False
        node, made = self._node(path), False
        if node is None:
            node, made = _File(), True
            self._set(path, node)
        assert isinstance(node, _File)
        if "O_TRUNC" in flags and node.writes:
            node.writes.append((self._number, -1, b""))
            made = True
        self._opened[path] = _Opened(node, appends="O_APPEND" in flags)
        return made

    def _write(self, call: Call) -> bool:
        return self._written(call, call.content)

    def _written(self, call: Call, content: bytes) -> bool:
        opened = self._opened[call.paths[0]]
        node = opened.file
        if opened.appends:
            opened.offset = len(node.content(len(node.writes)))
        node.writes.append((self._number, opened.offset, content))
        opened.offset += len(content)
        return True

    def _sendfile(self, call: Call) -> bool:
        source = call.paths[1]
        node = self._node(source) if self._is_inside(source) else None
        content = node.content(len(node.writes)) if isinstance(node, _File) else b""
        content = content or Path(source).read_bytes()
        start = int(call.arguments[2].strip("[]").partition("]")[0])
        return self._written(call, content[start : start + call.result])

    def _pwrite64(self, call: Call) -> bool:
        node = self._opened[call.paths[0]].file
        node.writes.append((self._number, int(call.arguments[3]), call.content))
        return True

    def _lseek(self, call: Call) -> bool:
        if call.paths[0] in self._opened:
            self._opened[call.paths[0]].offset = call.result
        return False

    def _ftruncate(self, call: Call) -> bool:
        node = self._node(call.paths[0])
        assert isinstance(node, _File)
        size = int(call.arguments[1])
        node.writes.append((self._number, -1, size.to_bytes(8, "little")))
        return True

    def _fsync(self, call: Call) -> bool:
        node = self._node(call.paths[0])
        if isinstance(node, _File):
            node.synced = len(node.writes)
        elif node is not None:
            node.synced = len(node.changes)
        return True

    _fdatasync = _fsync

    def _renameat2(self, call: Call) -> bool:
        source, target = call.paths
        node = self._node(source)
        for path in [path for path in self._opened if path.startswith(source)]:
            self._opened[target + path.removeprefix(source)] = self._opened.pop(path)
        self._set(target, node)
        self._set(source, None)
        return True

    _rename = _renameat = _renameat2

    def _unlinkat(self, call: Call) -> bool:
        self._set(call.paths[0], None)
        return True

    _unlink = _rmdir = _unlinkat

    def _mkdirat(self, call: Call) -> bool:
        self._set(call.paths[0], _Directory())
        return True

    _mkdir = _mkdirat


def _read_tree(path: Path) -> _Directory:
    """Return a directory that is wholly on the disk."""
    directory = _Directory()
    for inner in sorted(path.iterdir()):
        node: _File | _Directory
        node = _read_tree(inner) if inner.is_dir() else _File([(0, 0, inner.read_bytes())], 1)
        directory.changes.append((0, inner.name, node))
    directory.synced = len(directory.changes)
    return directory


@dataclass(frozen=True)
class Cuts:
    """The cuts of one command.

    Attributes:
        name: Its name.
        states: How many cuts left the result absent, as it was before, or whole.
        reruns: How many were resumed to the same bits, and how many refused as already there.
        faults: What must not happen, each as a line.
    """

    name: str
    states: dict[str, int]
    reruns: dict[str, int]
    faults: Sequence[str]


def cut(
    command: Command, number: int, random_: random.Random, *, rerun: bool = True
) -> Iterator[Cuts]:
    """Record a command, cut its power at random calls, and start it again after each.

    Yields:
        The cuts so far, after each of them.
    """
    command.prepare()
    earlier = command.state()
    disk = Disk(command.root)
    end, calls = traced(command)
    if end.status:
        raise SystemExit(f"FAILED: {' '.join(command.words)}: {end.output}")
    expected = command.state()
    points = _changing(disk, calls)
    if (found := _as_tree(command.root)) != disk.final():
        lost = sorted(set(found.items()) ^ set(disk.final().items()))[:3]
        raise SystemExit(f"FAILED: the recording of {command.name} is not what happened: {lost}")
    cuts = Cuts(command.name, {}, {}, [])
    seen: dict[str, tuple[str, str, str]] = {}
    for index in range(number):
        point, mode = random_.choice(points), ("synced", "any", "ordered")[index % 3]
        command.prepare()
        disk = Disk(command.root)
        for call in calls[: point + 1]:
            disk.apply(call)
        left = disk.survivors(mode, random_)
        key = repr(sorted(left.items()))
        if key not in seen:
            _write_tree(command.root, left)
            seen[key] = _after(command, earlier, expected, rerun=rerun)
        state, again, fault = seen[key]
        cuts.states[state] = cuts.states.get(state, 0) + 1
        cuts.reruns[again] = cuts.reruns.get(again, 0) + 1
        if fault:
            cuts.faults.append(f"{calls[point].name} {point}, {mode}: {fault}")
        yield cuts


def _changing(disk: Disk, calls: Sequence[Call]) -> list[int]:
    """Follow all calls; return the positions of those that change or flush something."""
    return [position for position, call in enumerate(calls) if disk.apply(call)]


def _after(
    command: Command, earlier: State, expected: State, *, rerun: bool
) -> tuple[str, str, str]:
    """Return the state that a cut left, how the next run ended, and what is wrong with either."""
    state = command.state()
    kind, fault = _kind(command, state, earlier, expected)
    if fault or not rerun:
        return kind, "not tried", fault
    whole = _runs(expected)
    finished = {run: sums for run, sums in _runs(state).items() if sums == whole.get(run)}
    end = run(command)
    now = command.state()
    if end.problem:
        return kind, "fault", f"{end.problem}: {end.output[-400:]}"
    if lost := [run for run, sums in finished.items() if _runs(now).get(run) != sums]:
        return kind, "fault", f"finished results were lost: {lost}"
    if end.status:
        if state == expected and "exist" in end.message:
            return kind, "refused: it is there", ""
        return kind, "fault", f"refused: {end.message}"
    if now != expected:
        return kind, "fault", f"another result: {now.problem or 'other bits'}"
    if leftovers := command.leftovers():
        return kind, "fault", f"left behind: {', '.join(leftovers)}"
    return kind, "same bits", ""


def _kind(command: Command, state: State, earlier: State, expected: State) -> tuple[str, str]:
    if command.name == "sweep":  # its runs become whole one after the other
        runs = sum(sums == _runs(expected).get(run) for run, sums in _runs(state).items())
        return f"{runs} runs", ""
    if state == expected:
        return "new", ""
    if state == earlier:
        return ("old" if earlier.weights else "absent"), ""
    if command.is_aside(earlier):
        return "old, aside", ""
    return "fault", f"neither the old nor the new result: {state.problem or 'other or no weights'}"


def _runs(state: State) -> dict[str, dict[str, str]]:
    """Return the checksums of a result by the directory that they are in."""
    runs: dict[str, dict[str, str]] = {}
    for name, value in state.weights.items():
        runs.setdefault(name.rpartition("/")[0], {})[name] = value
    return runs


def _as_tree(root: Path) -> dict[str, bytes | None]:
    paths = sorted(root.rglob("*"))
    return {
        path.relative_to(root).as_posix(): None if path.is_dir() else path.read_bytes()
        for path in paths
    }


def _write_tree(root: Path, tree: dict[str, bytes | None]) -> None:
    shutil.rmtree(root)
    root.mkdir()
    for name, content in tree.items():
        if content is None:
            (root / name).mkdir()
        else:
            (root / name).write_bytes(content)
