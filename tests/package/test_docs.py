"""Every block of code in docs/ that a reader would run is run by a test, or is listed here."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from mrp_lightning import TextDataModule
from mrp_lightning.commands.main import main

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
COMMANDS = ("python ", "pip ", "hf ", "lm_eval ", "make ", "mrp-lightning ")

HOURS = "it takes hours; its code and configuration are tested in tests/experiments and lab"
HUB = "it downloads from the hub"
GPU = "it takes minutes and is for a GPU; tests/export/test_benchmark.py runs the command"
CUDA = (
    "what it reads is written on a CUDA device; tests/export/test_torchao_format.py does so there"
)
OWN = "the module is the reader's own; tests/export/test_own_module.py loads into one"
SOLVER = "it measures speed, in minutes, against a checkout of SparseGPT"
MEMORY = "it measures memory, in many minutes, and writes gigabytes"
ON_GPU = "it is for a GPU; tests/package/test_measuring.py runs what starts its parts"
WHOLE = "it measures speed, in minutes; tests/package/test_measuring.py runs it on a tiny model"
KILLS = "it takes minutes; tests/faults kills runs at chosen places"
PROCESSES = "it starts processes; tests/callbacks/test_processes.py starts some like them"
PICTURES = "it takes minutes; tests/package/test_pictures.py runs it on a tiny model"
DRAWN = "tests/package/test_pictures.py runs it on a tiny model"
LLAMACPP = "it needs a build of llama.cpp"
ORIGINALS = "it takes minutes; tests/package/test_original_accuracy.py runs it on a tiny model"
ALONE = "it measures speed, in minutes, and needs a machine that does nothing else"
NOT_RUN = {
    ("ablations.md", "python -m mrp_lightning sweep"): HOURS,
    ("bits.md", "python -m mrp_lightning sweep"): HOURS,
    ("frontier.md", "python -m mrp_lightning sweep"): HOURS,
    ("texts.md", "python -m mrp_lightning sweep"): HOURS,
    ("texts-real.md", "python -m mrp_lightning sweep"): HOURS,
    ("real-model.md", "python -m mrp_lightning sweep"): HOURS,
    ("results.md", "python -m mrp_lightning sweep"): HOURS,
    ("real-model.md", "python -m mrp_lightning test"): HOURS,
    ("real-model.md", 'python -c "from mrp_lightning.text'): HOURS,
    ("data.md", "hf download Salesforce/wikitext"): HUB,
    ("format.md", "module = export.load_into"): OWN,
    ("methods.md", "python -m mrp_lightning sweep"): HOURS,
    ("methods.md", "python lab/pictures/methods.py"): PICTURES,
    ("format.md", "import torch\nfrom torch.sparse"): CUDA,
    ("reliability.md", "python lab/benchmarks/kill.py"): KILLS,
    ("processes.md", "import lightning"): PROCESSES,
    ("processes.md", "python -m mrp_lightning predict"): PROCESSES,
    ("paper.md", "python -m mrp_lightning sweep"): HOURS,
    ("method.md", "python lab/pictures/method.py"): DRAWN,
    ("certificate.md", "python lab/pictures/method.py"): DRAWN,
    ("benchmarks/export.md", "python -m pytest tests/export"): GPU,
    ("benchmarks/export.md", "python -m export.benchmark --shape"): GPU,
    ("benchmarks/export.md", "python lab/benchmarks/kernel_code.py"): GPU,
    ("benchmarks/export.md", "make gpu"): ON_GPU,
    ("benchmarks/solver.md", "python lab/benchmarks/solver.py"): SOLVER,
    ("benchmarks/cpu.md", "python lab/benchmarks/cpu.py"): ALONE,
    ("benchmarks/quantised.md", "python lab/benchmarks/quantised.py"): ALONE,
    ("benchmarks/quantised-1b.md", "python lab/benchmarks/quantised.py"): ALONE,
    ("benchmarks/originals.md", "python lab/benchmarks/original_accuracy.py"): ORIGINALS,
    ("benchmarks/processes.md", "python lab/benchmarks/processes.py"): ALONE,
    ("narrower.md", "python -m mrp_lightning sweep"): HOURS,
    ("narrower.md", "python lab/benchmarks/narrower_speed.py"): LLAMACPP,
    ("gguf.md", "python lab/benchmarks/llamacpp.py"): LLAMACPP,
    ("streaming.md", "python lab/benchmarks/streaming.py"): MEMORY,
    ("benchmarks/solver.md", "make gpu"): ON_GPU,
    ("gpu.md", "make gpu"): ON_GPU,
    ("gpu.md", "pip install torch"): "it downloads a build of torch for a GPU",
    ("benchmarks/whole-run.md", "python lab/benchmarks/whole_run.py"): WHOLE,
    ("benchmarks/whole-run.md", "python -m mrp_lightning predict"): ALONE,
}
"""Page and beginning of the blocks that no test runs, and why."""

RUN = {
    ("start.md", "mrp-lightning prune"): "tests/package/test_site_pages.py",
    ("start.md", "python -m mrp_lightning layers"): "tests/package/test_site_pages.py",
    ("start.md", "python -m export.to_sparse"): "tests/package/test_site_pages.py",
    ("checkpoint.md", "python -m mrp_lightning layers"): "tests/package/test_site_pages.py",
    ("checkpoint.md", "model:"): "tests/package/test_site_pages.py",
    ("checkpoint.md", "python -m mrp_lightning predict"): "tests/package/test_site_pages.py",
    ("files.md", "from safetensors"): "tests/package/test_site_pages.py",
    ("yaml.md", "model:"): "tests/package/test_site_pages.py",
    ("module.md", "import lightning"): "tests/package/test_site_pages.py",
    ("data.md", "data:"): "tests/package/test_docs.py",
    ("data.md", "python -m mrp_lightning test"): "tests/package/test_docs.py",
    ("encoders.md", "import torch"): "tests/families/test_encoder_example.py",
    ("finetuning.md", "python -m mrp_lightning predict"): "tests/package/test_finetuning_page.py",
    ("finetuning.md", "python -m mrp_lightning test"): "tests/package/test_finetuning_page.py",
    ("finetuning.md", "python -m export.to_sparse"): "tests/package/test_finetuning_page.py",
    ("finetuning.md", "from callbacks import"): "tests/package/test_finetuning_page.py",
    ("format.md", "import export"): "tests/package/test_docs.py",
    ("format.md", "import numpy"): "tests/export/test_sparse24_format.py",
    ("methods.md", "from callbacks import"): "tests/package/test_docs.py",
    ("methods.md", "python -m mrp_lightning predict"): "tests/package/test_docs.py",
    ("models.md", "python lab/benchmarks/models.py"): "tests/families/test_models_page.py",
    ("narrower.md", "from callbacks import"): "tests/package/test_docs.py",
    ("gguf.md", "python -m export.to_gguf"): "tests/package/test_docs.py",
    ("gpu.md", "mrp-lightning prune DIR --pattern"): "tests/device/test_gpu_page.py",
    ("gpu.md", "mrp-lightning prune DIR --grid"): "tests/device/test_gpu_page.py",
    ("four-bits.md", "mrp-lightning prune"): "tests/package/test_docs.py",
    ("four-bits.md", "from callbacks import"): "tests/package/test_docs.py",
    ("real-model.md", "python -m mrp_lightning predict"): "tests/package/test_docs.py",
    ("reliability.md", "python -m mrp_lightning predict"): "tests/package/test_docs.py",
    ("reliability.md", "python -m mrp_lightning report"): "tests/package/test_docs.py",
    ("self-calibration.md", "from callbacks import"): "tests/package/test_docs.py",
    ("self-calibration.md", "data:"): "tests/package/test_docs.py",
    ("streaming.md", "python -m mrp_lightning predict"): "tests/package/test_docs.py",
    ("streaming.md", "from callbacks import"): "tests/package/test_docs.py",
    ("texts-real.md", 'python -c "import json;'): "tests/package/test_docs.py",
    ("zeroshot.md", "pip install 'mrp-lightning"): "tests/evaluation/test_zeroshot_page.py",
    ("zeroshot.md", "task: my_lambada"): "tests/evaluation/test_zeroshot_page.py",
    ("zeroshot.md", "lm_eval --model hf"): "tests/evaluation/test_zeroshot_command.py",
    ("zeroshot.md", 'python -c "import export;'): "tests/evaluation/test_zeroshot_command.py",
    ("zeroshot.md", "from mrp_lightning import"): "tests/evaluation/test_zeroshot_page.py",
}
"""Page and beginning of the other blocks, and the test that reads them from the page."""


def blocks(page: str) -> list[str]:
    """The blocks of a page that a reader would run: Python, YAML and commands."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", (DOCS / page).read_text(), flags=re.M | re.S)
    return [text for kind, text in found if kind in ("python", "yaml") or text.startswith(COMMANDS)]


