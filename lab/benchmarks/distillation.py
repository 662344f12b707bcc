r"""The loss that distillation wins back, at home and abroad, by the tokens it is trained on.

    python lab/benchmarks/distillation.py RUN MODEL --calibration C.txt --evaluation E.txt \
        --tokens 200000 [--own 0.5] [--learning-rate RATE] [--batch-size 2] [--points 4] \
        [--precision bf16-mixed] [--moment-bits 8] [--name JM] [--table TABLE.csv]

METHOD. RUN is a directory that `mrp-lightning prune MODEL` wrote. It is distilled against MODEL as
by `mrp-lightning distill`, on text of which the share OWN is MODEL's own and the rest is C.txt's.
Perplexity by the evidence's protocol: the first 40 windows of 512 tokens of E.txt (home), and of
the source code of Python's standard library (abroad). Each point of the curve is a row, with the
CPU seconds of training until there, without evaluations. An interrupted run goes on from
its last checkpoint. With `--points 0` nothing but the divergence of held-out text is measured.
"""

import argparse
import csv
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback

from mrp_lightning import CausalLM, TextDataModule, Trainer
from mrp_lightning.commands.distillation import distil
from mrp_lightning.distillation.module import Distillation
from mrp_lightning.distillation.text import DistillationText

COLUMNS = ("model", "name", "own", "rate", "batch", "of", "tokens", "home", "abroad", "cpu_seconds")


class Curve(Callback):
    """Measures the student at some steps, and keeps the CPU time of training in checkpoints.

    Args:
        every: The steps between two points.
        record: Takes the tokens, both perplexities and the CPU seconds of a point.
        data: The texts to evaluate on.
    """

    def __init__(self, every: int, record: Any, data: TextDataModule) -> None:
        self._every, self._record, self._data = every, record, data
        self._seconds, self._since = 0.0, time.process_time()

    def _pause(self) -> None:
        self._seconds += time.process_time() - self._since

    def _go_on(self) -> None:
        self._since = time.process_time()

    def on_train_start(self, *_: Any) -> None:
        """Start the clock."""
        self._go_on()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Measure a point."""
        step = trainer.global_step
        if step % self._every == 0 or step == trainer.max_steps:
            self._pause()
            self._point(pl_module, step * trainer.datamodule.batch_size * 512)
            self._go_on()

    def on_validation_start(self, *_: Any) -> None:
        """Stop the clock."""
        self._pause()

    def on_validation_end(self, *_: Any) -> None:
        """Start the clock."""
        self._go_on()

    def _point(self, module: Distillation, tokens: int) -> None:
        is_training = module.model.training
        home, abroad = perplexities(module.model, self._data)
        module.model.train(is_training)
        self._record(tokens, home, abroad, self._seconds)

    def state_dict(self) -> dict[str, float]:
        """Return the CPU seconds so far."""
        return {"seconds": self._seconds + time.process_time() - self._since}

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        """Restore the CPU seconds."""
        self._seconds = state_dict["seconds"]


def perplexities(model: Any, data: TextDataModule) -> list[float]:
    """Return the perplexities of a model at home and abroad."""
    module = CausalLM(model, tokenizer=data.tokenizer)
    trainer = Trainer(
        accelerator="cpu",
        limit_test_batches=10,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.test(module, datamodule=data, verbose=False)
    return [float(module.evaluation[text]["perplexity"] or 0) for text in ("home", "abroad")]


def main() -> None:
    """Distil, and add the points to the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("model")
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--evaluation", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=200_000)
    parser.add_argument("--own", type=float, default=0.5)
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--moment-bits", type=int, default=32, choices=(32, 8))
    parser.add_argument("--points", type=int, default=4)
    parser.add_argument("--name", required=True, help="names the start in the table")
    parser.add_argument("--table", type=Path, default=Path("lab/results/distillation.csv"))
    parser.add_argument(
        "--precision", default="32-true", choices=("32-true", "bf16-mixed"),
        help="that of the products; with bf16-mixed the dense model is in bfloat16",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    module = Distillation(
        options.run, options.model, dtype="float32", learning_rate=options.learning_rate,
        teacher_dtype="float32" if options.precision == "32-true" else "bfloat16",
        moment_bits=options.moment_bits,
    )  # fmt: skip
    shares = {"self": options.own, "train_files": 1 - options.own}
    data = DistillationText(
        options.calibration,
        calibration={name: share for name, share in shares.items() if share},
        tokens=options.tokens,
        batch_size=options.batch_size,
    )
    texts = TextDataModule(
        evaluation={"home": str(options.evaluation), "abroad": "stdlib"},
        sequence_length=512,
        batch_size=4,
        tokenizer=module.tokenizer,
    )
    name = Path(options.model).stem

    def record(tokens: int, home: float, abroad: float, seconds: float) -> None:
        is_new = not options.table.exists()
        with options.table.open("a") as file:
            writer = csv.writer(file, lineterminator="\n")
            if is_new:
                writer.writerow(COLUMNS)
            row = name, options.name, options.own, module.learning_rate, options.batch_size
            values = f"{home:.3f}", f"{abroad:.3f}", f"{seconds:.0f}"
            writer.writerow([*row, options.tokens, tokens, *values])
        print(tokens, *values, flush=True, file=sys.stderr)

    partial = options.out.with_name(f".{options.out.name}.partial")
    curve = []
    if options.points:
        curve = [Curve(-(-data.steps // options.points), record, texts)]
        if not partial.exists():
            record(0, *perplexities(module.model, texts), 0)
    result = distil(
        module,
        data,
        options.out,
        unfinished=partial,
        precision=options.precision,
        callbacks=curve,
        validations=max(1, options.points),
    )
    shutil.rmtree(partial)
    print(result)


if __name__ == "__main__":
    main()
