"""What is wrong with a `pruning_report.json` that this version did not write."""

from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

from mrp_lightning.errors import PatternError
from mrp_lightning.records.rows import BlockReport, LayerReport
from mrp_lightning.solver.patterns import make_pattern

_SECTIONS = {"layers": list, "totals": dict, "versions": dict, "config": dict}
_TOTALS = ("layers", "skipped", "weights", "removed", "sparsity", "relative_loss", "seconds")
_JSON_NAMES = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    type(None): "null",
}


def problems_in(content: dict[str, Any]) -> Iterator[str]:
    """What in a `pruning_report.json` is not as this version writes it."""
    wrong = [key for key, kind in _SECTIONS.items() if not isinstance(content.get(key), kind)]
    yield from (f"`{key}` is missing or no {_SECTIONS[key].__name__}" for key in wrong)
    if wrong:
        return
    config, totals, files = content["config"], content["totals"], content.get("files", [])
    if not isinstance(files, list) or not all(isinstance(name, str) for name in files):
        yield f"`files` is {files!r}, expected a list of names"
    try:
        make_pattern(config.get("sparsity"), config.get("pattern"))
    except PatternError as error:
        yield f"`config`: {error}"
    if not isinstance(content.get("provenance", {}), dict):
        yield f"`provenance` is {content['provenance']!r}, expected an object"
    for key in ("model_weights", "peak_rss"):
        yield from _wrong_type(f"totals.{key}", totals.get(key), int | None)
    yield from _wrong_type("totals.cpu_seconds", totals.get("cpu_seconds"), float | None)
    yield from _wrong_type("totals.resumed_blocks", totals.get("resumed_blocks", 0), int)
    yield from _wrong_type("config.method", config.get("method"), str)
    for key in _TOTALS:
        if key in totals:
            yield from _wrong_type(f"totals.{key}", totals[key], float | None)
        else:
            yield f"`totals.{key}` is missing"
    yield from _wrong_type("totals.complete", totals.get("complete", False), bool)
    for library, version in content["versions"].items():
        yield from _wrong_type(f"versions.{library}", version, str)
    for i, row in enumerate(content["layers"]):
        yield from (f"`layers[{i}]`: {problem}" for problem in _layer_problems(row))
    blocks = content.get("blocks", [])
    for i, row in enumerate(blocks if isinstance(blocks, list) else [blocks]):
        yield from (f"`blocks[{i}]`: {problem}" for problem in _row_problems(row, BlockReport))


def _row_problems(row: Any, kind: type) -> Iterator[str]:
    if not isinstance(row, dict):
        yield f"expected an object, got {row!r}"
        return
    for key, value in get_type_hints(kind).items():
        if key != "shape":
            yield from _wrong_type(key, row.get(key, getattr(kind, key, None)), value)


def _layer_problems(row: Any) -> Iterator[str]:
    yield from _row_problems(row, LayerReport)
    if not isinstance(row, dict):
        return
    shape = row.get("shape")
    sizes = shape if isinstance(shape, list) else []
    positive = all(type(size) is int and size > 0 for size in sizes)
    if not positive or (not sizes if row.get("skipped") else len(sizes) != 2):
        yield f"`shape` is {shape!r}, expected a list of positive integers, the rows first"


def _wrong_type(key: str, value: Any, kind: Any) -> Iterator[str]:
    kinds = get_args(kind) or (kind,)
    # In JSON 1 and 1.0 are one number, but a bool, which Python counts among the integers, is none.
    allowed = (*kinds, int) if float in kinds else kinds
    if not (bool in kinds if isinstance(value, bool) else isinstance(value, allowed)):
        expected = " or ".join(_JSON_NAMES[kind] for kind in kinds)
        yield f"`{key}` is {value!r}, expected {expected}"
