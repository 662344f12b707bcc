"""The picture of perplexities: each dot where its value is, and other codes as lines."""

import pandas as pd
import pytest

pytest.importorskip("matplotlib")

from pages import excess
from pages.excess import draw_excess
from pages.peers import read_peers

from mrp_lightning.errors import FormatError
from mrp_lightning.experiments.pictures import color_of

METHODS = {"magnitude": "magnitude", "SparseGPT": "SS", "SM": "SM", "JM": "JM"}
TABLE = """
# Other codes

| model | sparsity | code | seed | perplexity |
|---|---|---|---|---|
| tiny | 2:4 | ALPS | 0 | 12.5 |
| tiny | 2:4 | ALPS | 1 | 13.5 |
| tiny | 70% | ALPS | 0 | 20.0 |

| another | table |
|---|---|
| of | two columns |
"""


def panel(**means: float) -> pd.DataFrame:
    return pd.DataFrame({"mean": means, "deviation": dict.fromkeys(means, 0.1)})


def drawn(**peers: dict[str, float]):
    panels = {
        "2:4": panel(magnitude=1500.0, SparseGPT=16.0, SM=14.0, JM=13.0),
        "70%": panel(SparseGPT=30.0, SM=20.0),
    }
    return draw_excess("p", "Perplexity.", panels, METHODS, dense=10.0, peers=peers)


def test_a_dot_is_as_far_from_the_left_as_its_value_from_dense(monkeypatch):
    monkeypatch.setattr(excess, "picture", lambda *given, **_: given[-1]())
    left, right = drawn(**{"2:4": {"ALPS": 13.5}}).axes
    dots = {float(bars[0].get_xdata()[0]): bars[0] for bars in left.containers}
    assert set(dots) == {6.0, 4.0, 3.0}  # 16, 14 and 13 above 10
    rows = [label.get_text() for label in left.get_yticklabels()]
    assert [rows[round(dot.get_ydata()[0])] for dot in dots.values()] == ["SparseGPT", "SM", "JM"]
    spread = left.containers[0][2][0].get_segments()[0]
    assert spread[:, 0].tolist() == pytest.approx([5.9, 6.1])
    (line,) = left.collections[:1]
    assert line.get_segments()[0][:, 0].tolist() == [3.5, 3.5]  # ALPS
    texts = [text.get_text() for text in left.texts]
    assert "1,500 ▸" in texts  # far above: at the edge
    assert "16.0" in texts
    assert len(right.containers) == 2
    colors = {dot.get_color() for dot in dots.values()}
    assert colors == {color_of("SS"), color_of("SM"), color_of("JM")}


def test_it_is_said_in_words():
    alt = drawn(**{"2:4": {"ALPS": 13.0}}).alt
    assert "The dense model has 10.0." in alt
    assert "2:4: magnitude 1,500 ± 0.1, SparseGPT 16.0 ± 0.1" in alt
    assert "ALPS's code 13.0." in alt


def test_other_codes_are_lines():
    assert ">ALPS</text>" in drawn(**{"2:4": {"ALPS": 13.0}}).svg.decode()
    assert "lines: the original codes" not in drawn().svg.decode()


def test_other_codes_are_read_from_a_page(tmp_path):
    page = tmp_path / "originals.md"
    page.write_text(TABLE)
    assert read_peers(page) == {("tiny", "text"): {"2:4": {"ALPS": 13.0}, "70%": {"ALPS": 20.0}}}
    page.write_text("# Nothing\n")
    with pytest.raises(FormatError, match=r"`peers`: .* has no table with the columns model"):
        read_peers(page)


def test_without_a_dense_model_axes_begin_where_values_do():
    panels = {"2:4": panel(SparseGPT=16.0, SM=14.0)}
    picture = draw_excess("p", "Perplexity.", panels, METHODS, dense=None)
    assert ">perplexity</text>" in picture.svg.decode()


def test_pruned_models_may_be_better_than_the_dense_one():
    """As random ones are: then nothing is far above."""
    panels = {"2:4": panel(magnitude=9.0, SparseGPT=8.0, SM=9.5, JM=11.0)}
    picture = draw_excess("p", "Perplexity.", panels, METHODS, dense=10.0)
    assert "▸" not in picture.svg.decode()
