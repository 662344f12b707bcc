"""What a benchmark found, and the tables that show it: wins and losses alike."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from export.kernels.kernel_times import STORED_DENSE, Failure, Measurement
from export.speed.model_timing import ModelTime
from mrp_lightning.files import save_text
from mrp_lightning.json_files import as_json
from mrp_lightning.targets.names import without_numbers

VALUE_BYTES = 2
"""Bytes of a float16 or bfloat16 value."""
PACKED = 0.5625
"""Packed bytes for each dense byte of such values."""


@dataclass
class SpeedReport:
    """All that was measured of one model, filled in as it comes.

    Attributes:
        environment: The device and the versions of the libraries.
        backend: The back-end of the sparse side.
        target: What the sparse side was prepared for, a key of `TARGETS`.
        bandwidth: Bytes a second of a large copy, reads and writes together.
        layers: Times by shape, number of tokens and kernel.
        failures: Kernels that could not be measured, and why.
        models: Times of the whole models by phase, side and way.
        stayed_dense: The reason for each packed layer that the back-end runs dense, by its name.
        dense_bytes: Bytes of the dense model's storages; `None` before it is measured.
        sparse_bytes: Bytes of the sparse model's storages, in all layouts that its back-end keeps.
        notes: What a reader has to know.
    """

    environment: Mapping[str, Any]
    backend: str
    target: str
    bandwidth: float
    layers: list[Measurement] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    models: list[ModelTime] = field(default_factory=list)
    stayed_dense: Mapping[str, str] = field(default_factory=dict)
    dense_bytes: int | None = None
    sparse_bytes: int | None = None
    notes: list[str] = field(default_factory=list)

    def save(self, path: Path) -> None:
        """Write `path`.json and `path`.md."""
        save_text(f"{path}.json", as_json(asdict(self)))
        save_text(f"{path}.md", tables(self))


def tables(report: SpeedReport) -> str:
    """The report as Markdown."""
    parts = [", ".join(f"{name} {value}" for name, value in report.environment.items())]
    parts += report.notes
    if report.layers:
        parts.append("\n".join(_layer_table(report.layers, report.bandwidth)))
    if report.failures:
        parts.append("Not measured:\n\n" + "\n".join(_failure_list(report.failures)))
    if report.models:
        parts.append("\n".join(_model_table(report.models)))
        parts += _speed_ups(report.models)
    if report.sparse_bytes is not None and report.dense_bytes is not None:
        parts.append(
            f"Weights in memory: {report.sparse_bytes / 1e9:.2f} GB, "
            f"{report.dense_bytes / 1e9:.2f} GB dense."
        )
    parts += [f"Stayed dense: {layers}: {why}." for layers, why in alike(report.stayed_dense)]
    return "\n\n".join(parts) + "\n"


def alike(reasons: Mapping[str, str]) -> list[tuple[str, str]]:
    """Layers with their reasons; those that differ in numbers only are one, with their count."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, reason in reasons.items():
        groups.setdefault((without_numbers(name), reason), []).append(name)
    return [
        (names[0] if len(names) == 1 else f"{pattern} ({len(names)} layers)", reason)
        for (pattern, reason), names in groups.items()
    ]


def _failure_list(failures: Sequence[Failure]) -> list[str]:
    """A line for each kernel, shape and reason, with all numbers of tokens."""
    tokens: dict[tuple[str, str, str], list[int]] = {}
    for f in failures:
        key = f.kernel, f"{f.out_features}×{f.in_features}", f.reason
        tokens.setdefault(key, []).append(f.tokens)
    return [
        f"* {kernel}, {shape}, tokens {', '.join(map(str, counts))}: {reason}"
        for (kernel, shape, reason), counts in tokens.items()
    ]


def _layer_table(rows: Sequence[Measurement], bandwidth: float) -> list[str]:
    lines = [
        "| out × in | tokens | kernel | µs | 20–80% | × dense | GB/s | of copy |",
        "|---|---|---|---|---|---|---|---|",
    ]
    dense = {m.problem: m.microseconds for m in rows if m.kernel == STORED_DENSE}
    for m in rows:
        size = m.out_features * m.in_features * VALUE_BYTES
        rate = size * (1 if m.kernel == STORED_DENSE else PACKED) / (m.microseconds * 1e-6)
        lines.append(
            f"| {m.out_features}×{m.in_features} | {m.tokens} | {m.kernel} "
            f"| {m.microseconds:.1f} | {m.low:.1f}–{m.high:.1f} "
            f"| {dense[m.problem] / m.microseconds:.2f} "
            f"| {rate / 1e9:.0f} | {rate / bandwidth:.0%} |"
        )
    return lines


def _model_table(rows: Sequence[ModelTime]) -> list[str]:
    lines = [
        "| phase | batch | prompt | side | way | ms | 20–80% | tokens/s | compile s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        start = f"| {row.phase} | {row.batch_size} | {row.tokens} | {row.side} | {row.way} "
        if row.timing is None:
            lines.append(f"{start}| failed: {row.failure} | | | |")
            continue
        done = row.batch_size * (row.tokens if row.phase == "prefill" else 1)
        timing = row.timing
        lines.append(
            f"{start}| {timing.median / 1e3:.3f} | {timing.low / 1e3:.3f}–{timing.high / 1e3:.3f} "
            f"| {done / (timing.median * 1e-6):.0f} | {row.compile_seconds:.0f} |"
        )
    return lines


def speed_ups(rows: Sequence[ModelTime]) -> dict[tuple[str, int], float]:
    """Time of the faster dense way over that of the faster sparse way, by phase and batch size."""
    best: dict[tuple[str, int, str], float] = {}
    for row in rows:
        if row.timing is not None:
            key = row.phase, row.batch_size, row.side
            best[key] = min(row.timing.median, best.get(key, row.timing.median))
    return {
        (phase, batch): time / best[phase, batch, "sparse"]
        for (phase, batch, side), time in best.items()
        if side == "dense" and (phase, batch, "sparse") in best
    }


def _speed_ups(rows: Sequence[ModelTime]) -> list[str]:
    return [
        f"{phase}, batch {batch}: sparse is {ratio:.2f}× as fast as the faster dense way."
        for (phase, batch), ratio in speed_ups(rows).items()
    ]
