"""Which runs are compared with which."""

import json
import shutil

import pytest

from mrp_lightning.experiments.groups import find_models
from mrp_lightning.experiments.page import headline, notes
from mrp_lightning.experiments.runs import find_runs
from mrp_lightning.experiments.scores import ScoreFrame
from mrp_lightning.experiments.trials import METHODS, canonical_method, method_rank
from mrp_lightning.records.evaluation import read, record
from mrp_lightning.solver.recipe import MASKS, NAMED


def models_of(root):
    return find_models(find_runs(root))


def test_seeds_are_runs_of_one_variant(sweep):
    (model,) = models_of(sweep)
    assert model.name == "someone/tiny"
    assert model.dense.name == "tiny/dense"
    assert [(v.setting, v.label, len(v.runs)) for v in model.groups] == [
        ("2:4", "magnitude", 2),
        ("2:4", "SparseGPT", 2),
        ("2:4", "SM", 2),
        ("70%", "magnitude", 2),
        ("70%", "SparseGPT", 2),
        ("70%", "SM", 2),
    ]


def test_what_was_varied_is_in_the_label(tmp_path, save_run):
    for damping in (0.1, 0.01):
        save_run(tmp_path / f"{damping}", damping=damping)
    (model,) = models_of(tmp_path)
    assert [v.label for v in model.groups] == ["SM, damping 0.01", "SM, damping 0.1"]


def test_each_model_has_the_dense_run_of_its_source(tmp_path, save_run, save_perplexity):
    for name, value in {"one": 5.0, "some/two": 6.0}.items():
        save_run(tmp_path / name / "SM", base_model=name)
        save_perplexity(tmp_path / f"{name}-before", name, wikitext2=value)
    save_perplexity(tmp_path / "dense", "three", wikitext2=7.0)
    found = [(m.name, m.dense.name, len(m.groups)) for m in models_of(tmp_path)]
    assert found == [
        ("one", "one-before", 1),
        ("some/two", "some/two-before", 1),
        ("three", "dense", 0),
    ]


def test_a_run_may_tell_of_its_dense_model_itself(tmp_path, save_run, save_perplexity):
    run = tmp_path / "a" / "run"
    save_run(run)
    save_perplexity(run, text=8.0)
    found = read(run).perplexity["text"]
    record(run, dense={"text": {**found, "perplexity": 5.0, "prefix": 0}})
    (model,) = models_of(run)
    (value, *_) = headline(ScoreFrame(model))
    assert value.label == "Perplexity on the evaluation text"
    assert value.value == "5.000 → 8.000"
    assert value.detail.startswith("+60.0%, context 2048, 166 windows, no BOS before them")
    assert not notes(model)
    save_perplexity(tmp_path / "a" / "dense", text=4.0)  # measured by itself, and later
    assert models_of(tmp_path)[0].dense.name == "a/dense"


def test_a_model_that_was_pruned_before_is_not_called_dense(tmp_path, save_run, save_perplexity):
    run = tmp_path / "run"
    report = save_run(run)
    save_perplexity(run, text=8.0)
    record(run, dense={"text": {**read(run).perplexity["text"], "perplexity": 5.0}})
    cut, shortened = {"vocabulary": 16000}, {"method": "SM", "structure": "blocks"}
    for earlier, label in (([], "dense"), ([cut], "dense"), ([cut, shortened], "before")):
        report.provenance["pruned_before"] = earlier
        report.save(run)
        (model,) = models_of(run)
        assert model.rows[0].label == label
        assert next(headline(ScoreFrame(model))).value == "5.000 → 8.000"


def test_a_smaller_model_has_no_zeros(tmp_path, save_run):
    """Of a shortened one, no layer is pruned."""
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "model.safetensors").write_bytes(b"weights")
    shown = {}
    for structure, units in (("heads", {}), ("blocks", {"removed": ["model.layers.3"]})):
        report = save_run(tmp_path / "weights", pattern=None, sparsity=0.25, structure=structure)
        report.model_weights = 1000
        report.narrowed = {"structure": structure, "units": 4, "kept": 3, "model_weights": 800}
        report.narrowed |= units
        report.layers = [] if units else report.layers
        report.save(tmp_path / "weights")
        (model,) = models_of(tmp_path)
        (group,) = model.groups
        found = {value.label: (value.value, value.detail) for value in headline(ScoreFrame(model))}
        shown[structure] = (group.setting, group.label, found)
    setting, label, found = shown["heads"]
    assert (setting, label) == ("25% fewer heads", "SM")
    assert found["Weights removed"] == (
        "20%",
        "of 1,000 in the model: 3 of 4 heads a block are left",
    )
    assert found["Weight files"][1] == "without the removed weights"
    assert found["Relative layer loss"][1] == "mean over 9 layers"
    setting, label, found = shown["blocks"]
    assert (setting, label) == ("25% fewer blocks", "least change of the output")
    assert found["Weights removed"] == ("20%", "of 1,000 in the model: 3 of 4 blocks are left")
    assert "Relative layer loss" not in found


