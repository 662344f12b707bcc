"""What the page shows, against the files that it is made from."""

import json
import re
import shlex
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from html_page import HtmlPage

from mrp_lightning.experiments.pictures import INK, MUTED, PAPER, RULE, SERIES
from mrp_lightning.experiments.report import main
from mrp_lightning.records.evaluation import record
from mrp_lightning.records.rows import BlockReport, LayerReport, TargetReport

EVIL = "<img src=x onerror=alert()>&\"'$x_{a}$"  # numbers in the names of layers become `*`


def page_of(directory: Path, *options: str) -> HtmlPage:
    main([str(directory), *options])
    return HtmlPage(directory / "report.html")


def reports(root: Path, pattern: str) -> list[dict]:
    found = [json.loads(p.read_text()) for p in sorted(root.glob(f"{pattern}/pruning_report.json"))]
    assert found
    return found


def test_one_run_is_headed_by_its_values(tmp_path, save_run, save_perplexity):
    report = save_run(tmp_path / "runs" / "mine", base_model="facebook/opt-125m")
    save_perplexity(tmp_path / "runs" / "mine", wikitext2=7.559)
    save_perplexity(tmp_path / "runs" / "dense", "facebook/opt-125m", wikitext2=6.986)
    (tmp_path / "runs" / "mine" / "model.safetensors").write_bytes(bytes(3 * 2**20))
    page = page_of(tmp_path)
    assert "facebook/opt-125m, 2:4 by SM" in page.text
    assert "6.986 → 7.559" in page.text
    assert "+8.2%, context 2048, 166 windows" in page.text
    assert f"{report.totals['relative_loss']:.4f}" in page.text
    assert f"of {report.totals['weights']:,} in the pruned layers" in page.text
    assert "3.00 MiB" in page.text


def test_every_layer_is_listed_as_in_the_report(tmp_path, save_run):
    report = save_run(tmp_path)
    table = page_of(tmp_path).table("Layers of")
    assert table.rows[0][:4] == ["layer", "shape", "sparsity", "loss"]
    assert len(table.rows) == 1 + len(report.layers)
    for row in report.layers:
        assert table.row(row.name) == [
            f"{row.shape[0]} × {row.shape[1]}",
            "50%",
            f"{row.loss:.4g}",
            f"{row.relative_loss:.4f}",
            f"{row.damping:.4g}".replace("e-", "e−"),
            str(row.iterations),
            f"{row.gap:.4g}".replace("e-", "e−"),
            f"{row.seconds:.3f}" if row.seconds < 1 else f"{row.seconds:.1f}",
            f"{row.tokens:,}",
            "0",
        ]


def test_several_runs_are_compared_by_their_means(sweep):
    table = HtmlPage(sweep / "report.html").table("Perplexity, relative layer loss")
    assert table.rows[0] == [
        "method",
        "perplexity wikitext2 @2048166 windows",
        "perplexity ptb @2048166 windows",
        "relative loss",
        "seconds",
        "runs",
    ]
    assert table.row("dense")[:2] == ["10.500", "20.250"]
    for setting, name in {"2:4": "2of4", "70%": "70"}.items():
        for method, label in {"magnitude": "magnitude", "SS": "SparseGPT", "SM": "SM"}.items():
            found = reports(sweep, f"tiny/{name}-{method}-*")
            losses = [report["totals"]["relative_loss"] for report in found]
            paths = sorted(sweep.glob(f"tiny/{name}-{method}-*/evaluation.json"))
            values = [json.loads(p.read_text())["perplexity"]["ptb"]["perplexity"] for p in paths]
            cells = table.row(label, setting)
            mean, deviation = statistics.fmean(values), statistics.stdev(values)
            assert cells[1] == f"{mean:.3f} ± {deviation:.3f}"
            mean, deviation = statistics.fmean(losses), statistics.stdev(losses)
            assert cells[2] == f"{mean:.4f} ± {deviation:.4f}"
            assert cells[4] == "2"


def test_the_lowest_of_each_sparsity_is_marked(tmp_path, save_run, save_perplexity):
    for method, value in {"magnitude": 9.0, "SS": 8.0, "SM": 7.5}.items():
        save_run(tmp_path / method, method=method)
        save_perplexity(tmp_path / method, wikitext2=value)
    page = page_of(tmp_path)
    assert "<strong>7.500</strong>" in page.source
    assert "<strong>8.000</strong>" not in page.source


