"""The results of a benchmark, and the tables that show them: wins and losses alike."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from export.conversion.selection import alike
from export.speed.model_timing import ModelTime
from mrp_lightning.files import save_text
from mrp_lightning.json_files import as_json
from mrp_sparse.kernels.dispatch import STORED_DENSE, Failure, Measurement

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
        target: The phases that the sparse side was prepared for, a key of `TARGETS`.
        bandwidth: Bytes a second of a large copy, reads and writes together.
        stayed_dense: The reason for each packed layer that the back-end runs dense, by its name.
        dense_bytes: Bytes of the dense model's storages; `None` before it is measured.
        sparse_bytes: Bytes of the sparse model's storages, in all layouts that its back-end keeps.
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
        parts.append(_layer_table(report.layers, report.bandwidth))
    if report.failures:
        parts.append("Not measured:\n\n" + "\n".join(_failure_list(report.failures)))
    if report.models:
        parts.append(_model_table(report.models))
        parts += [
            f"{phase}, batch {batch}: sparse is {ratio:.2f}× as fast as the faster dense way."
            for (phase, batch), ratio in speed_ups(report.models).items()
        ]
    if report.sparse_bytes is not None and report.dense_bytes is not None:
        parts.append(
            f"Weights in memory: {report.sparse_bytes / 1e9:.2f} GB, "
            f"{report.dense_bytes / 1e9:.2f} GB dense."
        )
    parts += [f"Stayed dense: {layers}: {why}." for layers, why in alike(report.stayed_dense)]
    return "\n\n".join(parts) + "\n"


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


def _layer_table(measurements: Sequence[Measurement], bandwidth: float) -> str:
    dense = {m.problem: m.microseconds for m in measurements if m.kernel == STORED_DENSE}
    rows = []
    for m in measurements:
        size = m.out_features * m.in_features * VALUE_BYTES
        rate = size * (1 if m.kernel == STORED_DENSE else PACKED) / (m.microseconds * 1e-6)
        times = [f"{m.microseconds:.1f}", f"{m.low:.1f}–{m.high:.1f}"]
        ratios = [f"{dense[m.problem] / m.microseconds:.2f}", f"{rate / 1e9:.0f}"]
        shape = f"{m.out_features}×{m.in_features}"
        rows.append([shape, str(m.tokens), m.kernel, *times, *ratios, f"{rate / bandwidth:.0%}"])
    return _markdown("out × in, tokens, kernel, µs, 20–80%, × dense, GB/s, of copy", rows)


def _model_table(times: Sequence[ModelTime]) -> str:
    rows = []
    for t in times:
        row = [t.phase, str(t.batch_size), str(t.tokens), t.side, t.way]
        if t.timing is None:
            rows.append([*row, f"failed: {t.failure}", "", "", ""])
            continue
        done = t.batch_size * (t.tokens if t.phase == "prefill" else 1)
        low, high = t.timing.low / 1e3, t.timing.high / 1e3
        rate = f"{done / (t.timing.median * 1e-6):.0f}"
        row += [f"{t.timing.median / 1e3:.3f}", f"{low:.3f}–{high:.3f}"]
        rows.append([*row, rate, f"{t.compile_seconds:.0f}"])
    return _markdown("phase, batch, prompt, side, way, ms, 20–80%, tokens/s, compile s", rows)


def _markdown(columns: str, rows: Sequence[Sequence[str]]) -> str:
    """A table with the columns of these names, which commas separate."""
    header = columns.split(", ")
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
