"""Break runs of the smallest model in every way that a machine does, and check what they leave.

    python lab/reliability.py --out lab/results/reliability.md

* power: the power is cut at random system calls, recorded by strace; what was not written through
  to the disk is lost, wholly or by chance, and the same command is given again;
* disk: ENOSPC or EIO at a write, fsync, rename, … of a command;
* kill: SIGKILL at random moments, and of one of two processes that work together;
* serve: SIGKILL of vLLM's server, or of its engine, while it loads a packed model;
* fuzz: damaged files in each reader, guided by coverage (atheris), and packed rows with damaged
  bytes in the compiled kernels, under the address and undefined sanitizers.

The status is 1 if something happened that must not: a result lost, half a result, other bits, a
refusal without a file and a next step, a traceback, a leftover, or a process that hangs.
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from served import embedded, export, removed
from trouble import disk, kills, power, runs, servers
from trouble.runs import Command

from mrp_lightning.devices import machine

ROOT = Path(__file__).parents[1]
Rows = tuple[str, Sequence[str], Sequence[Sequence[Any]], list[str]]
"""The title, the columns and the rows of a table, and the faults."""


def main() -> None:
    """Do what is asked for, write its tables as Markdown, and exit with 1 after a fault."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    option = parser.add_argument
    option("--out", type=Path, help="the file of the tables (default: standard output)")
    parts = {"power": power_cuts, "disk": failing_disks, "kill": random_kills}
    parts |= {"serve": killed_servers, "fuzz": fuzzing}
    option("--part", nargs="+", choices=list(parts), default=list(parts))
    option("--commands", nargs="+", help="those whose power is cut, … (default: all)")
    option("--cuts", type=int, default=200, help="power cuts of each command")
    option("--failures", type=int, default=100_000, help="the most failing calls of each command")
    option("--calls", nargs=2, type=int, default=(0, 100_000), help="… from one up to another")
    option("--kills", type=int, default=100, help="kills in all")
    option("--ddp", type=int, default=8, help="those of them with two processes")
    option("--servers", type=int, default=10, help="servers that are killed while they load")
    option("--dense-servers", type=int, default=2, help="those of the dense model, to compare")
    option("--vllm", type=Path, default=ROOT / ".venv-vllm/bin/python", help="their interpreter")
    option("--readers", nargs="+", help="those that are fuzzed (default: all, and the kernels)")
    option("--fuzz-seconds", type=int, default=300, help="seconds for each reader and the kernels")
    option("--seed", type=int, default=0)
    options = parser.parse_args()
    if "serve" in options.part and not options.vllm.exists():
        parser.error(f"--vllm: there is no {options.vllm}. `make vllm` makes it; --part leaves it.")
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    runs.import_all()
    begin, tables = time.monotonic(), dict[str, Rows]()
    with tempfile.TemporaryDirectory() as directory:
        inputs = Path(directory)
        runs.write_inputs(inputs)
        commands = runs.commands(inputs)
        names = [one.name for one in kills.killed_commands(inputs, commands)] + list(commands)
        if unknown := sorted(set(options.commands or ()).difference(names)):
            parser.error(f"--commands: unknown {unknown}. Choose from {sorted(set(names))}.")
        for name in options.part:
            print(f"{name} …", file=sys.stderr)
            for rows in parts[name](options, inputs, commands):
                tables[name] = rows
                text = _page(list(tables.values()), options, time.monotonic() - begin)
                if options.out:  # so that an interrupted run has what it did
                    options.out.write_text(text, "utf-8")
    if not options.out:
        print(text, end="")
    raise SystemExit(any(faults for *_, faults in tables.values()))


def power_cuts(
    options: argparse.Namespace, _: Path, commands: dict[str, Command]
) -> Iterator[Rows]:
    """Cut the power of each command."""
    columns = ("command", "cuts", "after the cut", "the same command again", "faults")
    chosen = _chosen(commands.values(), options)
    trials = [power.cut(one, options.cuts, random.Random(options.seed)) for one in chosen]
    for done in _steps(trials):
        rows = [
            (one.name, sum(one.states.values()), _counted(one.states), _counted(one.reruns))
            for one in done
        ]
        yield _table("Power cuts", columns, rows, done)


def failing_disks(
    options: argparse.Namespace, _: Path, commands: dict[str, Command]
) -> Iterator[Rows]:
    """Let calls of each command fail."""
    columns = ("command", "failed calls", "named the file and the way on", "right result", "faults")
    trials = [
        disk.fail(one, options.failures, random.Random(options.seed), slice(*options.calls))
        for one in _chosen(commands.values(), options)
    ]
    for done in _steps(trials):
        rows = [(one.name, one.tried, one.refused, one.harmless) for one in done]
        yield _table("Failing disks", columns, rows, done)


def _chosen(commands: Iterable[Command], options: argparse.Namespace) -> list[Command]:
    names = options.commands
    return [command for command in commands if names is None or command.name in names]


