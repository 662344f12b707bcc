"""Every block of code in docs/ that a reader would run is run by a test, or is listed here."""

import json
import os
import re
import shlex
import signal
from pathlib import Path

import pytest
import torch
import yaml

from mrp_lightning import TextDataModule
from mrp_lightning.commands.main import main

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
COMMANDS = ("python ", "pip ", "hf ", "lm_eval ", "make ", "mrp-lightning ", "MODEL=")

HOURS = "it takes hours; its code and configuration are tested in tests/experiments and lab"
PROCESSES = "it starts processes; tests/callbacks/test_processes.py starts some like them"
LLAMACPP = "it needs a build of llama.cpp"
SERVED = "it needs vLLM; tests/serving runs its parts"
ALONE = "it measures speed, in minutes, and needs a machine that does nothing else"
INSTALLS = "it installs; tests/package/test_readme.py reads the same line"
NOT_RUN = {
    ("engines.md", "python lab/benchmarks/engine_types.py"): LLAMACPP,
    ("engines.md", "mrp-lightning prune"): SERVED,
    ("gpu.md", "make gpu"): "it is for a GPU; tests/package/test_measuring.py runs its parts",
    ("gpu.md", "pip install torch"): "it downloads a build of torch for a GPU",
    ("index.md", "pip install"): INSTALLS,
    ("large.md", "import lightning"): PROCESSES,
    ("quality.md", "mrp-lightning sweep"): HOURS,
    ("quality.md", "mrp-lightning zeroshot"): HOURS,
    ("evaluate.md", "mrp-lightning sweep"): HOURS,
    ("speed.md", "python lab/benchmarks/quantised.py"): ALONE,
    ("start.md", "pip install"): INSTALLS,
}
"""Page and beginning of the blocks that no test runs, and why."""

DOCS_TEST, PAGES_TEST = "tests/package/test_docs.py", "tests/package/test_site_pages.py"
ZEROSHOT_TEST = "tests/evaluation/test_zeroshot_page.py"
COMMAND_TEST = "tests/evaluation/test_zeroshot_command.py"
FINETUNING_TEST = "tests/package/test_finetuning_page.py"
RUN = {
    ("checkpoint.md", "mrp-lightning layers"): PAGES_TEST,
    ("checkpoint.md", "mrp-lightning prune"): PAGES_TEST,
    ("checkpoint.md", "model:"): PAGES_TEST,
    ("checkpoint.md", "mrp-lightning predict"): PAGES_TEST,
    ("checkpoint.md", "from callbacks import"): PAGES_TEST,
    ("engines.md", "import mrp_sparse"): DOCS_TEST,
    ("engines.md", "mrp-lightning gguf"): DOCS_TEST,
    ("engines.md", "mrp-lightning export"): DOCS_TEST,
    ("evaluate.md", "mrp-lightning test"): PAGES_TEST,
    ("evaluate.md", "mrp-lightning report"): PAGES_TEST,
    ("evaluate.md", "pip install"): ZEROSHOT_TEST,
    ("evaluate.md", "task: my_lambada"): ZEROSHOT_TEST,
    ("evaluate.md", "lm_eval --model hf"): COMMAND_TEST,
    ("evaluate.md", 'python -c "import mrp_sparse;'): COMMAND_TEST,
    ("evaluate.md", "from mrp_lightning import"): ZEROSHOT_TEST,
    ("four-bits.md", "mrp-lightning prune"): DOCS_TEST,
    ("four-bits.md", "from callbacks import"): DOCS_TEST,
    ("gpu.md", "mrp-lightning prune DIR --pattern"): "tests/device/test_gpu_page.py",
    ("gpu.md", "mrp-lightning prune DIR --grid"): "tests/device/test_gpu_page.py",
    ("index.md", "mrp-lightning prune"): PAGES_TEST,
    ("large.md", "mrp-lightning predict --model.model facebook/opt-125m --data"): DOCS_TEST,
    ("large.md", "mrp-lightning predict --model.model facebook/opt-125m --model"): DOCS_TEST,
    ("large.md", "mrp-lightning report"): DOCS_TEST,
    ("large.md", "from callbacks import"): DOCS_TEST,
    ("methods.md", "from callbacks import"): DOCS_TEST,
    ("methods.md", "mrp-lightning predict"): DOCS_TEST,
    ("module.md", "import lightning"): PAGES_TEST,
    ("module.md", "import torch"): "tests/families/test_encoder_example.py",
    ("module.md", "mrp-lightning predict"): FINETUNING_TEST,
    ("module.md", "from callbacks import"): FINETUNING_TEST,
    ("narrower.md", "from callbacks import"): DOCS_TEST,
    ("reference.md", "model:"): PAGES_TEST,
    ("reference.md", "from safetensors"): PAGES_TEST,
    ("self-calibration.md", "from callbacks import"): DOCS_TEST,
    ("self-calibration.md", "data:"): DOCS_TEST,
    ("start.md", "MODEL="): PAGES_TEST,
    ("start.md", "mrp-lightning layers"): PAGES_TEST,
    ("start.md", "mrp-lightning export"): PAGES_TEST,
}
"""Page and beginning of the other blocks, and the test that reads them from the page."""

