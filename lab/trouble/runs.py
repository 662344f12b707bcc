"""Commands on the smallest model, each with the directory that it begins in and its result."""

import hashlib
import math
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from mrp_lightning.embedded import STDLIB_LLAMA
from mrp_lightning.storage.files import not_ours

LIMIT = 300.0
"""Seconds after which a command hangs; on a quiet machine each takes one or two."""

_LONGEST_GAP = 1.0
_LEFT_ON_PURPOSE = re.compile(r"\.[^/]+\.[^/]+\.old")
"""An older result that a killed process moved aside."""


@dataclass(frozen=True)
class Command:
    """A command of the command line, and what may be in its directory.

    Attributes:
        name: Its name in tables.
        words: Its arguments.
        root: The directory in which alone it writes.
        result: The file or directory that it makes in `root`.
        start: A directory with what is in `root` at first; `None` if that is empty.
    """

    name: str
    words: Sequence[str]
    root: Path
    result: str
    start: Path | None = None

    def prepare(self) -> None:
        """Bring `root` to what it is at first."""
        shutil.rmtree(self.root, ignore_errors=True)
        if self.start is None:
            self.root.mkdir(parents=True)
        else:
            shutil.copytree(self.start, self.root)

    def state(self) -> "State":
        """Return what is in `root` now."""
        return State.of(self.root / self.result)

    def is_aside(self, earlier: "State") -> bool:
        """Return whether the earlier result lies whole beside its name, as in mid-replacement."""
        aside = self.root.glob(f".{self.result}.*.old/{self.result}")
        return self.state() == State() and any(State.of(old) == earlier for old in aside)

    def leftovers(self) -> list[str]:
        """Return the names of what a finished run must not leave."""
        names = {path.name for path in self.root.iterdir()} - {self.result}
        if self.start is not None:
            names -= {path.name for path in self.start.iterdir()}
        return sorted(name for name in names if not _LEFT_ON_PURPOSE.fullmatch(name))


@dataclass(frozen=True)
class State:
    """A result on the disk.

    Attributes:
        weights: The checksum of each file of weights, by its path; empty if there is no result.
        problem: Why it is not whole; "" if it is.
    """

    weights: dict[str, str] = field(default_factory=dict)
    problem: str = ""

    @classmethod
    def of(cls, path: Path) -> "State":
        """Read a result: a file, a directory of a pruning or an export, or that of a sweep."""
        if not os.path.lexists(path):
            return cls()
        if path.is_file():
            return cls({"": checksum(path)})
        runs = sorted(file.parent for file in path.rglob("run.json"))  # of a sweep
        if not runs and any(file.name == "model.safetensors" for file in path.iterdir()):
            runs = [path]
        weights = {}
        for run in runs:
            for file in sorted(run.glob("*.safetensors")):
                weights[file.relative_to(path).as_posix()] = checksum(file)
            if others := not_ours(run):
                return cls(weights, f"{run.name} differs from its manifest in {others}")
        return cls(weights)


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


@dataclass(frozen=True)
class End:
    """The end of a command.

    Attributes:
        status: Its exit status, or minus the number of the signal that killed it.
        output: All that it wrote to the terminal.
        cpu_seconds: The processor time that it used.
    """

    status: int
    output: str
    cpu_seconds: float

    @property
    def problem(self) -> str:
        """Why no user should see this end; "" for success and for a refusal in words."""
        if "Traceback (most recent call last)" in self.output:
            return "a traceback"
        if self.status < 0:
            return f"killed by {signal.Signals(-self.status).name}"
        if self.status and "error: " not in self.output:
            return f"status {self.status} without a message"
        return ""

    @property
    def message(self) -> str:
        """The message of a refusal, in one line."""
        _, _, message = f"\n{self.output}".partition("\nerror: ")
        return " ".join(message.split())


def start(command: Command, output: Path, ready: tuple[int, int] | None = None) -> int:
    """Run a command in a forked process, in which nothing needs to be imported; its process id.

    Args:
        command: The command.
        output: The file that gets all that it writes to the terminal.
        ready: A pipe; the process waits until something can be read from it.
    """
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    status = 70
    try:
        if ready is not None:
            os.read(ready[0], 1)
        with output.open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        torch.set_num_threads(1)  # the threads of the parent are not here
        status = _status_of(command.words)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _status_of(words: Sequence[str]) -> int:
    import traceback

    from mrp_lightning.commands.main import main

    try:
        main(list(words))
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def finish(
    child: int, output: Path, cpu_seconds: float | None = None, *, longest: float = LIMIT
) -> End:
    """Wait until a process ends, or kill it when it has used some seconds of processor time.

    After `longest` seconds it hangs: it is killed, and its output ends in a note that says so.

    Other work on the machine hardly changes the processor time at which a command does a thing;
    by the clock, a moment drawn from a slow run comes after the end of a faster one.
    """
    limit = math.inf if cpu_seconds is None else cpu_seconds
    note, waited, last = "", 0.0, time.monotonic()
    while True:
        ended, code, used = os.wait4(child, os.WNOHANG)
        if not ended and (_cpu_seconds(child) > limit or waited > longest):
            if waited > longest:
                note = "\nTraceback (most recent call last): it hangs"
            os.kill(child, signal.SIGKILL)
            ended, code, used = os.wait4(child, 0)
        if ended:
            text = output.read_text("utf-8", errors="replace") if output.exists() else ""
            status = os.waitstatus_to_exitcode(code)
            return End(status, text + note, used.ru_utime + used.ru_stime)
        time.sleep(0.005)
        # A machine that is suspended, or that stops this process and its child together, ages
        # neither: a long gap between two looks counts as a short one.
        now = time.monotonic()
        waited, last = waited + min(now - last, _LONGEST_GAP), now


