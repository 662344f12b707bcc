"""Kills at random moments: the same command again must come to the same bits."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from trouble.runs import LIMIT, Command, End, State, finish, predict, run, start

_FIRST = 3600.0
"""Seconds after which a command hangs that may compile kernels; a busy machine does so slowly."""

_TOGETHER = 60.0
"""Seconds after which no process of a group may live on when one was killed."""


@dataclass
class Kills:
    """The kills of one command.

    Attributes:
        name: Its name.
        resumed: How many runs that were killed came to the same bits when started again.
        through: How many were through before the kill came.
        faults: What must not happen, each as a line.
    """

    name: str
    resumed: int = 0
    through: int = 0
    faults: list[str] = field(default_factory=list)


def killed_commands(inputs: Path, recorded: dict[str, Command]) -> list[Command]:
    """Return the commands that are killed: of each way of pruning one, exports and a sweep."""
    root = inputs / "root"
    ways = {
        "JM, dense target, tuning": {"method": "JM", "target": "dense", "tuning": "true"},
        "4 bits": {"bits": "4"},
        "neurons": {"structure": "neurons", "sparsity": "0.5"},
        "heads": {"structure": "heads", "sparsity": "0.5"},
        "own text": {"text": "own"},
        "allocation": {"sparsity": "0.5", "allocation": "output"},
        "balance and head grid": {"grid": "q4_0", "balance": "true", "head_grid": "q8_0"},
    }
    prunings = [
        Command(name, predict(inputs, **settings), root, "out") for name, settings in ways.items()
    ]
    others = ("allocation, balance, grid", "export", "export --overwrite", "gguf", "sweep")
    return prunings + [recorded[name] for name in others]


def kill(command: Command, number: int, random_: random.Random) -> Iterator[Kills]:
    """Kill a command at random moments, and start it again after each.

    Yields:
        The kills so far, after each of them.
    """
    command.prepare()
    earlier = command.state()
    _whole(command)  # the first run may compile kernels, which takes far longer than the command
    expected = command.state()
    command.prepare()
    cpu_seconds = _whole(command).cpu_seconds
    kills = Kills(command.name)
    output = command.root.with_name("output.txt")
    for _ in range(number):
        command.prepare()
        seconds = random_.uniform(0, cpu_seconds)
        end = finish(start(command, output), output, seconds)
        if end.status == 0:
            kills.through += 1
        elif end.problem != "killed by SIGKILL":
            kills.faults.append(f"within {seconds:.2f} s {end.problem}: {end.output[-400:]}")
        state = command.state()
        is_whole = state in (earlier, expected) or command.is_aside(earlier)
        if command.name != "sweep" and not is_whole:
            kills.faults.append(f"after {seconds:.2f} s half a result: {state.problem}")
        again = run(command)
        is_there = state == expected and "exist" in again.message
        if again.status and not is_there:
            kills.faults.append(f"after {seconds:.2f} s: {again.output[-400:]}")
        elif command.state() != expected:
            kills.faults.append(f"after {seconds:.2f} s other bits: {command.state().problem}")
        elif leftovers := [] if is_there else command.leftovers():
            kills.faults.append(f"after {seconds:.2f} s left behind: {', '.join(leftovers)}")
        elif end.status:
            kills.resumed += 1
        yield kills


def _whole(command: Command) -> End:
    end = run(command, longest=_FIRST)
    if end.status:
        raise SystemExit(f"FAILED: {' '.join(command.words)}: {end.output}")
    return end


def kill_processes(inputs: Path, number: int, random_: random.Random) -> Iterator[Kills]:
    """Kill one of two processes that prune together, the first or the second in turn.

    Yields:
        The kills so far, after each of them.
    """
    two = ["--trainer.strategy=ddp", "--trainer.devices=2"]
    command = Command("ddp", [*predict(inputs), *two], inputs / "root", "out")
    command.prepare()
    begin = time.monotonic()
    status = _wait(_launch(command))
    if status:
        raise SystemExit(f"FAILED: {' '.join(command.words)} ended with {status}")
    whole, expected = time.monotonic() - begin, command.state()
    kills = Kills(command.name)
    for index in range(number):
        command.prepare()
        process = _launch(command)
        seconds = random_.uniform(0, whole)
        if not _kill_one(process, seconds, second=bool(index % 2)):
            kills.through += 1
        elif alive := still_alive(process):
            kills.faults.append(f"after {seconds:.1f} s {alive} processes lived on")
        state = command.state()
        if state not in (State(), expected):
            kills.faults.append(f"after {seconds:.1f} s half a result: {state.problem}")
        elif not state.weights and (status := _wait(_launch(command))):
            kills.faults.append(f"after {seconds:.1f} s the next run ended with {status}")
        elif command.state() != expected:
            kills.faults.append(f"after {seconds:.1f} s other bits: {command.state().problem}")
        else:
            kills.resumed += 1
        yield kills


def _launch(command: Command) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "mrp_lightning", *command.words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # which also tells its processes from others
        env={**os.environ, "MASTER_ADDR": "127.0.0.1"},
    )


def _wait(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait(4 * LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.wait()


def _kill_one(process: subprocess.Popen[bytes], seconds: float, *, second: bool) -> bool:
    """Kill the first process, or the second one if there is one; return whether it was there."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        others = [number for number in processes_of(process.pid) if number != process.pid]
        os.kill(others[0] if second and others else process.pid, signal.SIGKILL)
        return True
    return False


def still_alive(process: subprocess.Popen[bytes], seconds: float = _TOGETHER) -> int:
    """Wait for all processes of a session to end; kill and count those that do not."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        process.poll()
        if not processes_of(process.pid):
            return 0
        time.sleep(0.2)
    alive = processes_of(process.pid)
    for number in alive:
        os.kill(number, signal.SIGKILL)
    process.wait()
    return len(alive)


def processes_of(leader: int) -> list[int]:
    """Return the processes of a session that have not ended, by Linux's /proc."""
    numbers = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == leader and fields[0] not in "ZX":
            numbers.append(int(stat.parent.name))
    return numbers
