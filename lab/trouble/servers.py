"""Servers that are killed while they load: their files stay whole, and the next one is right.

vLLM does not end its engine where the server alone dies (vllm-project/vllm#55510), nor frees its
shared memory where all die at once. So both are counted, for a packed model and for the dense one,
and removed.
"""

import json
import os
import random
import re
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from trouble.kills import processes_of, still_alive
from trouble.runs import checksum

UP = 600.0
"""Seconds in which a server has to be up; on a quiet machine it takes thirty."""

_KERNELS = Path(__file__).parents[2] / "mrp_sparse" / "kernels"
_PROMPT = "def first(items):\n    return"


@dataclass
class KilledServers:
    """The kills of servers.

    Attributes:
        name: The model, and the process that was killed.
        killed: How many were killed.
        right: How many were followed by a server with the same tokens.
        orphans: How many processes lived on, of all kills.
        shared: The bytes that were left in shared memory.
        faults: What must not happen, each as a line.
    """

    name: str
    killed: int = 0
    right: int = 0
    orphans: int = 0
    shared: int = 0
    faults: list[str] = field(default_factory=list)


class Server:
    """vLLM's server for a packed model, with directories of its own for all that it writes.

    Args:
        python: The interpreter of an environment with vLLM (`make vllm`).
        model: The directory of the model.
        room: The directory for temporary files, caches and the log.
    """

    def __init__(self, python: Path, model: Path, room: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.log = room / "log.txt"
        directories = {
            **{"HOME": "home", "TMPDIR": "tmp", "XDG_CACHE_HOME": "cache"},
            **{"VLLM_CACHE_ROOT": "cache/vllm", "VLLM_CONFIG_ROOT": "config"},
        }
        for name in directories.values():
            (room / name).mkdir(parents=True, exist_ok=True)
        words = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        words += ["--host", "127.0.0.1", "--port", str(self.port), "--enforce-eager"]
        words += ["--max-model-len", "128", "--max-num-seqs", "4", "--dtype", "bfloat16"]
        environment = {
            **os.environ,
            **{variable: str(room / name) for variable, name in directories.items()},
            **{"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1"},
            **{"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
        }
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [str(python), *words],
                stdout=log,
                stderr=log,
                start_new_session=True,  # which tells its processes from others
                env=environment,
            )

    def wait_until_up(self, seconds: float) -> bool:
        """Wait until the server answers, or for some seconds; return whether it does.

        Raises:
            SystemExit: The server ended by itself.
        """
        return self._wait(self._answers, seconds)

    def wait_for_engine(self, seconds: float) -> bool:
        """Wait for the process that loads the model; return whether it runs.

        Raises:
            SystemExit: The server ended by itself.
        """
        return self._wait(lambda: bool(self.engines()), seconds)

    def _wait(self, is_so: Callable[[], bool], seconds: float) -> bool:
        limit = time.monotonic() + seconds
        while time.monotonic() < limit:
            if self.process.poll() is not None:
                raise SystemExit(f"FAILED: the server ended: {self.log.read_text()[-2000:]}")
            if is_so():
                return True
            time.sleep(0.1)
        return False

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                return True
        except OSError:
            return False

    def complete(self, prompt: str | Sequence[int]) -> str:
        """Return the greedy continuation of a text or of tokens by 16 tokens, as text.

        Raises:
            OSError: The server does not answer, or with an error; with the end of its log.
        """
        body = {"prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                return str(json.load(response)["choices"][0]["text"])
        except OSError as error:
            raise OSError(f"{error}: {self.log.read_text()[-2000:]}") from error

    def stop(self) -> int:
        """Ask the server to stop, as Ctrl-C does; return its exit status."""
        self.process.send_signal(signal.SIGINT)
        still_alive(self.process)  # kills it if it does not
        return self.process.wait()

    def engines(self) -> list[int]:
        """Return the processes that load the model; none at first."""
        return [number for number in processes_of(self.process.pid) if _is_engine(number)]

    def shared_blocks(self) -> set[Path]:
        """Return the blocks of shared memory that its processes have mapped."""
        blocks = set()
        for number in processes_of(self.process.pid):
            with suppress(OSError):  # it has ended
                maps = Path(f"/proc/{number}/maps").read_text()
                blocks |= {Path(path) for path in re.findall(r"/dev/shm/\S+$", maps, re.M)}
        return blocks

    def kill(self, *, engine: bool) -> int:
        """Kill the server or its engine, which has to run; return how many processes lived on."""
        os.kill(self.engines()[0] if engine else self.process.pid, signal.SIGKILL)
        return still_alive(self.process, 20)


def _is_engine(number: int) -> bool:
    try:
        return Path(f"/proc/{number}/comm").read_text().startswith("VLLM::Engine")
    except OSError:  # it has ended
        return False


def kill_servers(
    python: Path, model: Path, room: Path, number: int, random_: random.Random
) -> Iterator[KilledServers]:
    """Kill servers while they load, or their engines in turn, and start another after each.

    Yields:
        The kills so far, after each of them.
    """
    before = state(model)
    times, expected = _answer(python, model, room)
    by_process = {name: KilledServers(f"{model.name}, {name}") for name in ("server", "engine")}
    for index in range(number):
        process = "server" if index % 2 else "engine"
        kills, share = by_process[process], random_.uniform(0, 1)
        _kill_one(Server(python, model, room), share, times, kills, engine=process == "engine")
        when = f"after {share:.0%} of {times.up:.0f} s"
        if state(model) != before:
            kills.faults.append(f"{when} files of the model or the kernels changed")
        if (tokens := _answer(python, model, room)[1]) == expected:
            kills.right += 1
        else:
            kills.faults.append(f"{when} other tokens: {tokens!r}")
        yield kills


@dataclass(frozen=True)
class _Times:
    """Seconds from the start of a server until its engine runs, and until it answers."""

    engine: float
    up: float


def _answer(python: Path, model: Path, room: Path) -> tuple[_Times, str]:
    """Start a server; return when it was up, and its continuation of a prompt."""
    begin, server = time.monotonic(), Server(python, model, room)
    try:
        is_there = server.wait_for_engine(UP)
        engine = time.monotonic() - begin
        if not is_there or not server.wait_until_up(UP):
            raise SystemExit(f"FAILED: not up in {UP:.0f} s: {server.log.read_text()[-2000:]}")
        return _Times(engine, time.monotonic() - begin), server.complete(_PROMPT)
    finally:
        server.stop()


def _kill_one(
    server: Server, share: float, times: _Times, kills: KilledServers, *, engine: bool
) -> None:
    """Kill a server after a share of its loading; count what it leaves, and remove that.

    An engine is killed after a share of the time from its own start, so that it runs.
    """
    seconds = share * times.up
    if engine:
        if not server.wait_for_engine(UP):
            raise SystemExit(f"FAILED: no engine in {UP:.0f} s: {server.log.read_text()[-2000:]}")
        seconds = share * (times.up - times.engine)
    server.wait_until_up(seconds)
    blocks = server.shared_blocks()
    kills.killed += 1
    kills.orphans += server.kill(engine=engine)
    for block in filter(Path.exists, blocks):
        kills.shared += block.stat().st_size
        block.unlink()


def state(model: Path) -> dict[Path, str]:
    """Return the checksums of the files that a server must not change, and unfinished builds."""
    files = [path for path in [*model.rglob("*"), *_KERNELS.iterdir()] if path.is_file()]
    unfinished = dict.fromkeys(_KERNELS.glob(".building-*"), "")
    return {path: checksum(path) for path in files} | unfinished
