"""The matrix of texts has each run's perplexities, and their ratios to the dense model's."""

import math

from page import DocsPage, parts_of
from pages.peers import NO_PEERS
from pages.texts import texts_part

from mrp_lightning.experiments.groups import find_models
from mrp_lightning.experiments.runs import find_runs
from mrp_lightning.experiments.scores import ScoreFrame
from mrp_lightning.records.evaluation import record


def found(**values):
    measured = {name: {"perplexity": x, "loss": math.log(x)} for name, x in values.items()}
    return {name: {**scores, "context": 64} for name, scores in measured.items()}


def test_worst_and_mean_are_of_the_ratios_to_the_dense_model(tmp_path, save_run):
    made = {"home": {"code": 12.0, "prose": 90.0}, "self": {"code": 15.0, "prose": 40.0}}
    (tmp_path / "dense").mkdir()
    record(tmp_path / "dense", perplexity=found(code=10.0, prose=20.0))
    for number, (source, values) in enumerate(made.items()):
        report = save_run(tmp_path / source, seed=number, damping=0.1 + number)
        report.provenance["data"] = {"source": source, "samples": 64, "sequence_length": 512}
        report.save(tmp_path / source)
        record(tmp_path / source, perplexity=found(**values))
    runs = find_runs(tmp_path)
    (model,) = find_models(runs)
    part = texts_part(ScoreFrame(model))
    (table,) = part.tables
    ((_, rows),) = table.groups()
    cells = {texts[0]: texts[1:] for texts in (tuple(t for t, _ in row) for _, row in rows)}
    assert cells["home, 64 × 512"] == ("12.000", "90.000", "4.50", "2.32")  # √(1.2·4.5)
    assert cells["self, 64 × 512"] == ("15.000", "40.000", "2.00", "1.73")  # √(1.5·2)
    best = [[text for text, is_best in row if is_best] for _, row in rows]
    assert sorted(best) == [[], ["2.00", "1.73"]]
    page = DocsPage(sweep=[], out="page.md")
    assert "On other texts" in [part.title for part in parts_of(model, page, NO_PEERS)]


def test_one_text_has_no_matrix(tmp_path, save_run):
    (tmp_path / "dense").mkdir()
    record(tmp_path / "dense", perplexity=found(code=10.0))
    save_run(tmp_path / "a")
    record(tmp_path / "a", perplexity=found(code=12.0))
    (model,) = find_models(find_runs(tmp_path))
    assert texts_part(ScoreFrame(model)) is None