def test_zero_shot_is_shown_before_and_after(tmp_path, save_run):
    before = {"acc": 0.7412, "acc_stderr": 0.0061, "perplexity": 4.25, "samples": 5153}
    after = {"acc": 0.7105, "acc_stderr": 0.0063, "perplexity": 5.5, "samples": 5153}
    save_run(tmp_path / "run")
    record(tmp_path / "dense", zeroshot={"lambada_openai": before})
    record(tmp_path / "run", zeroshot={"lambada_openai": after})
    page = page_of(tmp_path)
    table = page.table("± standard error")
    assert table.rows[0][1:] == [
        "lambada_openai accin %, 5153 samples",
        "lambada_openai perplexity5153 samples",
    ]
    assert table.row("dense") == ["74.12 ± 0.61", "4.250"]
    assert table.row("SM", "2:4") == ["71.05 ± 0.63", "5.500"]


def test_the_mean_accuracy_is_that_of_papers(tmp_path, save_run):
    save_run(tmp_path)
    tasks = {"piqa": {"acc": 0.7, "acc_norm": 0.9}, "hellaswag": {"acc": 0.3, "acc_norm": 0.5}}
    tasks["mmlu"] = {"acc": 0.4}
    tasks["mmlu_law"] = {"acc": 0.1, "depth": 1}
    record(tmp_path, zeroshot=tasks)
    table = page_of(tmp_path).table("± standard error")
    assert table.rows[0][-1].startswith("mean")
    shown = ["70.00", "90.00", "30.00", "50.00", "40.00", "10.00"]
    assert table.row("SM", "2:4") == [*shown, "53.33"]


def test_a_perplexity_that_is_not_finite_is_said_to_be_so(tmp_path, save_run, save_perplexity):
    for method, value in {"magnitude": None, "SS": 8.0, "SM": 7.5}.items():
        save_run(tmp_path / method, method=method)
        save_perplexity(tmp_path / method, wikitext2=value)
    page = page_of(tmp_path)
    assert page.table("Perplexity").row("magnitude", "2:4")[0] == "not finite"


def test_pictures_say_their_numbers_in_words(sweep):
    page = HtmlPage(sweep / "report.html")
    (alt,) = (
        picture.alt
        for picture in page.pictures
        if picture.alt.startswith("Relative loss, mean over the layers") and "70%" in picture.alt
    )
    found = reports(sweep, "tiny/70-SM-*")
    losses: dict[str, list[float]] = {}
    for row in (row for report in found for row in report["layers"]):
        losses.setdefault(row["block"], []).append(row["relative_loss"])
    (low, least), *_, (high, most) = sorted(
        ((statistics.fmean(of), block) for block, of in losses.items())
    )
    assert f"SM: from {low:.4f} at {least} to {high:.4f} at {most}." in alt


def test_the_page_needs_no_other_file_and_no_script(sweep):
    page = HtmlPage(sweep / "report.html")
    assert all(link.startswith(("#", "data:")) for link in page.links), page.links
    targets = {link[1:] for link in page.links if link.startswith("#")}
    assert targets <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    urls = [url for style in page.styles for url in re.findall(r"url\(([^)]*)\)", style)]
    assert all(url.startswith("#") and url[1:] in page.ids for url in urls)
    assert not {"script", "iframe", "object", "svg"} & set(page.tags)
    assert "@import" not in "".join(page.styles)
    drawn = "".join(picture.svg for picture in page.pictures)
    assert not re.findall(r"<script|<image|\bon\w+=|href=\"[^#]", drawn)


def test_pictures_have_the_colours_of_the_page(sweep):
    page = HtmlPage(sweep / "report.html")
    drawn = "".join(picture.svg for picture in page.pictures)
    style = "".join(page.styles)
    for role, color in {"ink": INK, "muted": MUTED, "rule": RULE}.items():
        assert f"--{role}: {color}" in style  # of light paper
        assert color in drawn
    assert f"--paper: {PAPER}" in style
    for color in SERIES[4:7]:  # of three methods
        assert f"background:{color}" in style
        assert color in drawn


def test_tables_have_headers_and_pictures_a_text(sweep):
    page = HtmlPage(sweep / "report.html")
    assert page.tables
    for table in page.tables:
        assert table.caption
        assert set(table.scopes) <= {"col", "row", "rowgroup"}
    assert page.pictures
    assert all(len(picture.alt) > 40 for picture in page.pictures)


