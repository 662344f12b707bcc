"""Compare the speed of a packed model with its dense twin: kernels by layer, then whole models."""

import copy
import logging
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from export.backends import apply, check_backend
from export.speed_options import SpeedOptions
from export.timing import (
    REPEATS,
    Timing,
    captured,
    graphed,
    measure,
    microseconds,
    take_turns,
)
from mrp_ground.arguments import checked
from mrp_ground.upstream import attention_of
from mrp_lightning.errors import OptionError, first_line
from mrp_lightning.storage.files import save_text
from mrp_lightning.storage.json_files import as_json
from mrp_lightning.targets.blocks import alike
from mrp_sparse.decoding import storage_bytes
from mrp_sparse.formats.sparse24 import SPARSE24
from mrp_sparse.kernels import cusparselt
from mrp_sparse.kernels.dispatch import (
    STORED_DENSE,
    Failure,
    Measurement,
    cache_path,
    known_times,
    use_times,
)
from mrp_sparse.packed_linear import Sparse24Linear

log = logging.getLogger(__name__)

_SPARE = 16
"""Additional positions in the cache, for the steps of the warm-up."""
_MASKLESS = "sdpa_without_mask"
AttentionInterface.register(_MASKLESS, sdpa_attention_forward)  # and no function that makes masks


@dataclass(frozen=True)
class ModelTime:
    """The time of one side of a comparison, run in one way.

    Attributes:
        phase: `prefill` (a forward of the prompt) or `decode` (one token after it).
        side: `dense` or `sparse`.
        way: `eager` or `compiled`; both are captured in a CUDA graph.
        batch_size: Number of sequences.
        tokens: Number of prompt tokens of each sequence.
        timing: The time of one forward; `None` if it failed.
        compile_seconds: The time of compiling and capturing, 0 for eager.
        failure: The reason if it failed, else `None`.
    """

    phase: str
    side: str
    way: str
    batch_size: int
    tokens: int
    timing: Timing | None
    compile_seconds: float = 0.0
    failure: str | None = None


