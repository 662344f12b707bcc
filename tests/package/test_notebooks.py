"""The notebooks of examples/ run, and are those of their scripts."""

from pathlib import Path

import pytest

jupytext = pytest.importorskip("jupytext", reason="the notebooks need the extra `dev`")
pytest.importorskip("matplotlib", reason="the notebooks draw, by the extra `report`")

NOTEBOOKS = Path(__file__).parents[2] / "examples" / "notebooks"


def cells(path: Path) -> list[tuple[str, str]]:
    return [(cell.cell_type, cell.source) for cell in jupytext.read(path).cells]


@pytest.fixture
def run(tmp_path, monkeypatch, short_library):
    """Run the cells of a notebook one after the other, in one namespace."""
    import logging

    import matplotlib

    monkeypatch.chdir(tmp_path)
    matplotlib.use("Agg")
    before = logging.root.manager.disable

    def cells_of(name: str, exchanged: dict[str, str] | None = None) -> dict:
        names: dict = {"__name__": "notebook"}
        for number, (kind, source) in enumerate(cells(NOTEBOOKS / f"{name}.py")):
            if kind == "code":
                for shown, tiny in (exchanged or {}).items():
                    source = source.replace(shown, tiny)
                exec(compile(source, f"{name}, cell {number}", "exec"), names)
        return names

    yield cells_of
    logging.disable(before)
    import matplotlib.pyplot as plt

    plt.close("all")


@pytest.mark.parametrize("script", sorted(NOTEBOOKS.glob("*.py")), ids=lambda path: path.stem)
def test_a_notebook_is_that_of_its_script(script):
    notebook = script.with_suffix(".ipynb")
    assert cells(notebook) == cells(script), f"`make notebooks` makes {notebook.name} again"
    outputs = [out for cell in jupytext.read(notebook).cells for out in cell.get("outputs", [])]
    assert not [out for out in outputs if out.output_type == "error" or out.get("name") == "stderr"]
    assert any("image/png" in out.get("data", {}) for out in outputs)


@pytest.fixture
def in_float32(embedded):
    """What makes a notebook load the embedded model in float32."""
    return {"CausalLM(str(STDLIB_LLAMA))": f"CausalLM({str(embedded)!r})"}


def test_look_inside(run, in_float32):
    less = {"num_samples=16, sequence_length=256": "num_samples=8, sequence_length=128"}
    names = run("look_inside", in_float32 | less)
    assert names["before"] < names["after"] < 1.5 * names["before"]
    assert names["groups"].unique().tolist() == [2]
    assert len(names["layers"]) == 28
    assert max(layer.gap for layer in names["layers"]) < 1e-6


def test_compare_methods(run, in_float32):
    few = {'pattern="2:4")\n': 'pattern="2:4", targets="down_proj")\n'}
    few |= {"num_samples=16": "num_samples=8", "limit_test_batches=2": "limit_test_batches=1"}
    names = run("compare_methods", in_float32 | few)
    losses, perplexities = names["losses"], names["perplexities"]
    assert losses["JM"] < losses["SM"] < losses["sparsegpt"] < losses["wanda"]
    assert losses["wanda+M"] < losses["wanda"]
    assert perplexities[None] < perplexities["JM"] < perplexities["SM"] < perplexities["sparsegpt"]


def test_own_module(run):
    errors = run("own_module", {"max_epochs=40": "max_epochs=15"})["errors"]
    assert errors["dense"] < errors["SM"] < errors["magnitude"]


def test_end_to_end(run, tiny_llama):
    """The whole way with a tiny model in place of the embedded one."""
    tiny = {"else STDLIB_LLAMA": f"else {str(tiny_llama)!r}", "../../": "", "=512": "=64"}
    names = run("end_to_end", tiny)
    assert names["prune"].report.complete
    assert names["perplexities"]["dense"] < 2 * names["perplexities"]["50%, 4 bits"]
    assert names["texts"]["packed"] == names["texts"]["dense"]
    assert 0 < names["sizes"]["packed"] < names["sizes"]["dense"]
    assert set(names["milliseconds"]) == {"dense", "packed"}