def test_the_same_runs_give_the_same_page(tmp_path, save_run):
    save_run(tmp_path)
    assert page_of(tmp_path).source == page_of(tmp_path).source


def test_names_may_hold_anything(tmp_path, save_run, save_perplexity, layer):
    names = [f"model.{EVIL}.{block}.{EVIL}" for block in range(2)]
    rows = [layer(name) for name in names]
    run = tmp_path / "a<b>&$x$"
    save_run(run, layers=rows, targets=[EVIL], method="wanda+M")
    save_perplexity(run, **{EVIL: 7.0})
    save_perplexity(tmp_path / "dense", EVIL, **{EVIL: 6.0})
    page = page_of(tmp_path, "--title", EVIL)
    assert "onerror" not in page.attributes
    assert page.text.count(EVIL) > 3
    assert page.table("Layers of").rows[2][0] == names[1]
    assert any(EVIL in picture.alt for picture in page.pictures)


def test_skipped_layers_are_shown_with_their_reason(tmp_path, save_run, layer):
    rows = [
        LayerReport(name=f"{block}.gate", shape=(4, 16), skipped="it routes tokens", block=block)
        for block in ("m.layers.0", "m.layers.1", "m.layers.2")
    ]
    rows += [layer(f"m.layers.{i}.up") for i in range(3)]
    save_run(tmp_path, layers=rows)
    page = page_of(tmp_path)
    table = page.table("Layers that were left dense")
    assert table.row("m.layers.*.gate", "it routes tokens") == ["3"]
    assert "3 left dense" in page.text


def test_encoder_and_decoder_stand_side_by_side(tmp_path, save_run, layer):
    stacks = ("encoder.layers", "decoder.layers")
    rows = [layer(f"{stack}.{i}.fc1") for stack in stacks for i in range(2)]
    rows.append(layer("lm_head"))
    save_run(tmp_path, layers=rows)
    drawn = "".join(picture.svg for picture in page_of(tmp_path).pictures)
    assert all(f">{name}<" in drawn for name in ("encoder.layers.0", "decoder.layers.1", "others"))


def test_layers_of_too_many_runs_are_left_to_the_reports(tmp_path, save_run):
    for seed in range(4):
        save_run(tmp_path / f"run{seed}", blocks=200, seed=seed)
    page = page_of(tmp_path)
    assert "The 2,400 layers of these runs are in their reports" in page.text
    assert not [table for table in page.tables if table.caption.startswith("Layers of")]


def test_a_dense_model_alone_has_a_page(tmp_path, save_perplexity):
    save_perplexity(tmp_path, "facebook/opt-125m", wikitext2=27.65)
    page = page_of(tmp_path)
    assert page.table("Perplexity").row("dense")[0] == "27.650"


def test_what_was_done_to_blocks_is_listed(tmp_path, save_run):
    report = save_run(tmp_path, target="dense")
    report.blocks = [
        BlockReport(
            name=f"model.layers.{i}",
            sparsity=0.6 + i / 10,
            error_before=0.02 * (i + 1),
            error_after=0.01 * (i + 1),
            epoch=i,
            seconds=3.25,
        )
        for i in range(3)
    ]
    report.layers[1] = replace(report.layers[1], target=TargetReport(loss=0.125))
    report.layers[2] = replace(report.layers[2], target=TargetReport(own="rows do not pair"))
    report.cpu_seconds, report.peak_rss = 123.4, 3 * 2**30
    report.save(tmp_path)
    page = page_of(tmp_path)
    table = page.table("Blocks of")
    assert table.rows[0] == ["block", "sparsity", "error before", "error after", "epoch", "seconds"]
    assert table.row("model.layers.2", "2:4, SM") == ["80%", "0.0600", "0.0300", "2", "3.2"]
    assert "1 of 9 layers kept their own target." in page.text
    layers = page.table("Layers of")
    assert layers.row(report.layers[1].name)[layers.rows[0].index("target loss") - 1] == "0.125"
    own = layers.row(report.layers[2].name)[layers.rows[0].index("target own") - 1]
    assert own == "rows do not pair"
    assert {"123.4", "3.00 GiB"} <= set(page.table("Runs").rows[2])


def test_the_command_that_makes_the_page_again_is_on_it(tmp_path, save_run):
    run = tmp_path / "my run"
    save_run(run)
    text = page_of(run, "--title", "It's").text
    (command,) = re.findall(r"to make it again: (.*)", text)
    assert shlex.split(command) == [*("mrp-lightning", "report", str(run), "--title", "It's")]
