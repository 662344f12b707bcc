r"""The 4 and 5 bits that llama.cpp runs: its own quantiser's and ours, in the same types.

    python lab/benchmarks/engine_types.py MODEL PLACE --llama LLAMA.CPP/build/bin \
        --calibration valid.txt --evaluation test.txt --out lab/results/engine-types.md [--rescale]
    python lab/benchmarks/engine_types.py MODEL PLACE --packed --calibration … --evaluation …

METHOD. Ours is a pruning with `grid`, written by `export.to_gguf`; theirs is `llama-quantize` with
an importance matrix of the same calibration windows, and without one. Windows of 512 tokens, spread
evenly over each text. All files are read back by transformers into float32 and measured on the
same windows, so that llama.cpp's rounding of activations is left out. Bits are those of the blocks'
matrices, bytes those of the whole file. With `--rescale`, channels of the model are scaled first by
random numbers without changing what it computes, since the weights of a model that was read from a
file of four bits lie on that file's grid. What PLACE holds already is not made again.

With `--packed`, the files of `mrp-lightning export` are measured in place of these, on the same
windows: sparse ones, W4A16, and Q8_0. Their values are those of the run, in float32 again.
PyTorch's int4 is computed, not written: its file is W4A16's with groups of its size.
"""

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from few_bits import INT4, bits_of_gguf, rounded_to_int4
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from callbacks import PruningCallback
from export import to_gguf, to_sparse
from mrp_lightning import CausalLM, Trainer
from mrp_lightning.commands.distillation import distil, fast_precision
from mrp_lightning.devices import machine
from mrp_lightning.distillation.module import Distillation
from mrp_lightning.distillation.text import DistillationText
from mrp_lightning.environment import quiet_lightning
from mrp_lightning.models.loading import load_model, load_tokenizer
from mrp_lightning.models.saving import save_pretrained
from mrp_lightning.records.report import PruningReport

LENGTH = 512
OURS: dict[str, dict[str, Any]] = {
    "Q4_0": {"grid": "q4_0"},
    "Q4_0, dense target": {"grid": "q4_0", "target": "dense"},
    "IQ4_NL": {"grid": "iq4_nl"},
    "IQ4_NL, dense target": {"grid": "iq4_nl", "target": "dense"},
    "Q4_1": {"grid": "q4_1"},
    "Q4_1, dense target": {"grid": "q4_1", "target": "dense"},
    "Q5_0": {"grid": "q5_0"},
    "Q5_1": {"grid": "q5_1"},
    "Q4_0, balanced": {"grid": "q4_0", "balance": True},
    "Q4_0, balanced, dense target": {"grid": "q4_0", "balance": True, "target": "dense"},
    "IQ4_NL, balanced": {"grid": "iq4_nl", "balance": True},
    "IQ4_NL, balanced, dense target": {"grid": "iq4_nl", "balance": True, "target": "dense"},
    "Q5_0, balanced": {"grid": "q5_0", "balance": True},
    "Q4_0, dense target, tuned": {"grid": "q4_0", "target": "dense", "tuning": True},
    "IQ4_NL, dense target, tuned": {"grid": "iq4_nl", "target": "dense", "tuning": True},
}
_NARROW = {"structure": "neurons", "method": "SM", "target": "dense"}
OURS |= {
    f"{grid.upper()}, {percent} % fewer neurons, dense target": {
        **_NARROW,
        "grid": grid,
        "sparsity": percent / 100,
    }
    for percent in (10, 25)
    for grid in ("q4_0", "iq4_nl")
}
_DENSE = {"target": "dense"}
FIRST: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    f"{first.upper()} and {second.upper()}{', dense target' if target else ''}": (
        {"grid": first, "skip_indivisible": True, **target},
        {"grid": second, **target},
    )
    for first, second, target in (
        ("q3_k", "iq4_nl", _DENSE),
        ("q4_k", "iq4_nl", {}),
        ("q4_k", "iq4_nl", _DENSE),
        ("q5_k", "q5_1", {}),
        ("q5_k", "q5_1", _DENSE),
    )
}
"""Two runs, the second one on the layers that the first one leaves, as their columns are no
multiples of 256; llama.cpp's types fall back in the same way."""
HEADS = ("q4_0", "iq4_nl", "q5_0")
"""The grids on which a second run puts head and embedding of `OF_HEADS`, in place of q8_0."""
OF_HEADS = "IQ4_NL, dense target"
_HALF, _HALF_IN_4 = {"sparsity": 0.5, **_DENSE}, {"sparsity": 0.5, "bits": 4, **_DENSE}
PACKED: dict[str, tuple[str, dict[str, Any]]] = {
    "50%, dense target": ("dense", _HALF),
    "50% and 4 bits, dense target": ("dense", _HALF_IN_4),
    "50%, dense target, distilled": ("50%, dense target", {}),
    "50% and 4 bits, dense target, distilled": ("50%, dense target, distilled", _HALF_IN_4),
    "W4A16 in 64, dense target": ("dense", {"grid": "int4-g64", **_DENSE}),
}
"""Runs whose files are packed checkpoints, each of a model before it; `{}` is distilled."""
TOKENS = 500_000
"""The tokens of a distillation, half of them the dense model's own text."""
THEIRS = ("Q4_0", "Q4_0 imatrix", "IQ4_NL imatrix", "Q2_K imatrix", "Q3_K_S imatrix")
THEIRS += ("Q3_K_M imatrix", "Q4_K_M imatrix", "Q5_0 imatrix")


