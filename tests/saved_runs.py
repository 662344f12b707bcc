"""Runs on disk, written by the code that writes them after real pruning."""

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mrp_lightning.records.evaluation import record
from mrp_lightning.records.report import PruningReport
from mrp_lightning.records.rows import LayerReport

KINDS = {"self_attn.q_proj": (16, 16), "mlp.up_proj": (32, 16), "mlp.down_proj": (16, 32)}
CONFIG = {
    "method": "SM",
    "sparsity": None,
    "pattern": "2:4",
    "block_size": 128,
    "damping": 0.01,
    "tolerance": 1e-6,
    "targets": None,
    "batches": 8,
}


def layer(
    name: str, shape: tuple[int, int] = (16, 16), rng: random.Random | None = None, **changes: Any
) -> LayerReport:
    """A pruned layer, in the block of the first number in its name."""
    rng = rng or random.Random(name)
    loss = rng.uniform(0.01, 0.2)
    values: dict[str, Any] = {
        "method": "SM",
        "sparsity": 0.5,
        "loss": 30 * loss,
        "relative_loss": loss,
        "damping": rng.uniform(0.001, 0.1),
        "iterations": rng.randrange(5, 60),
        "gap": rng.uniform(1e-8, 9e-7),
        "seconds": rng.uniform(0.01, 3),
        "tokens": 4096,
        "dead_inputs": 0,
        "block": (found := re.match(r"(.*?\.\d+)\.", name)) and found[1],
    }
    return LayerReport(name=name, shape=shape, **{**values, **changes})


@pytest.fixture
def tmp_path(tmp_path: Path) -> Path:
    """With nothing beside it: dense runs are looked for there."""
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


@pytest.fixture(name="layer", scope="session")
def layer_fixture() -> Callable[..., LayerReport]:
    return layer


@pytest.fixture(scope="session")
def save_run() -> Callable[..., PruningReport]:
    """Write a `pruning_report.json` of a model with `blocks` blocks of three layers."""

    def save(
        directory: Path,
        *,
        blocks: int = 3,
        seed: int = 0,
        prefix: str = "model.layers",
        complete: bool = True,
        layers: list[LayerReport] | None = None,
        changes: dict[str, Any] | None = None,
        **config: Any,
    ) -> PruningReport:
        rng = random.Random(f"{seed} {sorted(map(str, config.items()))}")
        report = PruningReport({**CONFIG, **config}, seconds=rng.uniform(5, 50), complete=complete)
        report.layers += layers or [
            layer(f"{prefix}.{b}.{kind}", shape, rng, **(changes or {}))
            for b in range(blocks)
            for kind, shape in KINDS.items()
        ]
        directory.mkdir(parents=True, exist_ok=True)
        report.save(directory)
        return report

    return save


@pytest.fixture(scope="session")
def save_perplexity() -> Callable[..., None]:
    """Write an `evaluation.json`."""

    def save(directory: Path, model: str | None = None, **perplexities: float | None) -> None:
        found = {
            text: {
                "perplexity": value,
                "loss": 1.0,
                "context": 2048,
                "windows": 166,
                "tokens": 339802,
            }
            for text, value in perplexities.items()
        }
        record(directory, perplexity=found, model=model)

    return save


@pytest.fixture(scope="session")
def save_sweep(save_run, save_perplexity) -> Callable[[Path], Path]:
    """Three methods at two sparsities over two seeds, and the dense model."""

    def save(root: Path) -> Path:
        save_perplexity(root / "tiny" / "dense", "someone/tiny", wikitext2=10.5, ptb=20.25)
        number = 0
        for name, amount in {"2of4": {}, "70": {"pattern": None, "sparsity": 0.7}}.items():
            for method in ("magnitude", "SS", "SM"):
                for seed in range(2):
                    number += 1
                    directory = root / "tiny" / f"{name}-{method}-s128-seed{seed}"
                    source = {"base_model": "someone/tiny"}
                    save_run(directory, method=method, seed=seed, **source, **amount)
                    save_perplexity(directory, wikitext2=11 + 0.1234 * number, ptb=30 + number)
        return root

    return save


@pytest.fixture(scope="session")
def sweep(save_sweep, tmp_path_factory) -> Path:
    """With its page; not to be changed."""
    pytest.importorskip("matplotlib")
    from mrp_lightning.experiments.report import main

    root = save_sweep(tmp_path_factory.mktemp("report") / "sweep")
    main([str(root)])
    return root
