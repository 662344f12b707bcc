"""A JSON object becomes a dataclass, or all that is wrong with it is said."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import warm

from mrp_lightning.errors import FormatError
from mrp_lightning.storage.json_files import as_dataclass, as_json, read_as, read_json


@dataclass(frozen=True)
class Point:
    x: float
    label: str | None = None

    def __post_init__(self):
        if self.x < 0:
            raise ValueError(f"`x` is {self.x}, and has to be positive")


@dataclass
class Drawing:
    points: tuple[Point, ...]
    named: dict[int, Point] = field(default_factory=dict)
    sizes: dict[str, float | int | None] = field(default_factory=dict)


def test_what_fits_is_read(tmp_path):
    (tmp_path / "a.json").write_text(
        '{"format_version": 1, "of_a_newer_version": [], "named": {"3": {"x": 1.5, "label": "b"}},'
        '"points": [{"x": 1}], "sizes": {"samples": 5153, "acc": 0.5, "lost": null}}'
    )
    found = read_as(Drawing, tmp_path / "a.json", "draw it again", 1)
    assert found == Drawing(
        points=(Point(1.0),),
        named={3: Point(1.5, "b")},
        sizes={"samples": 5153, "acc": 0.5, "lost": None},
    )
    assert [type(found.points[0].x), type(found.sizes["samples"])] == [float, int]


def test_all_that_does_not_fit_is_listed():
    content = {
        "points": [{"x": True}, {"x": "1"}, {"label": 1}, {"x": -1}, 3],
        "named": {"3": {"x": None}, "b": {"x": 1}},
        "sizes": {"a": True, "b": [1], "c": {"x": 1}},
    }
    with pytest.raises(FormatError) as caught:
        as_dataclass(Drawing, content, "a.json", "draw it again")
    first, *listed = str(caught.value).splitlines()
    assert first == "a.json is not as mrp-lightning writes it. Draw it again."
    assert [line.strip() for line in listed] == [
        "`points[0].x` is True, expected a valid number",
        "`points[1].x` is '1', expected a valid number",
        "`points[2].x` is missing",
        "`points[2].label` is 1, expected a valid string",
        "`points[3]`: `x` is -1.0, and has to be positive",
        "`points[4]` is 3, expected an object",
        "`named.3.x` is None, expected a valid number",
        "`named.b` is 'b', expected a valid integer, unable to parse string as an integer",
        "`sizes.a` is True, expected a valid number",
        "`sizes.b` is [1], expected a valid number",
        "`sizes.c` is {'x': 1}, expected a valid number",
    ]


def test_more_than_json_is_refused():
    with pytest.raises(FormatError, match="a.ckpt is not .*\n  Object of type set is not JSON"):
        as_dataclass(Drawing, {"points": set()}, "a.ckpt", "draw it again")
    found = as_dataclass(Drawing, {"points": [{"x": float("inf")}]}, "a.ckpt", "draw it again")
    assert found.points == (Point(float("inf")),)
    nested: dict = {}
    for _ in range(500):
        nested = {"a": nested}
    with pytest.raises(FormatError, match="the whole: Invalid JSON: recursion limit exceeded"):
        as_dataclass(Drawing, nested, "a.json", "draw it again")


def test_a_missing_package_ends_a_pruning_before_it_starts():
    code = "import sys; [sys.modules.pop(k) for k in [*sys.modules] if k.startswith('mrp_')]; "
    code += "sys.modules['pydantic'] = None; import mrp_lightning.pruning.sequential"
    shown = warm.run(["-c", code], cwd=Path(__file__).parents[2]).stderr
    assert "pydantic" in shown.splitlines()[-1]


def test_json_has_no_numbers_that_json_lacks():
    content = {"a": [1.5, math.inf], "b": (math.nan, {"c": -math.inf}), "d": [True, None, "NaN"]}
    text = as_json(content)
    assert json.loads(text) == {
        "a": [1.5, None],
        "b": [None, {"c": None}],
        "d": [True, None, "NaN"],
    }
    assert text.endswith("}\n")
    with pytest.raises(TypeError):
        as_json({"path": Path("x")})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "is not JSON"),
        (b"\xff", "is not JSON"),
        (b"[1]", "expected a JSON object, got a list"),
    ],
)
def test_json_that_cannot_be_read_is_named(tmp_path, content, said):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(FormatError, match=said) as error:
        read_json(tmp_path / "a.json", "make it again")
    assert str(tmp_path / "a.json") in str(error.value)
    assert str(error.value).endswith("Delete it, or make it again.")


def test_json_of_another_version_is_refused(tmp_path):
    (tmp_path / "a.json").write_text('{"format_version": 2}')
    assert read_json(tmp_path / "a.json", "make it again", 2) == {"format_version": 2}
    with pytest.raises(FormatError, match=r"`format_version` is 2, but .* reads 1\. Use the"):
        read_json(tmp_path / "a.json", "make it again", 1)
