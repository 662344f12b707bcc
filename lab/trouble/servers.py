"""Servers that are killed while they load: nothing stays behind, and the next one is right."""

import json
import os
import random
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trouble.kills import processes_of, still_alive
from trouble.runs import checksum

UP = 600.0
"""Seconds in which a server has to be up; on a quiet machine it takes thirty."""

_SHARED = Path("/dev/shm")
_KERNELS = Path(__file__).parents[2] / "mrp_sparse" / "kernels"
_PROMPT = "def first(items):\n    return"


@dataclass
class KilledServers:
    """The kills of servers.

    Attributes:
        name: The process that was killed.
        right: How many were followed by a server with the same tokens.
        faults: What must not happen, each as a line.
    """

    name: str
    right: int = 0
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
        limit = time.monotonic() + seconds
        while time.monotonic() < limit:
            if self.process.poll() is not None:
                raise SystemExit(f"FAILED: the server ended: {self.log.read_text()[-2000:]}")
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                    return True
            except OSError:
                time.sleep(0.1)
        return False

    def complete(self, prompt: str | Sequence[int]) -> str:
        """Return the greedy continuation of a text or of tokens by 16 tokens, as text."""
        body = {"prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            return str(json.load(response)["choices"][0]["text"])

    def stop(self) -> int:
        """Ask the server to stop, as Ctrl-C does; return its exit status."""
        self.process.send_signal(signal.SIGINT)
        still_alive(self.process)  # kills it if it does not
        return self.process.wait()

    def engines(self) -> list[int]:
        """Return the processes that load the model; none at first."""
        return [number for number in processes_of(self.process.pid) if _is_engine(number)]

    def kill(self, *, engine: bool) -> int:
        """Kill the server, or its engine if that runs; return how many processes lived on."""
        engines = self.engines() if engine else []
        os.kill(engines[0] if engines else self.process.pid, signal.SIGKILL)
        return still_alive(self.process)


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
    before = state(model) | _shared()
    begin = time.monotonic()
    first = Server(python, model, room)
    if not first.wait_until_up(UP):
        first.kill(engine=False)
        raise SystemExit(f"FAILED: no server in {UP:.0f} s: {first.log.read_text()[-2000:]}")
    whole, expected = time.monotonic() - begin, first.complete(_PROMPT)
    first.stop()
    by_engine = {name: KilledServers(name) for name in ("server", "engine")}
    for index in range(number):
        engine = bool(index % 2)
        kills = by_engine["engine" if engine else "server"]
        server, seconds = Server(python, model, room), random_.uniform(0, whole)
        server.wait_until_up(seconds)
        when = f"after {seconds:.1f} of {whole:.1f} s"
        if alive := server.kill(engine=engine):
            kills.faults.append(f"{when} {alive} processes lived on")
        after = state(model) | _shared()
        if changed := sorted(str(p) for p in after if after[p] != before.get(p)):
            kills.faults.append(f"{when} left behind or changed: {', '.join(changed)}")
        again = Server(python, model, room)
        if not again.wait_until_up(UP):
            kills.faults.append(f"{when} the next server was not up in {UP:.0f} s")
            again.kill(engine=False)
        else:
            if (tokens := again.complete(_PROMPT)) == expected:
                kills.right += 1
            else:
                kills.faults.append(f"{when} other tokens: {tokens!r}")
            again.stop()
        yield kills


def state(model: Path) -> dict[Path, str]:
    """Return the checksums of the files that a server must not change, and unfinished builds."""
    files = [path for path in [*model.rglob("*"), *_KERNELS.iterdir()] if path.is_file()]
    unfinished = dict.fromkeys(_KERNELS.glob(".building-*"), "")
    return {path: checksum(path) for path in files} | unfinished


def _shared() -> dict[Path, str]:
    """Return the blocks of shared memory on this machine, also those of others."""
    return dict.fromkeys(_SHARED.iterdir(), "")
