"""Disks that fail: an error at a write, rename or fsync of a command, one after the other."""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import cycle

from trouble.calls import Call, traced
from trouble.runs import Command, End, State, run

_CALLS = (
    *("write", "pwrite64", "fsync", "rename", "renameat", "renameat2", "mkdir", "ftruncate"),
    *("unlink", "unlinkat", "rmdir", "sendfile", "openat"),
)
_ERRORS = ("ENOSPC", "EIO")
_NEXT_STEP = re.compile(r"\b([Mm]ake room|[Nn]ame|Give|Set|Move|Free|Change|again|disk full)\b")


@dataclass
class Failures:
    """The failures of one command.

    Attributes:
        name: Its name.
        refused: How many ended with a message.
        harmless: How many ended well all the same, with the right result.
        missed: How many hit no file of the command, because its calls came in another order.
        faults: What must not happen, each as a line.
    """

    name: str
    refused: int = 0
    harmless: int = 0
    missed: int = 0
    faults: list[str] = field(default_factory=list)

    @property
    def tried(self) -> int:
        """The number of calls that hit a file of the command."""
        return self.refused + self.harmless + len(self.faults)


def fail(
    command: Command, number: int, random_: random.Random, among: slice = slice(None)
) -> Iterator[Failures]:
    """Record a command, and run it with a failing call, for some of its calls or for all.

    Args:
        command: The command.
        number: How many of its calls fail at most; if it has more, they are drawn.
        random_: The source of chance.
        among: The calls among which these are.

    Yields:
        The failures so far, after each of them.
    """
    command.prepare()
    earlier = command.state()
    _, calls = traced(command)
    expected = command.state()
    main = calls[0].thread
    hit = [call for call in calls if call.thread == main and _changes(call, command)]
    each = list(zip(hit, cycle(_ERRORS)))[among]
    if number < len(each):
        each = random_.sample(each, number)
    failures = Failures(command.name)
    for call, error in each:
        command.prepare()
        inject = f"inject={call.name}:error={error}:when={call.ordinal}"
        end, injected = traced(command, inject)
        reached = [made for made in injected if made.result < 0]
        where = f"{error} at {call.name} of {call.paths[0].removeprefix(f'{command.root}/')}"
        if not any(_changes(made, command) for made in reached):
            failures.missed += 1
        elif fault := _fault(command, end, earlier, expected):
            failures.faults.append(f"{where}: {fault}")
        elif end.status == 0:
            failures.harmless += 1
        else:
            failures.refused += 1
        yield failures


def _changes(call: Call, command: Command) -> bool:
    if call.name not in _CALLS or not any(str(command.root) in path for path in call.paths):
        return False
    return call.name != "openat" or "O_CREAT" in call.arguments[2]


def _fault(command: Command, end: End, earlier: State, expected: State) -> str:
    """Return what is wrong after a failed call; "" if nothing is."""
    state = command.state()
    if end.problem:
        return f"{end.problem}: {end.output[-500:]}"
    if end.status == 0:
        return "" if state == expected else "success, but not the result"
    if command.name == "sweep":
        whole = expected.weights
        if state.problem or any(s != whole.get(n) for n, s in state.weights.items()):
            return f"a run of the sweep is not whole: {state.problem}"
    elif state not in (earlier, expected):
        return f"neither the old nor the new result: {state.problem or 'other weights'}"
    if str(command.root) not in end.message:
        return f"the message names no file: {end.message}"
    if not _NEXT_STEP.search(end.message):
        return f"the message names no next step: {end.message}"
    again = run(command)
    if again.status and not (state == expected and "exist" in again.message):
        return f"the next run ended with {again.status}: {again.output[-400:]}"
    if command.state() != expected:
        return "the next run came to another result"
    if leftovers := [] if again.status else command.leftovers():
        return f"left behind: {', '.join(leftovers)}"
    return ""