MOST_PAGES, MOST_WORDS, MOST_TABLES = 20, 900, 2


def blocks(page: str) -> list[str]:
    """The blocks of a page that a reader would run: Python, YAML and commands."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", (DOCS / page).read_text(), flags=re.M | re.S)
    return [text for kind, text in found if kind in ("python", "yaml") or text.startswith(COMMANDS)]


def block(page: str, beginning: str) -> str:
    (found,) = (text for text in blocks(page) if text.startswith(beginning))
    return found.replace("\\\n", " ") if found.startswith(COMMANDS) else found


def words(line: str) -> list[str]:
    """A command's arguments after `mrp-lightning`."""
    program, *arguments = shlex.split(line)
    assert program == "mrp-lightning"
    return arguments


def prose(page: Path) -> str:
    """The text of a page without blocks of code, formulas and addresses of links."""
    text = re.sub(r"^```.*?^```$|^\$\$.*?^\$\$$", "", page.read_text(), flags=re.M | re.S)
    return re.sub(r"\]\([^)]*\)", "]", text)


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.stem)
def test_a_page_is_short(page):
    lines = page.read_text().splitlines()
    tables = [line for line in lines if re.fullmatch(r"\|[ :|-]+\|", line)]
    assert len(tables) <= MOST_TABLES
    assert len(prose(page).split()) <= MOST_WORDS


def test_the_pages_are_few():
    assert len(list(DOCS.rglob("*.md"))) <= MOST_PAGES


def test_a_model_writes_its_own_text_as_the_page_says(tiny_llama, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "DIR").symlink_to(tiny_llama)
    code = block("self-calibration.md", "from callbacks import")
    exec(code.replace("num_samples=128, sequence_length=2048", "num_samples=4, sequence_length=32"))
    report = json.loads((tmp_path / "DIR-50" / "pruning_report.json").read_text())
    assert report["provenance"]["data"]["source"] == "the model's own text"
    mixed = TextDataModule(**yaml.safe_load(block("self-calibration.md", "data:"))["data"])
    assert mixed.calibration_source == "0.5 the model's own text + 0.5 c4"


def test_a_model_is_made_narrower_and_a_gguf_file_as_the_page_says(
    tiny_llama, tiny_gguf, tmp_path, monkeypatch
):
    from transformers import AutoModelForCausalLM

    monkeypatch.chdir(tmp_path)
    (tmp_path / "DIR").symlink_to(tiny_llama)
    (tmp_path / "SOURCE.gguf").symlink_to(tiny_gguf)
    (tmp_path / "text.txt").write_text("def f(self, x): return [x, None]\nimport list\n" * 52)
    code = block("narrower.md", "from callbacks import")
    code = code.replace("sparsity=0.2", "sparsity=0.5")  # the tiny model has few neurons
    exec(code.replace("num_samples=128, sequence_length=2048", "num_samples=4, sequence_length=32"))
    main(words(block("engines.md", "mrp-lightning gguf")))
    for source in ({}, {"gguf_file": "DIR-narrower-q8_0.gguf"}):
        directory = "." if source else "DIR-narrower"
        model = AutoModelForCausalLM.from_pretrained(directory, **source)
        assert model.config.intermediate_size == 32