class Decoder:
    """Greedy decoding with a static cache, one step a token, which a CUDA graph can capture.

    A captured step must not synchronise with the host. Therefore it gets the attention mask of all
    positions: without it, OPT would build one of the present length.

    Args:
        model: The model, in evaluation mode.
        prompt: Token ids, (batch, length).
        new_tokens: The largest number of steps between two rewinds.
        forward: The model for the steps, compiled or not; `None` for `model`, which always reads
            the prompt.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        prompt: Tensor,
        new_tokens: int,
        forward: Callable[..., Any] | None = None,
    ) -> None:
        self.forward = model if forward is None else forward
        length = prompt.shape[1]
        places = length + new_tokens + _SPARE
        self.cache = StaticCache(config=model.config, max_cache_len=places)
        self.mask = prompt.new_ones(len(prompt), places)
        positions = torch.arange(length, device=prompt.device).expand_as(prompt)
        logits = self._logits(model, prompt, positions)
        self.token = logits[:, -1:].argmax(-1)
        self.position = torch.full_like(self.token, length)
        # A captured graph holds addresses, so that rewinding has to copy into the same tensors.
        # Keys and values need no copy, since the steps overwrite them in order.
        self._start = [(tensor, tensor.clone()) for tensor in self._counters()]

    def step(self) -> None:
        """Replace `token` (batch, 1) by the likeliest next one, in place."""
        logits = self._logits(self.forward, self.token, self.position)
        self.token.copy_(logits[:, -1:].argmax(-1))
        self.position.add_(1)

    def rewind(self) -> None:
        """Reset the cache, `token` and `position` to the end of the prompt."""
        for tensor, value in self._start:
            tensor.copy_(value)

    def _logits(self, forward: Callable[..., Any], tokens: Tensor, positions: Tensor) -> Tensor:
        return forward(
            tokens,
            attention_mask=self.mask,
            past_key_values=self.cache,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
        ).logits

    def _counters(self) -> list[Tensor]:
        counters = [self.token, self.position]
        for layer in self.cache.layers:
            integers = [v for v in vars(layer).values() if isinstance(v, Tensor)]
            counters += [v for v in integers if not v.is_floating_point()]
        return counters


@contextmanager
def without_masks(*models: PreTrainedModel) -> Iterator[None]:
    """Let models with full attention run SDPA's own causal attention in this context.

    A prompt without padding needs no mask. While a CUDA graph is captured, transformers makes one
    anyway, and with a mask SDPA is several times slower than in `generate`. Models with sliding
    windows, or without SDPA, are not affected.
    """
    changed = [model for model in models if _attends_to_all(model)]
    for model in changed:
        model.set_attn_implementation(_MASKLESS)
    try:
        yield
    finally:
        for model in changed:
            model.set_attn_implementation("sdpa")


def _attends_to_all(model: PreTrainedModel) -> bool:
    config = model.config
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    windowed = getattr(config, "sliding_window", None) is not None
    return attention_of(config) == "sdpa" and kinds == {"full_attention"} and not windowed


@torch.no_grad()
def time_models(
    dense: PreTrainedModel, sparse: PreTrainedModel, options: SpeedOptions
) -> Iterator[list[ModelTime]]:
    """Time prefill and decode of the same weights, dense and on a back-end, on a CUDA device.

    Yields the times of all ways of both sides for each batch size and phase.
    """
    sides = {"dense": dense, "sparse": sparse}
    for batch_size in options.batch_sizes:
        ids = torch.randint(dense.config.vocab_size, (batch_size, options.prompt_tokens))
        for phase in options.phases:
            yield _time_ways(sides, phase, ids.to(dense.device), options)


def _time_ways(
    sides: Mapping[str, PreTrainedModel], phase: str, prompt: Tensor, options: SpeedOptions
) -> list[ModelTime]:
    """Time dense and sparse model, eager and compiled, in interleaved rounds.

    A way that cannot be prepared is recorded, and the others continue; a failure in the rounds is
    that of all.
    """
    torch.compiler.reset()  # once: a later reset would unload kernels that captured graphs use
    modes: dict[str, str | None] = {"eager": None}
    if options.compile_mode is not None:
        modes["compiled"] = options.compile_mode
    runs: dict[str, Callable[[], float]] = {}
    compile_seconds: dict[str, float] = {}
    failures: dict[str, str] = {}
    ways = {f"{side} {way}": (side, way) for side in sides for way in modes}
    # All ways are prepared before any is timed, so that the rounds of `take_turns` interleave them
    # at the same clock rates.
    for name, (side, way) in ways.items():
        start = time.perf_counter()
        try:
            runs[name] = _contestant(sides[side], phase, prompt, options.new_tokens, modes[way])
        except Exception as error:
            failures[name] = first_line(error)
        compile_seconds[name] = 0.0 if modes[way] is None else time.perf_counter() - start
    try:
        timings = take_turns(runs, REPEATS)
    except Exception as error:
        timings, failures = {}, dict.fromkeys(runs, first_line(error)) | failures
    return [
        ModelTime(
            phase=phase,
            side=side,
            way=way,
            batch_size=prompt.shape[0],
            tokens=prompt.shape[1],
            timing=timings.get(name),
            compile_seconds=compile_seconds[name],
            failure=failures.get(name),
        )
        for name, (side, way) in ways.items()
    ]


def _contestant(
    model: PreTrainedModel, phase: str, prompt: Tensor, new_tokens: int, mode: str | None
) -> Callable[[], float]:
    """Return a function that runs a prefill, or `new_tokens` steps: it returns µs for one."""
    forward: Callable[..., Any] = model
    if mode is not None:
        # Eager and compiled code are captured in the same way, so that only kernels differ.
        forward = torch.compile(model, mode=None if mode == "default" else mode, dynamic=False)
    if phase == "prefill":
        with without_masks(model):
            return graphed([lambda: prefill(forward, prompt)])
    decoder = Decoder(model, prompt, new_tokens, forward)
    graph = captured([decoder.step])

    def replay() -> None:
        for _ in range(new_tokens):
            graph.replay()

    def once() -> float:
        decoder.rewind()
        return microseconds(replay) / new_tokens

    return once


def prefill(forward: Callable[..., Any], prompt: Tensor) -> Tensor:
    """Return the logits (batch, 1, vocabulary) of the last token."""
    return forward(prompt, use_cache=False, logits_to_keep=1).logits


@dataclass
class SpeedReport:
    """The measurements of one model, appended as they are made.

    Attributes:
        environment: The device and the versions of the libraries.
        backend: The back-end of the sparse side.
        target: The phases for which the sparse side was prepared, a key of `TARGETS`.
        bandwidth: Bytes a second of a large copy, reads and writes together.
        layers: The times of kernels on the layers' shapes.
        failures: The kernels that could not be measured on them.
        models: The times of whole models.
        stayed_dense: The reason for each packed layer that the back-end runs dense, by name.
        dense_bytes: Bytes of the dense model's storages; `None` before it is measured.
        sparse_bytes: Bytes of the sparse model's storages, in all layouts that the back-end needs;
            `None` before it is measured.
        notes: Sentences for the reader.
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
    """Return the report as Markdown."""
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
    """Return fastest dense over fastest sparse time, by phase and batch size, if both ran."""
    best: dict[tuple[str, int, str], float] = {}
    for row in rows:
        if row.timing is not None:
            key = row.phase, row.batch_size, row.side
            # Each side is represented by its fastest way: a speed-up over slow dense code would be
            # no gain.
            best[key] = min(row.timing.median, best.get(key, row.timing.median))
    return {
        (phase, batch): time / best[phase, batch, "sparse"]
        for (phase, batch, side), time in best.items()
        if side == "dense" and (phase, batch, "sparse") in best
    }