def block(page: str, beginning: str) -> str:
    (found,) = (text for text in blocks(page) if text.startswith(beginning))
    return found


def test_a_model_writes_its_own_text_as_the_page_says(tiny_llama, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "DIR").symlink_to(tiny_llama)
    code = block("self-calibration.md", "from callbacks import")
    exec(code.replace("num_samples=128, sequence_length=2048", "num_samples=4, sequence_length=32"))
    report = json.loads((tmp_path / "DIR-2of4" / "pruning_report.json").read_text())
    assert report["provenance"]["data"]["source"] == "the model's own text"
    mixed = TextDataModule(**yaml.safe_load(block("self-calibration.md", "data:"))["data"])
    assert mixed.calibration_source == "0.5 the model's own text + 0.5 c4"


def test_a_model_is_made_narrower_and_a_gguf_file_as_the_page_says(
    tiny_llama, tiny_gguf, tmp_path, monkeypatch
):
    from transformers import AutoModelForCausalLM

    from export.to_gguf import main as to_gguf

    monkeypatch.chdir(tmp_path)
    (tmp_path / "DIR").symlink_to(tiny_llama)
    (tmp_path / "SOURCE.gguf").symlink_to(tiny_gguf)
    (tmp_path / "text.txt").write_text("def f(self, x): return [x, None]\nimport list\n" * 52)
    code = block("narrower.md", "from callbacks import")
    exec(code.replace("num_samples=128, sequence_length=2048", "num_samples=4, sequence_length=32"))
    to_gguf(shlex.split(block("gguf.md", "python -m export.to_gguf"))[3:])
    for source in ({}, {"gguf_file": "DIR-narrower-q8_0.gguf"}):
        directory = "." if source else "DIR-narrower"
        model = AutoModelForCausalLM.from_pretrained(directory, **source)
        assert model.config.intermediate_size == 32


