"""The perplexity of few bits: ours as measured by a sweep, others' on the same windows.

Bits are those of the blocks' matrices: at 16 bits and at four, places and scales included.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import originals
import torch
from tables import bits_of
from torch import Tensor, nn

from export import to_gguf
from mrp_lightning.environment import quiet_lightning
from mrp_lightning.experiments.running import RunConfiguration, configure
from mrp_lightning.experiments.runs import find_runs
from mrp_lightning.experiments.scores import scores_of
from mrp_lightning.experiments.sweep import read_sweep
from mrp_lightning.experiments.trials import Trial, parse_setting
from mrp_lightning.solver.patterns import Dense
from mrp_lightning.targets.plan import make_plan
from mrp_sparse.eight_bit_head import round_head

INT4 = "PyTorch int4"
DENSE = "dense"
GROUP = 64
"""Columns with one scale, of PyTorch's and GPTQ's weights as of ours."""
CALIBRATION = 32
"""Windows of 512 tokens for llama.cpp's importance matrix, as the sweep has for ours."""


@dataclass(frozen=True)
class Cost:
    """The cost of one way of storing a model.

    Attributes:
        weights: The storage, such as `50% 4 bits` or `llama.cpp Q4_0`.
        way: The method or recipe of ours, or the other code, that chose the weights.
        bits: Bits for each weight of the blocks.
        perplexity: The perplexity on the windows of the sweep.
    """

    weights: str
    way: str
    bits: float
    perplexity: float