def _failure_list(failures: Sequence[Failure]) -> list[str]:
    """Return a line for each kernel, shape and reason, with all numbers of tokens."""
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
        size, dtype = (m.out_features, m.in_features), getattr(torch, m.dtype)
        dense_bytes = m.out_features * m.in_features * dtype.itemsize
        is_dense = m.kernel == STORED_DENSE
        stored = dense_bytes if is_dense else SPARSE24.num_bytes(size, dtype, 0)
        rate = stored / (m.microseconds * 1e-6)
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
    """Return a Markdown table; `columns` are the comma-separated headers."""
    header = columns.split(", ")
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def dense_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of the model with dense layers; all other tensors are shared."""
    # The memo of `deepcopy` marks all tensors as copied already, so that only the packed layers
    # take memory twice.
    shared: dict[int, Any] = {id(p): p for p in (*model.parameters(), *model.buffers())}
    dense = copy.deepcopy(model, shared)
    for name, module in model.named_modules():
        if isinstance(module, Sparse24Linear):
            dense.set_submodule(name, module.to_linear())
    return dense


@checked
def compare(
    sparse: PreTrainedModel,
    options: SpeedOptions,
    report_on: Callable[[SpeedReport], object] = lambda _: None,
) -> SpeedReport:
    """Measure the layers, put the model on a back-end, and time it against its dense twin.

    `report_on` is called with the report after each measurement. Afterwards the model's packed
    layers run on the back-end, or are dense, and the times of kernels are kept for later processes.

    Raises:
        OptionError: The model is not on a CUDA device, or the back-end cannot run there.
    """
    device = sparse.device
    if device.type != "cuda":
        raise OptionError(f"Speed is measured on CUDA devices; the model is on {device}.")
    check_backend(options.backend, device)
    report = SpeedReport(
        environment={**known_times(device).environment, **_versions(device)},
        backend=options.backend,
        target=options.target,
        bandwidth=bandwidth(device),
    )
    if report.environment.get("cusparselt") == cusparselt.SLOW_ON_HOPPER:
        note = "cuSPARSELt 0.8.0 is slower on Hopper than 0.8.1, which torch 2.12 brings."
        report.notes.append(note)
    for measurements, failures in _measure_layers(sparse, options.layer_tokens):
        report.layers += measurements
        report.failures += failures
        report_on(report)
    dense = dense_copy(sparse)
    # The dense twin is made before `apply`: a back-end may replace the packed layers, from which
    # the twin is made.
    report.stayed_dense = apply(sparse, options.backend, options.target)
    report.dense_bytes, report.sparse_bytes = storage_bytes(dense), storage_bytes(sparse)
    for times in time_models(dense, sparse, options):
        report.models += times
        report_on(report)
    return report


@torch.no_grad()
def _measure_layers(
    model: PreTrainedModel, tokens: Sequence[int]
) -> Iterator[tuple[list[Measurement], list[Failure]]]:
    """Time each shape of the packed layers of a model on a CUDA device once, by all kernels.

    From now on, kernels are chosen by these times, also in later processes. Yields the measurements
    and failures for each shape and number of tokens.
    """
    layers = [m for m in model.modules() if isinstance(m, Sparse24Linear)]
    for shape in dict.fromkeys((m.out_features, m.in_features, m.weight.dtype) for m in layers):
        if not tokens:
            return
        for measurements, failures in measure(*shape, model.device, tokens):
            # Times are saved after each number of tokens, so that an interrupted run keeps them,
            # and `apply` chooses by them.
            kernel_times = known_times(model.device).merged(measurements)
            kernel_times.save(cache_path(kernel_times.environment))
            use_times(kernel_times, model.device)
            yield measurements, failures


def bandwidth(device: torch.device) -> float:
    """Return the bytes a second of a large copy on a device, reads and writes together."""
    source = torch.empty(2**30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    once = {"copy": lambda: microseconds(lambda: target.copy_(source))}
    # A copy reads and writes every byte, hence the factor 2. It is the roof of a product with one
    # token, whose time is that of reading the weight.
    return 2 * source.nbytes / (take_turns(once, 10)["copy"].median * 1e-6)


def _versions(device: torch.device) -> dict[str, str]:
    """Return versions for readers of the report, besides those that identify kernel times."""
    versions = {"transformers": transformers.__version__}
    # The first GPU of nvidia-smi need not be the first that CUDA_VISIBLE_DEVICES leaves visible.
    gpu = f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}"
    query = ["nvidia-smi", gpu, "--query-gpu=driver_version,clocks.max.sm", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("nvidia-smi does not report the driver's version: %s", error)
        return versions
    driver, clock = answer.stdout.splitlines()[0].split(", ")
    return versions | {"driver": driver, "highest clock": clock}