def test_a_model_gets_four_bits_as_the_page_says(tiny_llama, tmp_path, monkeypatch, capsys):
    from export.generate import main as generate
    from export.to_sparse import main as to_sparse
    from mrp_lightning.commands.main import main

    monkeypatch.chdir(tmp_path)
    (tmp_path / "DIR").symlink_to(tiny_llama)
    (tmp_path / "text.txt").write_text("def f(self, x): return [x, None]\nimport list\n" * 99)
    prune, pack, write = block("four-bits.md", "mrp-lightning prune").splitlines()
    few = ["--text=text.txt", "--num-samples=8", "--sequence-length=32", "--accelerator=cpu"]
    main([*shlex.split(prune)[1:], *few])
    to_sparse(shlex.split(pack)[3:])
    generate([*shlex.split(write)[3:], "--max-new-tokens=4", "--eager"])
    assert "4 tokens" in capsys.readouterr().out
    code = block("four-bits.md", "from callbacks import")
    exec(code.replace("num_samples=128, sequence_length=2048", "num_samples=4, sequence_length=32"))
    report = json.loads((tmp_path / "DIR-four" / "pruning_report.json").read_text())
    assert report["config"]["bits"] == 4


def test_stories_are_made_as_the_page_says(tmp_path):
    lines = [
        '{"context": "A cat sat on the", "continuation": "mat"}',
        '{"context": "é", "continuation": "b"}',
    ]
    (tmp_path / "lambada_openai.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "runs").mkdir()
    command = block("texts-real.md", 'python -c "import json;')
    subprocess.run(
        command.replace("python", sys.executable, 1), shell=True, cwd=tmp_path, check=True
    )
    assert (tmp_path / "runs" / "stories.txt").read_text() == "A cat sat on the mat\n\né b"


def test_every_block_is_run_or_listed():
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    listed = {**RUN, **NOT_RUN}
    unlisted = [
        (page, text.splitlines()[0])
        for page in sorted(pages)
        for text in blocks(page)
        if not any(page == name and text.startswith(start) for name, start in listed)
    ]
    assert not unlisted, "run these blocks in a test and enter them in RUN"
    gone = [key for key in listed if not any(text.startswith(key[1]) for text in blocks(key[0]))]
    assert not gone
    for (page, _), test in RUN.items():
        assert Path(page).name in (ROOT / test).read_text(), (page, test)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


TINY = ["--data.sequence_length=16", "--data.batch_size=8", "--trainer.limit_test_batches=1"]
TINY += ["--trainer.accelerator=cpu", "--trainer.logger=false"]


def test_the_papers_data_are_those_of_the_configuration(tiny_llama, corpora_dir, here, caplog):
    text = block("data.md", "data:")
    paper = yaml.safe_load((ROOT / "configs/data/paper.yaml").read_text())
    assert yaml.safe_load(text)["data"] == paper
    Path("data.yaml").write_text(text)
    options = [f"--data.corpora_dir={corpora_dir}", f"--model.model={tiny_llama}", *TINY]
    with caplog.at_level("INFO"):
        main(["test", "--config=data.yaml", *options])
    assert "wikitext2: perplexity" in caplog.text


def test_data_from_local_copies(tiny_llama, corpora_dir, here, caplog):
    Path("corpora").symlink_to(corpora_dir)
    command = block("data.md", "python -m mrp_lightning test")
    command = command.replace("configs/", f"{ROOT}/configs/")
    with caplog.at_level("INFO"):
        main([*shlex.split(command)[3:], f"--model.model={tiny_llama}", *TINY])
    assert "c4: perplexity" in caplog.text


def test_a_packed_directory_is_read_as_format_md_says(tiny_llama, here):
    from transformers import AutoModelForCausalLM

    from export.to_sparse import main as to_sparse
    from mrp_lightning.solver.patterns import SemiStructured
    from mrp_lightning.targets.layers import is_linear

    pruned = AutoModelForCausalLM.from_pretrained(tiny_llama)
    with torch.no_grad():
        for name, module in pruned.named_modules():
            if is_linear(module) and name != "lm_head":
                module.weight[SemiStructured(2, 4).select(module.weight.abs(), 0)] = 0
    pruned.to(torch.float16).save_pretrained("pruned")
    to_sparse(["pruned", "--out", "runs/quickstart-sparse24"])
    names: dict = {}
    exec(block("format.md", "import export"), names)
    weights = names["model"].state_dict()
    assert all(torch.equal(weights[k], v) for k, v in pruned.state_dict().items())


def test_three_commands_for_any_directory(tiny_llama, here):
    from transformers import AutoModelForCausalLM

    from export.to_sparse import main as to_sparse

    Path("DIR").symlink_to(tiny_llama)
    commands = block("real-model.md", "python -m mrp_lightning predict").replace("\\\n", " ")
    predict, test, pack = (shlex.split(line)[3:] for line in commands.splitlines())
    main([*predict, "--data.num_samples=4", "--model.dtype=bfloat16", *TINY])
    main([*test, *TINY])
    to_sparse(pack)
    packed = AutoModelForCausalLM.from_pretrained("DIR-2of4-sparse24")
    assert packed.config.quantization_config.quant_method == "mrp_sparse24"


def test_a_recipe_prunes(tiny_llama, corpora_dir, here):
    command = block("methods.md", "python -m mrp_lightning predict").replace("\\\n", " ")
    command = command.replace("configs/", f"{ROOT}/configs/")
    data = [f"--data.corpora_dir={corpora_dir}", "--data.num_samples=8"]
    main([*shlex.split(command)[3:], f"--model.model={tiny_llama}", *data, *TINY])
    assert Path("runs/opt-125m-best/pruning_report.json").is_file()


def test_the_parts_of_a_method_are_arguments_of_the_callback():
    names: dict = {}
    exec(block("methods.md", "from callbacks import"), names)


def test_an_interrupted_run_is_watched_and_goes_on(tiny_llama, corpora_dir, here, monkeypatch):
    from mrp_lightning.journal.journal import Journal

    pytest.importorskip("matplotlib", reason="needs the extra `report`")
    page = "reliability.md"
    predict, report = (
        shlex.split(block(page, f"python -m mrp_lightning {command}").replace("\\\n", " "))[3:]
        for command in ("predict", "report")
    )
    predict += [f"--data.corpora_dir={corpora_dir}", "--data.num_samples=4"]
    predict += [f"--model.model={tiny_llama}", *TINY]
    write, run = Journal.write, Path("runs/opt-125m-2of4")

    def write_and_stop(self, step, record):
        write(self, step, record)
        os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(Journal, "write", write_and_stop)
        main(predict)
    assert ended.value.code == 143
    main(report)
    journal = Path("runs/.opt-125m-2of4.partial")
    assert "Unfinished: 1 of 2 blocks" in (journal / "report.html").read_text()
    told = re.findall(r"^\| `([\w.-]+)`", (DOCS / page).read_text(), flags=re.M)
    assert set(told) <= {file.name for file in journal.iterdir()}
    main(predict)
    assert json.loads((run / "pruning_report.json").read_text())["totals"]["resumed_blocks"] == 1
    assert [path.name for path in run.parent.iterdir()] == [run.name]


def test_a_streamed_run_by_command_and_by_call(tiny_llama, corpora_dir, here):
    from safetensors.torch import load_file

    command = block("streaming.md", "python -m mrp_lightning predict").replace("\\\n", " ")
    options = [f"--data.corpora_dir={corpora_dir}", "--data.num_samples=4"]
    main([*shlex.split(command)[3:], *options, f"--model.model={tiny_llama}", *TINY])
    Path("runs/opt-125m-2of4").rename("by-command")
    code = block("streaming.md", "from callbacks import")
    quick = "accelerator='cpu', logger=False, limit_test_batches=1"
    for words, here_words in {
        "facebook/opt-125m": str(tiny_llama),
        "TextDataModule(": f"TextDataModule(corpora_dir={str(corpora_dir)!r}, num_samples=4,"
        " sequence_length=16, batch_size=8, ",
        "Trainer()": f"Trainer({quick})",
    }.items():
        code = code.replace(words, here_words)
    exec(code, {})
    files = sorted(Path("by-command").glob("*.safetensors"))
    assert len(files) == 3
    for file in files:
        other = load_file(Path("runs/opt-125m-2of4", file.name))
        assert all(torch.equal(tensor, other[name]) for name, tensor in load_file(file).items())