def test_settings_in_directories_of_their_own_are_one_model(tmp_path, save_run, save_perplexity):
    save_perplexity(tmp_path / "dense", wikitext2=5.0)
    for setting, sparsity in {"50": 0.5, "70": 0.7}.items():
        save_run(tmp_path / setting / "SM", pattern=None, sparsity=sparsity)
    (model,) = models_of(tmp_path)
    assert [v.setting for v in model.groups] == ["50%", "70%"]


def test_models_of_other_shapes_are_not_mixed(tmp_path, save_run, save_perplexity):
    save_run(tmp_path / "small")
    save_run(tmp_path / "other", prefix="transformer.h")
    assert len(models_of(tmp_path)) == 2
    save_perplexity(tmp_path / "dense", wikitext2=5.0)
    assert [m.dense and m.dense.name for m in models_of(tmp_path)] == [None, None, "dense"]


def of_text(run, save_run, save_perplexity, *, checksum, dense=None, source="a.txt", seed=0):
    """Save a run that was calibrated and evaluated on a text of this content."""
    report = save_run(run, seed=seed)
    report.provenance["data"] = {"source": source, "sequence_length": 64, "seed": seed}
    report.save(run)
    save_perplexity(run, text=8.0)
    scores = {**read(run).perplexity["text"], "checksum": checksum}
    before = {"text": {**scores, "perplexity": dense}} if dense else {}
    record(run, perplexity={"text": scores}, dense=before)


def test_runs_on_other_calibration_text_are_no_seeds_of_one_another(
    tmp_path, save_run, save_perplexity
):
    for i, source in enumerate(["a.txt", "a.txt", "b.txt"]):
        run = tmp_path / f"{i}"
        of_text(run, save_run, save_perplexity, checksum=7, source=source, seed=i)
    (model,) = models_of(tmp_path)
    groups = [(group.label, len(group.runs)) for group in model.groups]
    assert groups == [("SM, calibration a.txt", 2), ("SM, calibration b.txt", 1)]


def test_texts_of_one_name_and_other_content_are_not_compared(tmp_path, save_run, save_perplexity):
    for name, checksum, dense in (("x", 1, 5.0), ("y", 1, 5.0002), ("z", 2, 6.0)):
        of_text(tmp_path / name, save_run, save_perplexity, checksum=checksum, dense=dense)
    one, other = models_of(tmp_path)
    assert [run.name for group in one.groups for run in group.runs] == ["x", "y"]
    assert [model.dense.evaluation.perplexity["text"]["perplexity"] for model in (one, other)] == [
        pytest.approx(5.0, rel=1e-3),
        6.0,
    ]
    assert one.name != other.name

    # A dense run beside them is that of one text at most.
    shutil.rmtree(tmp_path / "x")
    shutil.rmtree(tmp_path / "y")
    save_perplexity(tmp_path / "dense", text=5.0)
    assert models_of(tmp_path)[0].dense.name == "dense"  # its content is not known
    scores = {**read(tmp_path / "dense").perplexity["text"], "checksum": 1}
    record(tmp_path / "dense", perplexity={"text": scores})
    assert models_of(tmp_path)[0].dense.name == "z, before"
    (tmp_path / "z" / "evaluation.json").unlink()
    of_text(tmp_path / "z", save_run, save_perplexity, checksum=2)
    model, dense = models_of(tmp_path)
    assert model.dense is None
    assert dense.dense.name == "dense"


def test_tasks_of_one_name_and_other_samples_are_not_compared(tmp_path, save_run, save_perplexity):
    for name, checksum, samples in (("x", 1, 400), ("y", 2, 400), ("z", 3, 50)):
        save_run(tmp_path / name)
        scores = {"acc": 0.5, "samples": samples, "num_fewshot": 0, "checksum": checksum}
        record(tmp_path / name, zeroshot={"piqa": scores})
    # 50 samples may be the first of the 400: the table shows their number.
    groups = [[run.name for run in model.runs] for model in models_of(tmp_path)]
    assert groups == [["x", "z"], ["y"]]


def test_finetunings_of_one_model_are_not_compared(tmp_path, save_run):
    for name in ("base", "chat"):
        save_run(tmp_path / name, base_model=f"someone/{name}")
    assert [model.name for model in models_of(tmp_path)] == ["someone/base", "someone/chat"]