def test_a_model_gets_four_bits_as_the_page_says(tiny_llama, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "DIR").symlink_to(tiny_llama)
    (tmp_path / "text.txt").write_text("def f(self, x): return [x, None]\nimport list\n" * 99)
    prune, pack, write = block("four-bits.md", "mrp-lightning prune").splitlines()
    few = ["--text=text.txt", "--num-samples=8", "--sequence-length=32", "--accelerator=cpu"]
    main([*words(prune), *few])
    main(words(pack))
    main([*words(write), "--max-new-tokens=4", "--eager"])
    assert "4 tokens" in capsys.readouterr().out
    code = block("four-bits.md", "from callbacks import")
    exec(code.replace("num_samples=128, sequence_length=2048", "num_samples=4, sequence_length=32"))
    report = json.loads((tmp_path / "DIR-four" / "pruning_report.json").read_text())
    assert report["config"]["bits"] == 4


def test_commands_have_all_that_they_require():
    """`prune` and `generate` accept each command of README and docs, those in its text included."""
    from export import generate
    from mrp_lightning.commands import prune

    text = "".join(page.read_text() for page in (ROOT / "README.md", *sorted(DOCS.glob("*.md"))))
    pattern = r"mrp-lightning (prune|generate) ([^`#\n]+)"
    lines = re.findall(pattern, text.replace("\\\n", " "))
    assert {command for command, _ in lines} == {"prune", "generate"}
    for command, line in lines:
        arguments = shlex.split(line)
        if command == "prune":
            options = prune._parser().parse_args(arguments)
            assert prune._settings(options).recipe, line
        else:
            assert generate._parser().parse_args(arguments).prompt, line


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


def paper_block(beginning: str) -> str:
    """A block of lab/paper.md."""
    text = (ROOT / "lab/paper.md").read_text()
    every = re.findall(r"^```\w*\n(.*?)^```$", text, flags=re.M | re.S)
    (found,) = (block for block in every if block.startswith(beginning))
    return found


def test_the_papers_data_are_those_of_the_configuration(tiny_llama, corpora_dir, here, caplog):
    text = paper_block("data:")
    paper = yaml.safe_load((ROOT / "configs/data/paper.yaml").read_text())
    assert yaml.safe_load(text)["data"] == paper
    Path("data.yaml").write_text(text)
    options = [f"--data.corpora_dir={corpora_dir}", f"--model.model={tiny_llama}", *TINY]
    with caplog.at_level("INFO"):
        main(["test", "--config=data.yaml", *options])
    assert "wikitext2: perplexity" in caplog.text


def test_data_from_local_copies(tiny_llama, corpora_dir, here, caplog):
    Path("corpora").symlink_to(corpora_dir)
    command = paper_block("mrp-lightning test").replace("configs/", f"{ROOT}/configs/")
    with caplog.at_level("INFO"):
        main([*words(command), f"--model.model={tiny_llama}", *TINY])
    assert "c4: perplexity" in caplog.text


def test_a_packed_directory_is_read_as_the_page_says(tiny_llama, here):
    from transformers import AutoModelForCausalLM

    from mrp_lightning.targets.layers import is_linear

    pruned = AutoModelForCausalLM.from_pretrained(tiny_llama)
    with torch.no_grad():
        for name, module in pruned.named_modules():
            if is_linear(module) and name != "lm_head":
                module.weight[torch.rand_like(module.weight) < 0.5] = 0
    pruned.to(torch.float16).save_pretrained("pruned")
    main(["export", "pruned", "--out", "runs/first-bitmask"])
    names: dict = {}
    exec(block("engines.md", "import mrp_sparse"), names)
    weights = names["model"].state_dict()
    assert all(torch.equal(weights[k], v) for k, v in pruned.state_dict().items())