def random_kills(
    options: argparse.Namespace, inputs: Path, commands: dict[str, Command]
) -> Iterator[Rows]:
    """Kill commands at random moments."""
    columns = ("command", "killed, then the same bits", "through before", "faults")
    chance = random.Random(options.seed)
    alone = _chosen(kills.killed_commands(inputs, commands), options)
    each, more = divmod(options.kills - options.ddp, len(alone))
    trials = [kills.kill(one, each + (index < more), chance) for index, one in enumerate(alone)]
    trials += [kills.kill_processes(inputs, options.ddp, chance)] if options.ddp else []
    for done in _steps(trials):
        rows = [(one.name, one.resumed, one.through) for one in done]
        yield _table("Kills", columns, rows, done)


def killed_servers(
    options: argparse.Namespace, inputs: Path, _: dict[str, Command]
) -> Iterator[Rows]:
    """Kill servers of the embedded model without half of its weights, packed and dense."""
    dense = embedded(inputs / "half", removed)
    packed = export(dense, inputs / "half-bitmask", "bitmask")
    columns = ("model, process", "killed", "then the same tokens", "processes that lived on")
    columns += ("MiB left in shared memory", "faults")
    chance = random.Random(options.seed)
    trials = [
        servers.kill_servers(options.vllm, model, inputs, number, chance)
        for model, number in ((packed, options.servers), (dense, options.dense_servers))
        if number
    ]
    for done in _steps(trials):
        rows = [(one.name, one.killed, one.right, one.orphans, one.shared >> 20) for one in done]
        yield _table("Killed servers", columns, rows, done)


def fuzzing(
    options: argparse.Namespace, inputs: Path, commands: dict[str, Command]
) -> Iterator[Rows]:
    """Fuzz each reader, and the kernels."""
    columns = ("reader", "files", "branches reached", "faults")
    from trouble import fuzz

    _write_more(inputs, commands)
    rows, faults = [], []
    for name in options.readers or fuzz.targets():
        corpus = inputs / "corpus" / name
        fuzz.write_seeds(name, corpus, inputs)
        words = [sys.executable, str(Path(fuzz.__file__)), name, str(corpus)]
        seconds = f"--seconds={options.fuzz_seconds}"
        done = subprocess.run([*words, seconds], capture_output=True, text=True, check=False)
        text = done.stdout + done.stderr
        tried, reached = fuzz.counts(text)
        if done.returncode:
            faults.append(f"{name}: {fuzz.reason(text)}")
        print(f"  {name} {tried}, faults: {len(faults)}", file=sys.stderr, flush=True)
        rows.append((name, f"{tried:,}", reached, int(bool(done.returncode))))
        yield "Damaged files", columns, rows, faults
    if options.readers:
        return
    words = ["make", "--silent", "sanitize", f"SECONDS={options.fuzz_seconds}"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    last = (done.stdout + done.stderr).strip().rpartition("\n")[2]
    if done.returncode:
        faults.append(f"kernels: {last}")
    rows.append(("compiled kernels", last.partition(" ")[0], "", int(bool(done.returncode))))
    yield "Damaged files", columns, rows, faults


def _write_more(inputs: Path, commands: dict[str, Command]) -> None:
    """Write a sweep and a journal, whose files are damaged later."""
    sweep = commands["sweep"]
    sweep.prepare()
    runs.run(sweep)
    shutil.copytree(sweep.root, inputs / "swept")
    command = commands["first save"]
    command.prepare()
    journal = command.root / f".{command.result}.partial"
    output = command.root.with_name("output.txt")
    child = runs.start(command, output)
    while not (journal / "block-00001.safetensors").exists():
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    runs.finish(child, output)
    shutil.copytree(command.root, inputs / "journal")


def _steps(trials: Iterable[Iterator[Any]]) -> Iterator[list[Any]]:
    """Yield what all trials did so far, by name, after each of their steps, and show it."""
    done: dict[str, Any] = {}
    for trial in trials:
        for number, step in enumerate(trial, 1):
            line = f"\r  {step.name} {number}, faults: {len(step.faults)}  "
            print(line, end="", file=sys.stderr, flush=True)
            done[step.name] = step
            yield list(done.values())
        print(file=sys.stderr)


def _table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], done: Sequence[Any]
) -> Rows:
    """Append the number of faults to each row, and list them."""
    counted = [(*row, len(one.faults)) for row, one in zip(rows, done, strict=True)]
    faults = [f"{one.name}: {fault}" for one in done for fault in one.faults]
    return title, columns, counted, faults


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))


def _page(tables: Sequence[Rows], options: argparse.Namespace, seconds: float) -> str:
    words = " ".join(["python lab/reliability.py", *sys.argv[1:]])
    lines = [
        "# Reliability by trial",
        "",
        *(line.strip() for line in (__doc__ or "").strip().splitlines()[4:]),
        "",
        f"```\n{words}\n```",
        "",
        f"{machine(torch.device('cpu'))}; a random LLaMA of three blocks of 64 columns; "
        f"{seconds / 60:.0f} minutes, of which {options.fuzz_seconds} s for each reader.",
    ]
    for title, columns, rows, faults in tables:
        lines += ["", f"## {title}", "", f"| {' | '.join(columns)} |"]
        lines += [f"|{' --- |' * len(columns)}"]
        lines += [f"| {' | '.join(map(str, row))} |" for row in rows]
        lines += ["", *(f"* {' '.join(fault.split())}" for fault in faults)] if faults else []
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
