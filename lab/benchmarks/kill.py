"""Kill runs of the command line at random moments, start them again, and compare what they write.

    python lab/benchmarks/kill.py --kills 20

A run is killed (SIGKILL) at a random moment of the time that a whole one takes, started again with
the same command, killed again, and so on until it comes through; then the next one begins. After
each kill the model must be as it was, and the result not there or whole. Each result must have the
bits of a run that was never killed.
"""

import argparse
import hashlib
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from mrp_lightning.embedded import STDLIB_LLAMA
from mrp_lightning.journal.journal import journal_path
from mrp_sparse.environment import machine


def main() -> None:
    """Run the benchmark, and print its table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    moments = random.Random(options.seed)
    model = _digests(STDLIB_LLAMA)
    with tempfile.TemporaryDirectory() as directory:
        reference = Path(directory, "reference")
        begin = time.monotonic()
        _check(_start(reference).wait() == 0, "the run without a kill failed")
        whole = time.monotonic() - begin
        expected = _weights(reference)
        rows, runs = [], 0
        while len(rows) < options.kills:
            runs += 1
            out = Path(directory, f"run{runs}")
            while True:
                survived = _kill(_start(out), moments.uniform(0, whole))
                if survived or len(rows) == options.kills:
                    break
                _check(_digests(STDLIB_LLAMA) == model, "the model was changed")
                rows.append(_state(out, expected))
                print(f"killed: {rows[-1]}", file=sys.stderr, flush=True)
                if rows[-1] == "result there":
                    break
            if not out.exists():
                _check(_start(out).wait() == 0, "the run did not come through")
            _check(_weights(out) == expected, "the result has other bits")
    print(f"{_where()}; {options.kills} kills of {runs} runs of the embedded model.\n")
    print("| when it was killed | kills | started again |\n| --- | --- | --- |")
    for state, count in sorted(Counter(rows).items()):
        end = "nothing to do" if state == "result there" else "same bits"
        print(f"| {state} | {count} | {end} |")


def _start(out: Path) -> subprocess.Popen:
    callback = "--trainer.callbacks"
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "mrp_lightning", "predict", f"--model.model={STDLIB_LLAMA}"),
            *("--data.num_samples=8", "--data.sequence_length=128", "--trainer.accelerator=cpu"),
            *(f"{callback}=callbacks.MRPCallback", f"{callback}.pattern=2:4"),
            *(f"{callback}.save_dir={out}", "--trainer.logger=false"),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def _kill(process: subprocess.Popen, seconds: float) -> bool:
    """Kill a process after some seconds; return whether it had finished by then."""
    try:
        status = process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        status = process.wait()
    _check(status in (0, -signal.SIGKILL), f"a run ended with the status {status}")
    return status == 0


def _state(out: Path, expected: dict[str, str]) -> str:
    """Describe the progress of a run by the files that it left."""
    if out.exists():
        _check(_weights(out) == expected, "half a result stands under its final name")
        return "result there"
    if any(out.parent.glob(f".{out.name}.*.staging")):
        return "while the result was written"
    manifest = journal_path(out) / "manifest.json"
    if not manifest.exists():
        return "before any block: no journal yet"
    blocks = len(json.loads(manifest.read_text())["shards"])
    return f"{blocks} {'block' if blocks == 1 else 'blocks'} in the journal"


def _weights(directory: Path) -> dict[str, str]:
    return {name: sha for name, sha in _digests(directory).items() if name.endswith("tensors")}


def _digests(directory: Path) -> dict[str, str]:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _check(holds: bool, problem: str) -> None:
    if not holds:
        raise SystemExit(f"FAILED: {problem}")


def _where() -> str:
    import torch

    return machine(torch.device("cpu"))


if __name__ == "__main__":
    main()