def test_few_bits_for_vllm_as_the_page_says(tmp_path, tiny_llama, here):
    from safetensors import safe_open

    from callbacks import MRPCallback
    from mrp_lightning import CausalLM, Trainer

    Path("text.txt").write_text("def f(self, x): return [x, None]\nimport list\n" * 52)
    data = TextDataModule(train_files="text.txt", num_samples=4, sequence_length=32)
    prune = MRPCallback(grid="int4-g32", save_dir="RUN")
    Trainer(accelerator="cpu", logger=False).predict(
        CausalLM(tiny_llama), datamodule=data, callbacks=[prune]
    )
    main(words(block("engines.md", "mrp-lightning export")))
    (out,) = (path for path in Path().iterdir() if path.name.startswith("RUN-"))
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["format"] == "pack-quantized"
    with safe_open(out / "model.safetensors", "pt") as tensors:
        assert any(name.endswith("weight_packed") for name in tensors.keys())  # noqa: SIM118


def test_a_recipe_prunes(tiny_llama, corpora_dir, here):
    command = block("methods.md", "mrp-lightning predict").replace("configs/", f"{ROOT}/configs/")
    data = [f"--data.corpora_dir={corpora_dir}", "--data.num_samples=8"]
    main([*words(command), f"--model.model={tiny_llama}", *data, *TINY])
    assert Path("runs/opt-125m-best/pruning_report.json").is_file()


def test_the_parts_of_a_method_are_arguments_of_the_callback():
    names: dict = {}
    exec(block("methods.md", "from callbacks import"), names)


def test_an_interrupted_run_is_watched_and_goes_on(tiny_llama, corpora_dir, here, monkeypatch):
    from mrp_lightning.journal.journal import Journal

    pytest.importorskip("matplotlib", reason="needs the extra `report`")
    page = "large.md"
    predict = words(block(page, "mrp-lightning predict --model.model facebook/opt-125m --data"))
    report = words(block(page, "mrp-lightning report"))
    predict += [f"--data.corpora_dir={corpora_dir}", "--data.num_samples=4"]
    predict += [f"--model.model={tiny_llama}", *TINY]
    write, run = Journal.write, Path("runs/opt-125m-50")

    def write_and_stop(self, step, record):
        write(self, step, record)
        os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(Journal, "write", write_and_stop)
        main(predict)
    assert ended.value.code == 143
    main(report)
    journal = Path("runs/.opt-125m-50.partial")
    assert "Unfinished: 1 of 2 blocks" in (journal / "report.html").read_text()
    told = re.findall(r"^\| `([\w.-]+)`", (DOCS / page).read_text(), flags=re.M)
    assert set(told) <= {file.name for file in journal.iterdir()}
    main(predict)
    assert json.loads((run / "pruning_report.json").read_text())["totals"]["resumed_blocks"] == 1
    assert [path.name for path in run.parent.iterdir()] == [run.name]


def test_a_streamed_run_by_command_and_by_call(tiny_llama, corpora_dir, here):
    from safetensors.torch import load_file

    command = block("large.md", "mrp-lightning predict --model.model facebook/opt-125m --model")
    options = [f"--data.corpora_dir={corpora_dir}", "--data.num_samples=4"]
    main([*words(command), *options, f"--model.model={tiny_llama}", *TINY])
    Path("runs/opt-125m-50").rename("by-command")
    code = block("large.md", "from callbacks import")
    quick = "accelerator='cpu', logger=False, limit_test_batches=1"
    for shown, local in {
        "facebook/opt-125m": str(tiny_llama),
        "TextDataModule(": f"TextDataModule(corpora_dir={str(corpora_dir)!r}, num_samples=4,"
        " sequence_length=16, batch_size=8, ",
        "Trainer()": f"Trainer({quick})",
    }.items():
        code = code.replace(shown, local)
    exec(code, {})
    files = sorted(Path("by-command").glob("*.safetensors"))
    assert len(files) == 3
    for file in files:
        other = load_file(Path("runs/opt-125m-50", file.name))
        assert all(torch.equal(tensor, other[name]) for name, tensor in load_file(file).items())


def test_the_method_names_the_functions_that_compute_its_formulas():
    import mrp_lightning.solver.compensations as compensations
    import mrp_lightning.solver.hessian as hessian

    named = re.findall(r"\(`([A-Z]\w+)\.?(\w*)`\)", (DOCS / "method.md").read_text())
    assert len(named) == 4
    for owner, function in named:
        kind = getattr(compensations, owner, None) or getattr(hessian, owner)
        assert hasattr(kind, function) if function else kind.__doc__