class Costs:
    """The model of a sweep, and the windows on which its runs were evaluated."""

    def __init__(self, model: str, options: argparse.Namespace) -> None:
        self.model, self.options = model, options
        self.sweep = read_sweep([f"--config={options.sweep}"])

    def of_all(self, place: Path) -> Iterator[Cost]:
        """Yield our costs, then those of the others. Files are written to a temporary directory."""
        if self.options.batches is None:
            yield from self.ours()
        else:  # other windows than the sweep's
            yield Cost(DENSE, DENSE, 16, self.perplexity(self._built()))
        yield self.eight_bit_head()
        yield self.int4()
        if self.options.gptq is not None:
            yield from map(self.gptq, (4, 3))
        if self.options.llama is not None:
            yield from self.llamacpp(place)

    def ours(self) -> Iterator[Cost]:
        """Yield the costs of the runs of the sweep."""
        for run in find_runs(Path(self.sweep.out, self.model)):
            trial = run.trial
            rows = [row for row in scores_of(run) if row["score"].metric == "perplexity"]
            (found,) = [row["value"] for row in rows]
            if trial.method is None:
                yield Cost(DENSE, DENSE, 16, found)
                continue
            recipe = parse_setting(trial.setting, trial.method)
            weights = trial.setting.replace("+", " ").replace("bit", " bits")
            yield Cost(weights, trial.label, bits_of(recipe), found)

    def eight_bit_head(self) -> Cost:
        """Return the cost of a dense model with a head of 8 bits, which adds to each of ours."""
        cli = self._built()
        round_head(cli.model.model)
        return Cost(f"{DENSE}, head 8 bits", "nearest rounding", 16, self.perplexity(cli))

    def int4(self) -> Cost:
        """Return the cost of rounding each group to 16 levels, as PyTorch's int4 kernel does."""
        cli = self._built()
        for layer in self._layers(cli):
            layer.weight.data = rounded_to_int4(layer.weight.data)
        return Cost(INT4, "nearest rounding", 4 + 32 / GROUP, self.perplexity(cli))

    def gptq(self, bits: int) -> Cost:
        """GPTQ's own code, on the calibration windows of the sweep."""
        cli = self._built()
        cli.datamodule.tokenizer = cli.model.tokenizer
        windows = list(cli.datamodule.calibration_windows().split(1))
        lm: Any = cli.model.model.eval()
        code = originals.gptq(self.options.gptq, bits, GROUP)
        with torch.no_grad():
            originals.prune_model(
                code, lm, windows, make_plan(lm, Dense()), lambda _: nullcontext(), lambda *_: None
            )
        stored = bits + (16 + bits) / GROUP  # a scale, and the code of zero
        return Cost(f"GPTQ {bits} bits", "GPTQ", stored, self.perplexity(cli))

    def llamacpp(self, place: Path) -> Iterator[Cost]:
        """llama.cpp's types, read back by transformers: its rounding of activations is left out."""
        whole = self._whole_gguf(place)
        matrix = place / "imatrix.gguf"
        text = self._built().config["data.train_files"][0]
        arguments = ["-m", whole, "-f", text, "-o", matrix, "-c", 512, "--chunks", CALIBRATION]
        self._llama("llama-imatrix", *arguments)
        for kind in [*self.options.types, *(f"{kind} imatrix" for kind in self.options.imatrix)]:
            if kind == "BF16":
                continue
            name, _, guided = kind.partition(" ")
            file = place / f"{kind}.gguf"
            asked = ["--imatrix", matrix] if guided else []
            self._llama("llama-quantize", *asked, whole, file, name)
            found = self.perplexity(self._built(file))
            yield Cost(f"llama.cpp {kind}", "llama.cpp", bits_of_gguf(file), found)
            file.unlink()

    def perplexity(self, cli: RunConfiguration) -> float:
        """Return the perplexity of a model on the windows of the sweep."""
        with quiet_lightning():
            cli.trainer.test(cli.model, datamodule=cli.datamodule, verbose=False)
        (found,) = cli.model.evaluation.values()
        return float(found["perplexity"])

    def _built(self, source: Path | None = None) -> RunConfiguration:
        """Return the model as the sweep loads it, or another file of it."""
        cli = configure(Trial(self.model), self.sweep)
        cli.config["trainer.enable_progress_bar"] = False
        if self.options.batches is not None:
            cli.config["trainer.limit_test_batches"] = self.options.batches
        if source is not None:
            cli.config["model.model"], cli.config["model.gguf_file"] = str(source), None
        with quiet_lightning():
            cli.build()
        return cli

    def _layers(self, cli: RunConfiguration) -> list[nn.Linear]:
        plan = make_plan(cli.model.model, Dense())
        return [layer.module for of_block in plan.layers.values() for layer in of_block]  # type: ignore[misc]

    def _whole_gguf(self, place: Path) -> Path:
        """The model in bfloat16, with metadata and tokenizer of the file that it came from."""
        cli = self._built()
        dense = place / "dense"
        cli.model.model.bfloat16().save_pretrained(dense)
        like = cli.config["model.model"]
        to_gguf.main([str(dense), "--like", str(like), "--out", str(place / "whole.gguf")])
        return place / "whole.gguf"

    def _llama(self, program: str, *arguments: Any) -> None:
        command = [str(part) for part in (self.options.llama / program, *arguments)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-1000:]}")


def rounded_to_int4(weight: Tensor) -> Tensor:
    """Return the values that PyTorch's int4 gives: (code − 8)·scale + zero, both in bfloat16."""
    groups = weight.float().unflatten(1, (-1, GROUP))
    low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    scale = ((high - low) / 15).clamp_min(1e-6).bfloat16().float()
    zero = (low + 8 * scale).bfloat16().float()
    codes = ((groups - zero) / scale).round().clamp(-8, 7)
    return (codes * scale + zero).flatten(1).to(weight.dtype)


def bits_of_gguf(file: Path) -> float:
    """Bits for each weight of the blocks' matrices."""
    from gguf import GGUFReader

    tensors = [t for t in GGUFReader(file).tensors if t.name.startswith("blk.")]
    matrices = [t for t in tensors if sum(size > 1 for size in t.shape) == 2]
    return float(8 * sum(t.n_bytes for t in matrices) / sum(t.n_elements for t in matrices))


def costs(model: str, options: argparse.Namespace) -> Iterator[Cost]:
    """Yield the costs of all ways as they are measured."""
    with tempfile.TemporaryDirectory() as place:
        yield from Costs(model, options).of_all(Path(place))