def test_a_trained_copy_is_no_other_seed(tmp_path, save_run, save_perplexity):
    save_run(tmp_path / "half")
    report = save_run(tmp_path / "half-distilled")
    report.provenance["trained"] = {"steps": 390, "command": None}
    report.save(tmp_path / "half-distilled")
    for run, value in {"half": 8.0, "half-distilled": 6.0}.items():
        save_perplexity(tmp_path / run, text=value)
    (model,) = models_of(tmp_path)
    assert [(v.label, [run.name for run in v.runs]) for v in model.groups] == [
        ("SM", ["half"]),
        ("SM, trained for 390 steps", ["half-distilled"]),
    ]


def test_several_dense_runs_leave_the_before_open(tmp_path, save_run, save_perplexity):
    save_run(tmp_path / "run")
    for name in ("base", "instruct"):
        save_perplexity(tmp_path / name, wikitext2=5.0)
    found = [(m.dense and m.dense.name, len(m.groups)) for m in models_of(tmp_path)]
    assert found == [(None, 1), ("base", 0), ("instruct", 0)]
    save_perplexity(tmp_path / "dense", wikitext2=5.0)
    assert models_of(tmp_path)[0].dense.name == "dense"


def test_a_packed_copy_is_no_second_measurement(tmp_path, save_run):
    save_run(tmp_path / "sm")
    shutil.copytree(tmp_path / "sm", tmp_path / "sm-sparse24")
    (tmp_path / "sm-sparse24" / "export_report.json").write_text('{"format": "packed"}')
    (model,) = models_of(tmp_path)
    assert [v.label for v in model.groups] == ["SM", "SM, packed"]
    assert [v.label for v in model.originals] == ["SM"]


def test_a_packed_copy_alone_is_shown_in_full(tmp_path, save_run):
    save_run(tmp_path)
    (tmp_path / "export_report.json").write_text('{"format": "packed"}')
    (model,) = models_of(tmp_path)
    assert [v.label for v in model.originals] == ["SM, packed"]


def test_an_incomplete_run_is_in_no_mean(tmp_path, save_run):
    save_run(tmp_path / "whole", seed=0)
    save_run(tmp_path / "half", seed=1, blocks=1, complete=False)
    (model,) = models_of(tmp_path)
    assert [(v.label, len(v.runs)) for v in model.groups] == [("SM", 1), ("SM, incomplete", 1)]
    (note,) = notes(model)
    assert note.text.startswith("Incomplete: the run ended after 3 pruned layers.")
    assert note.runs == ["half"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [("sparsegpt", "SS"), ("S+S", "SS"), ("S+M", "SM"), ("MM", "MM")],
)
def test_one_method_has_one_name(given, expected):
    assert canonical_method(given) == expected
    assert canonical_method(expected) == expected


def test_every_method_has_a_place_of_its_own():
    compensations = ("none", "S", "M")
    pairs = [f"{mask}+{compensation}" for mask in MASKS for compensation in compensations]
    methods = {canonical_method(name) for name in [*pairs, *NAMED]}
    assert sorted(map(method_rank, methods)) == list(range(len(pairs)))
    assert [method_rank(method) for method in METHODS] == list(range(len(METHODS)))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"gap": 3e-5},
            "9 of 9 layers may be further from the optimal loss than the tolerance of 1e-06",
        ),
        ({"dead_inputs": 4}, "9 of 9 layers had input features that were always 0"),
        ({"tokens": 8}, "9 of 9 layers saw fewer tokens than they have input features"),
        ({"shared_hessian": 0.25}, "9 of 9 layers saw fewer tokens than they have input features"),
    ],
)
def test_what_weakens_a_result_is_said(tmp_path, save_run, changes, text):
    save_run(tmp_path, changes=changes)
    (note,) = notes(models_of(tmp_path)[0])
    assert note.text.startswith(text)


def test_raised_damping_is_said(tmp_path, save_run):
    save_run(tmp_path)
    path = tmp_path / "pruning_report.json"
    content = json.loads(path.read_text())
    content["layers"][4]["raised_damping"] = 0.1
    path.write_text(json.dumps(content))
    (note,) = notes(models_of(tmp_path)[0])
    assert note.text.startswith("1 of 9 layers needed more damping than was asked for")


def test_a_good_run_has_no_notes(sweep):
    assert notes(models_of(sweep)[0]) == []


def test_an_argument_that_older_runs_lack_tells_them_apart(tmp_path, save_run):
    save_run(tmp_path / "older")
    save_run(tmp_path / "newer", target="own")
    (model,) = models_of(tmp_path)
    assert [v.label for v in model.groups] == ["SM, target own", "SM"]
