"""Processes that start at once: forks of a server that has imported what commands need.

A test of signals, kills, or several ranks needs processes, and seldom Python's own start of them,
most of whose seconds are imports of torch, Lightning and transformers.
"""

import atexit
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(
    [
        *("lightning.pytorch", "transformers.models.llama.modeling_llama", "torch.distributed"),
        *("callbacks", "export", "export.packing", "mrp_lightning.callbacks.pruning"),
        *("mrp_lightning.commands.lightning_cli", "mrp_lightning.loop.causal_lm", "datasets"),
    ]
)


def _main(command: list[str], env: dict[str, str], cwd: str, stdout: Any, stderr: Any) -> None:
    """Do in a fork of the server what `python COMMAND` does."""
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    for number, file in ((1, stdout), (2, stderr)):
        is_path = isinstance(file, str)
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT) if is_path else file.fileno(), number)
    if not isinstance(stdout, str):
        stdout.close()  # its reader waits for the end of all copies
    sys.path.insert(0, cwd if command[0] in ("-c", "-m") else str(Path(command[0]).parent))
    match command:
        case ["-c", code, *options]:
            sys.argv = ["-c", *options]
            exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        case ["-m", module, *options]:
            sys.argv = [module, *options]
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case _:
            sys.argv = command
            runpy.run_path(command[0], run_name="__main__")


class Started:
    """A started process, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, command: Any, env: Mapping[str, str], cwd: Any, out: Any, err: Any) -> None:
        given = ([*map(str, command)], {**os.environ, **env}, str(Path(cwd or ".").absolute()))
        self._process = context.Process(target=_main, args=(*given, out, err))
        self._process.start()
        atexit.register(self._process.kill)  # before multiprocessing joins it
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float = 300) -> int | None:
        self._process.join(timeout)
        if self.returncode is None:
            self._process.kill()
            raise TimeoutError(f"{self._process} has not ended in {timeout} s")
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


class Piped(Started):
    """A process whose output and errors are read as they come, from `stdout`."""

    def __init__(self, command: Any, env: Mapping[str, str] = {}, cwd: Any = None) -> None:
        reading, writing = context.Pipe(duplex=False)
        super().__init__(command, env, cwd, writing, writing)
        writing.close()
        self.stdout = os.fdopen(os.dup(reading.fileno()))
        reading.close()

    def communicate(self) -> str:
        """Return the rest of the output, when the process has ended."""
        with self.stdout:
            output = self.stdout.read()
        self.wait()
        return output


def on_two_nodes(command: Any, env: Mapping[str, str] = {}) -> list[Piped]:
    """Start one process on each of two nodes, in the environment that torchrun gives them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    of_all = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_RANK": "0"}
    of_all |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "test"}
    ranks = [{"RANK": str(rank), "GROUP_RANK": str(rank)} for rank in range(2)]
    return [Piped(command, {**env, **of_all, **rank}) for rank in ranks]


def run(command: Any, env: Mapping[str, str] = {}, cwd: Any = None, check: bool = False) -> Any:
    """Run `python COMMAND` to its end, as `subprocess.run` does, and return all that it wrote."""
    with tempfile.TemporaryDirectory() as directory:
        files = [Path(directory, name) for name in ("stdout", "stderr")]
        process = Started(command, env, cwd, *map(str, files))
        status = process.wait()
        ended = subprocess.CompletedProcess(command, status, *(f.read_text() for f in files))
    if check and status:
        raise AssertionError(f"status {status}: {ended.stderr}")
    return ended