def rescale(model: nn.Module) -> None:
    """Scale channels of a LLaMA by random numbers that cancel: the outputs stay as they are."""
    generator = torch.Generator().manual_seed(0)

    def factors(count: int) -> Tensor:
        return torch.exp(torch.randn(count, generator=generator) * 0.3)

    for block in model.get_submodule("model.layers").children():
        attention, mlp = block.self_attn, block.mlp
        for norm, readers in (
            (block.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
            (block.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
        ):
            scale = factors(len(norm.weight))
            norm.weight.data.mul_(scale)
            for reader in readers:
                reader.weight.data.div_(scale)
        scale = factors(len(mlp.up_proj.weight))
        mlp.up_proj.weight.data.mul_(scale[:, None])
        mlp.down_proj.weight.data.div_(scale)
        width = attention.head_dim
        scale = factors(len(attention.v_proj.weight))
        attention.v_proj.weight.data.mul_(scale[:, None])
        shared = scale.view(-1, 1, width).expand(-1, attention.num_key_value_groups, -1)
        attention.o_proj.weight.data.div_(shared.reshape(-1))


def windows(file: Path, tokenizer: Any, count: int) -> Tensor:
    """Windows (count, 512), spread evenly over a text."""
    ids = tokenizer(file.read_text("utf-8"), add_special_tokens=False).input_ids
    every = torch.tensor(ids[: len(ids) // LENGTH * LENGTH]).view(-1, LENGTH)
    return every[torch.linspace(0, len(every) - 1, count).long()]


@torch.no_grad()
def perplexity(model: nn.Module, evaluation: Tensor) -> float:
    """Return the perplexity of a model on windows."""
    losses = [
        cross_entropy(model(batch).logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        for batch in evaluation.split(1)
    ]
    return math.exp(float(torch.stack(losses).mean()))


def quantise(
    dense: Path, run: Path, settings: dict[str, Any], calibration: Tensor, method: str
) -> float:
    """Prune a model with a grid, save it, and return the CPU seconds."""
    begin = time.process_time()
    callback = PruningCallback(**{"method": method, **settings}, save_dir=run)
    loader = torch.utils.data.DataLoader(calibration, batch_size=4)  # type: ignore[arg-type]
    with quiet_lightning():
        trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
        trainer.predict(CausalLM(str(dense)), loader, callbacks=[callback])
    return time.process_time() - begin


def make(dense: Path, run: Path, settings: Any, calibration: Tensor, method: str) -> float:
    """Prune a model by one or two runs, and return the CPU seconds."""
    if isinstance(settings, dict):
        return quantise(dense, run, settings, calibration, method)
    first, second = settings
    between = run.with_name(f"{run.name}-first")
    seconds = quantise(dense, between, first, calibration, method)
    rows = PruningReport.load(between / "pruning_report.json").layers
    rest = {"targets": [row.name for row in rows if row.skipped]}
    return seconds + quantise(between, run, {**second, **rest}, calibration, method)


def llama(options: argparse.Namespace, program: str, *arguments: Any) -> None:
    """Run a program of llama.cpp."""
    command = [str(part) for part in (options.llama / program, *arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-1000:]}")


def directory(options: argparse.Namespace, name: str) -> Path:
    """Return the directory of a run."""
    place: Path = options.place
    return place / name.replace(", ", "-").replace(" % ", "-").replace(" ", "-")


def ours(
    options: argparse.Namespace,
    name: str,
    source: Path,
    settings: Any,
    calibration: Tensor,
    of_file: Sequence[str] = (),
) -> tuple[str, str, Path, float]:
    """Prune a model and write its GGUF file, unless both are there; return its row of `files`."""
    run = directory(options, name)
    file, spent = (run.with_suffix(kind) for kind in (".gguf", ".json"))
    if not file.exists():
        if not run.exists():
            seconds = make(source, run, settings, calibration, options.method)
            spent.write_text(json.dumps(seconds))
        to_gguf.main([str(run), "--out", str(file), *of_file])
    return "ours", name, file, json.loads(spent.read_text())


class Comparison:
    """A table of quantised models, calibrated and measured on the same windows as a dense one.

    Args:
        parser: A parser of further options.
        change: Changes the dense model before anything else is done.

    Attributes:
        options: The options.
        dense: The directory of the dense model, in bfloat16.
        whole: That model in float32.
        calibration: Windows (count, 512) to calibrate on.
        evaluation: Windows (count, 512) to measure on.
        best: The perplexity of the dense model.
    """

    def __init__(
        self, parser: argparse.ArgumentParser, change: Callable[[Any, nn.Module], None]
    ) -> None:
        parser.add_argument("model", help="a Hugging Face directory or a GGUF file of a LLaMA")
        parser.add_argument("place", type=Path, metavar="DIR", help="directory for the results")
        parser.add_argument("--calibration", type=Path, required=True)
        parser.add_argument("--evaluation", type=Path, required=True)
        parser.add_argument("--windows", type=int, default=32, help="of the calibration text")
        parser.add_argument("--eval-windows", type=int, default=40)
        parser.add_argument("--out", type=Path)
        self.options = options = parser.parse_args()
        torch.set_num_threads(1)
        options.place.mkdir(parents=True, exist_ok=True)
        self.dense = options.place / "dense"
        if not self.dense.exists():
            model = load_model(options.model, torch.float32)
            change(options, model)
            tokenizer = load_tokenizer(options.model)
            save_pretrained(model.bfloat16(), self.dense, tokenizer=tokenizer)
        self.tokenizer = AutoTokenizer.from_pretrained(self.dense)
        self.calibration = windows(options.calibration, self.tokenizer, options.windows)
        self.evaluation = windows(options.evaluation, self.tokenizer, options.eval_windows)
        self.whole = AutoModelForCausalLM.from_pretrained(self.dense, dtype=torch.float32)
        self.best = perplexity(self.whole, self.evaluation)
        self._rows: list[str] = []

    def add(self, *cells: str) -> None:
        """Add a row, and print it at once."""
        self._rows.append(f"| {' | '.join(cells)} |")
        print(self._rows[-1], file=sys.stderr, flush=True)

    def write(self, *header: str) -> None:
        """Print the table, and write it; `header` has the names and the alignment of columns."""
        lines = [
            f"`python {' '.join(sys.argv)}`",
            "",
            f"{machine(torch.device('cpu'))}, one thread. Calibrated on {self.options.windows} "
            f"windows of {LENGTH} tokens, measured on {self.options.eval_windows}, spread evenly "
            "over each text.",
            "",
            *header,
            *self._rows,
        ]
        text = "\n".join(lines) + "\n"
        print(text)
        if self.options.out:
            self.options.out.parent.mkdir(parents=True, exist_ok=True)
            self.options.out.write_text(text, "utf-8")


def files(comparison: Comparison) -> Iterator[tuple[str, str, Path, float]]:
    """Yield who made a file, of which type, the file, and the CPU seconds that it took."""
    options, dense, calibration = comparison.options, comparison.dense, comparison.calibration
    for name, settings in (OURS | FIRST).items():
        yield ours(options, name, dense, settings, calibration, ["--embedding-type", "q8_0"])
    for grid in HEADS:
        name, settings = f"{OF_HEADS}, head {grid.upper()}", {"head_grid": grid}
        yield ours(options, name, directory(options, OF_HEADS), settings, calibration)
    whole, matrix = options.place / "whole.gguf", options.place / "imatrix.gguf"
    if not matrix.exists():
        to_gguf.main([str(dense), "--out", str(whole), "--type", "bf16", "--overwrite"])
        text = options.place / "calibration.txt"
        text.write_text("".join(comparison.tokenizer.batch_decode(calibration)), "utf-8")
        chunks = ["-c", LENGTH, "--chunks", len(calibration), "-t", 1]
        llama(options, "llama-imatrix", "-m", whole, "-f", text, "-o", matrix, *chunks)
    for name in THEIRS:
        file = options.place / f"llama-{name.replace(' ', '-')}.gguf"
        if not file.exists():
            kind, _, guided = name.partition(" ")
            given = ["--imatrix", matrix] if guided else []
            vocabulary = ["--token-embedding-type", "q8_0"]
            llama(options, "llama-quantize", *given, *vocabulary, whole, file, kind, 1)
        yield "llama.cpp", name, file, math.nan


def packed(comparison: Comparison) -> None:
    """Add a row for each packed checkpoint, PyTorch's int4 and Q8_0."""
    options, dense = comparison.options, comparison.dense

    def add(maker: str, name: str, size: float, model: nn.Module, spent: str = "") -> None:
        value = perplexity(model, comparison.evaluation)
        over = f"{value / comparison.best - 1:+.1%}"
        comparison.add(maker, name, f"{size / 2**20:.1f}", f"{value:.3f}", over, spent)

    def weights(place: Path) -> int:
        return sum(file.stat().st_size for file in place.glob("*.safetensors"))

    size = f"{weights(dense) / 2**20:.1f}"
    comparison.add("dense", "bfloat16", size, f"{comparison.best:.3f}", "", "")
    for name, (source, settings) in PACKED.items():
        run, start = (directory(options, x.replace("%", "")) for x in (name, source))
        out = run.with_name(f"{run.name}-packed")
        spent = run.with_suffix(".json")
        if not run.exists():
            begin = time.process_time()
            if settings:
                quantise(start, run, settings, comparison.calibration, options.method)
            else:
                distil(
                    Distillation(start, dense, dtype="float32", teacher_dtype="float32"),
                    DistillationText(options.calibration, tokens=TOKENS, batch_size=2),
                    run,
                    dtype="bfloat16",
                    unfinished=run.with_suffix(".partial"),
                    precision=fast_precision("auto"),
                )
            spent.write_text(json.dumps(time.process_time() - begin))
        if not out.exists():
            to_sparse.main([str(run), "--out", str(out)])
        model = AutoModelForCausalLM.from_pretrained(run, dtype=torch.float32)
        add("ours", name, weights(out), model, f"{json.loads(spent.read_text()):.0f}")
    model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    for layer in model.model.layers.modules():
        if isinstance(layer, nn.Linear):
            layer.weight.data = rounded_to_int4(layer.weight.data)
    add(INT4, "nearest, groups of 64", weights(out), model)
    file = options.place / "q8_0.gguf"
    to_gguf.main([str(dense), "--out", str(file), "--type", "q8_0", "--overwrite"])
    model = AutoModelForCausalLM.from_pretrained(
        options.place, gguf_file=file.name, dtype=torch.float32
    )
    add("llama.cpp", "Q8_0", file.stat().st_size, model)


def main() -> None:
    """Print the table, and write it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    files_of = parser.add_mutually_exclusive_group(required=True)
    files_of.add_argument("--llama", type=Path, help="where its binaries lie")
    files_of.add_argument("--packed", action="store_true", help="measure packed checkpoints")
    parser.add_argument("--method", default="JM", help="matters with sparsity alone")
    parser.add_argument("--rescale", action="store_true")
    comparison = Comparison(
        parser, lambda options, model: rescale(model) if options.rescale else None
    )
    options, best = comparison.options, comparison.best
    if options.packed:
        packed(comparison)
        comparison.write(
            "| by | type | file, MiB | perplexity | over dense | CPU seconds |",
            "| --- | --- | ---: | ---: | ---: | ---: |",
        )
        return
    comparison.add("dense", "bfloat16", "16", "", f"{best:.3f}", "", "")
    known = options.place / "perplexities.json"
    measured = json.loads(known.read_text()) if known.exists() else {}
    for maker, name, file, seconds in files(comparison):
        if file.name not in measured:
            model = AutoModelForCausalLM.from_pretrained(
                options.place, gguf_file=file.name, dtype=torch.float32
            )
            measured[file.name] = perplexity(model, comparison.evaluation)
            known.write_text(json.dumps(measured))
        value, size = measured[file.name], file.stat().st_size / 2**20
        spent = "" if math.isnan(seconds) else f"{seconds:.0f}"
        sizes = f"{bits_of_gguf(file):.2f}", f"{size:.1f}"
        comparison.add(maker, name, *sizes, f"{value:.3f}", f"{value / best - 1:+.1%}", spent)
    comparison.write(
        "| by | type | bits of the blocks | file, MiB | perplexity | over dense | CPU seconds |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    )


if __name__ == "__main__":
    main()