def _cpu_seconds(process: int) -> float:
    """Return the processor time that a process has used so far, with all of its threads."""
    clock = (~process << 3) | 2  # Linux's MAKE_PROCESS_CPUCLOCK(process, CPUCLOCK_SCHED)
    return time.clock_gettime(clock)


def run(command: Command, *, longest: float = LIMIT) -> End:
    """Run a command to its end; `longest` is that of `finish`."""
    output = command.root.with_name("output.txt")
    return finish(start(command, output), output, longest=longest)


def import_all() -> None:
    """Import all that the commands need, so that forked processes have it."""
    import gc

    import lightning.pytorch  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401

    import export.gguf.file
    import export.packing
    import export.to_gguf
    import export.to_sparse  # noqa: F401
    import mrp_lightning.commands.comparison
    import mrp_lightning.commands.lightning_cli
    import mrp_lightning.experiments.running  # noqa: F401

    gc.freeze()  # or else each child copies all pages to count references


def write_inputs(directory: Path) -> None:
    """Write a random LLaMA of three blocks with the embedded tokenizer, a text and a sweep."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama",
        **{"vocab_size": 2048, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
        **{"initializer_range": 0.2, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0},
        **{"tie_word_embeddings": True, "dtype": "bfloat16"},
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(STDLIB_LLAMA / name, directory / "model")
    source = Path(shutil.__file__).read_text("utf-8")
    (directory / "text.txt").write_text(source)
    (directory / "base.yaml").write_text(
        f"model: {{model: {directory / 'model'}}}\n"
        f"data: {{train_files: [{directory / 'text.txt'}], eval_files: [{directory / 'text.txt'}],"
        " num_samples: 4, sequence_length: 32, batch_size: 2}\n"
        "trainer:\n  accelerator: cpu\n  logger: false\n  limit_test_batches: 2\n"
        "  callbacks:\n  - class_path: callbacks.MRPCallback\n    init_args: {pattern: '2:4'}\n"
    )
    (directory / "sweep.yaml").write_text(
        f"base: [{directory / 'base.yaml'}]\nmodels: {{tiny: {{options: {{}}}}}}\n"
        f"runs: {{'2:4': [SM, magnitude]}}\nout: {directory / 'root' / 'sweep'}\n"
        "save_checkpoints: true\n"
    )


def predict(inputs: Path, **settings: str) -> list[str]:
    """Return the arguments of a pruning of the smallest model to 2:4, with other settings."""
    settings = {"pattern": "2:4", "save_dir": str(inputs / "root" / "out"), **settings}
    text = [f"--data.train_files={inputs / 'text.txt'}"]
    if settings.pop("text", "") == "own":
        text = ["--data.calibration=self"]
    if any(name in settings for name in ("sparsity", "structure")):
        del settings["pattern"]
    callback = "--trainer.callbacks"
    return [
        *("predict", f"--model.model={inputs / 'model'}", *text, "--data.num_samples=4"),
        *("--data.sequence_length=32", "--trainer.accelerator=cpu", "--trainer.logger=false"),
        f"{callback}=callbacks.MRPCallback",
        *(f"{callback}.{name}={value}" for name, value in settings.items()),
    ]


def commands(inputs: Path) -> dict[str, Command]:
    """Return the commands whose files are recorded, and make what they begin with.

    A result of another setting is there where one is replaced, so that the two can be told apart.
    """
    root = inputs / "root"
    pruned, older = inputs / "pruned", inputs / "older"
    for directory, settings in ((pruned, {}), (older, {"sparsity": "0.6"})):
        _make(Command("", predict(inputs, **settings), root, "out"), directory)
    exported = ["export", str(pruned / "out"), "--out", str(root / "out"), "--device", "cpu"]
    written = ["gguf", str(pruned / "out"), "--out", str(root / "out.gguf")]
    earlier = inputs / "earlier"
    _make(Command("", ["gguf", str(older / "out"), "--out", written[-1]], root, ""), earlier)
    again = "--overwrite"
    surveyed = {"sparsity": "0.5", "allocation": "output", "grid": "q4_0", "balance": "true"}
    sweep = ["sweep", "--config", str(inputs / "sweep.yaml")]
    listed = [
        Command("first save", predict(inputs), root, "out"),
        Command("overwrite", predict(inputs, overwrite="true"), root, "out", older),
        # Its journal also holds the survey of the dense model, and the grid of each block.
        Command("allocation, balance, grid", predict(inputs, **surveyed), root, "out"),
        Command("export", exported, root, "out"),
        Command("export --overwrite", [*exported, again], root, "out", older),
        Command("gguf", written, root, "out.gguf"),
        Command("gguf --overwrite", [*written, again], root, "out.gguf", earlier),
        Command("sweep", sweep, root, "sweep"),
    ]
    return {command.name: command for command in listed}


def _make(command: Command, directory: Path) -> None:
    command.prepare()
    end = run(command)
    if end.status:
        raise SystemExit(f"FAILED: {' '.join(command.words)}: {end.output}")
    shutil.copytree(command.root, directory)
