"""The blocks of README and docs run in their order, with a tiny model and little text."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
import yaml
from gguf_files import write
from quiet import QUIET

from mrp_lightning.commands.main import main

for package in ("jsonargparse", "matplotlib", "gguf"):
    pytest.importorskip(package, reason="the pages need the extras `cli`, `report` and `gguf`")

ROOT = Path(__file__).parents[2]
PAGES = {path.name: path.read_text("utf-8") for path in (ROOT / "docs").glob("*.md")}
PAGES |= {
    path.name: path.read_text("utf-8") for path in (ROOT / "README.md", ROOT / "lab/paper.md")
}
JOURNEYS = [  # pages that go on with what another has made
    ("README.md", "evaluate.md"),
    ("checkpoint.md", "reference.md"),
    ("start.md", "smaller.md", "gpu.md", "engines.md"),
]
JOURNEYS += [(page,) for page in sorted({*PAGES} - {*sum(JOURNEYS, ())}) if "```" in PAGES[page]]
ELSEWHERE = {
    "SentenceEncoder": "tests/families/test_encoder_example.py runs it",
    'strategy="ddp"': "tests/callbacks/test_processes.py starts processes like these",
    "task: my_lambada": "tests/zeroshot/test_page.py runs it",
    "records.evaluation": "tests/zeroshot/test_page.py runs it",
    "prune SmolLM2.gguf": "it is the command of a table, and takes a real model",
    "distill both": "a fifth of two blocks is none; tests/distillation does so with others",
}
"""Parts of blocks that are not run here, and why."""
NO_COMMANDS = (
    *("pip ", "make ", "hf ", "vllm serve ", "python ", "lm_eval ", "wikitext2: "),
    *("mrp-lightning sweep ", "mrp-lightning zeroshot ", "mrp-lightning report runs/quickstart"),
)
"""Beginnings of lines that install, fetch, serve or take hours, and of those that are printed."""
SMALL = {
    r"num_samples=\d+": "num_samples=4",
    r'"tokens": 200_000': '"tokens": 1280',
    r"sequence_length=\d+": "sequence_length=64",
    r"max_steps=\d+": "max_steps=1",
    "bf16-mixed": "32-true",  # which many CPUs have no instructions for
    r'calibration="c4"': 'calibration="c4", corpora_dir="corpora"',
    r"(?<!lightning\.)\bTrainer\((?=\)|max)": "Trainer(**QUIET, ",
}
TRAINER = ["--trainer.accelerator=cpu", "--trainer.logger=false", "--data.sequence_length=64"]
TRAINER += ["--data.num_samples=4", "--data.batch_size=4"]
OPTIONS = {
    "prune": ["--num-samples=4", "--sequence-length=64", "--eval-samples=4", "--accelerator=cpu"],
    "generate": ["--max-new-tokens=4"],
    "predict": TRAINER,
    "fit": [*TRAINER, "--trainer.max_steps=2", "--trainer.precision=32-true"],
    "test": [*TRAINER, "--trainer.limit_test_batches=2"],
}
"""What the tests append to a command."""
PUBLISHED = "=c4|configs/models"


def blocks(*pages: str) -> list[tuple[str, str]]:
    """The language and the text of each block, in its order."""
    found = [re.findall(r"^```(\w*)\n(.*?)^```$", PAGES[p], flags=re.M | re.S) for p in pages]
    return [(name, text.replace("\\\n", " ")) for part in found for name, text in part]


def commands(text: str) -> list[list[str]]:
    """The words after `mrp-lightning` of the lines that are run here."""
    lines = [line for line in text.splitlines() if not line.startswith((*NO_COMMANDS, "MODEL="))]
    words = [shlex.split(line, comments=True) for line in lines]
    assert all(line[0] == "mrp-lightning" for line in words if line), text
    return [line[1:] for line in words if line]


@pytest.fixture
def here(write_llama, corpora_dir, short_library, tmp_path, monkeypatch) -> Path:
    """A directory with all that the pages name.

    The model's layers have 128 columns, which all packed formats take.
    """
    monkeypatch.chdir(tmp_path)
    model = write_llama("model", 128)
    for name in ("facebook/opt-125m", "HuggingFaceTB/SmolLM2-135M-Instruct", "DIR", "MODEL"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).symlink_to(model)
    for name in ("text.txt", "mine.txt", "calibration.txt", "test.txt", "FILE.txt"):
        Path(name).write_text("def f(self, x): return [x, None]\nimport list\n" * 200)
    Path("corpora").symlink_to(corpora_dir)
    Path("configs").symlink_to(ROOT / "configs")
    Path("mrp_lightning/embedded").mkdir(parents=True)
    Path("mrp_lightning/embedded/stdlib-llama").symlink_to(model)
    Path("RUN").symlink_to("runs/served")
    Path("runs").mkdir()
    Path("runs/other").symlink_to("half")
    write(Path("SOURCE.gguf"), model)
    return tmp_path


def run(language: str, text: str) -> None:
    """Run a block; a directory that an earlier one wrote under the same name goes first."""
    written = r'(?:save_dir[=:] ?"?|--out )([\w./-]+)'
    for name in re.findall(written, text) if language != "yaml" else ():
        shutil.rmtree(name, ignore_errors=True)
    if language == "python":
        for shown, small in SMALL.items():
            text = re.sub(shown, small, text)
        exec(text, {"QUIET": QUIET})
    elif language == "yaml":
        Path("run.yaml").write_text(text)
        with pytest.raises(SystemExit) as ended:  # all keys are known
            main(["test", "--config=run.yaml", "--model.model=DIR", "--print_config"])
        assert ended.value.code == 0
    elif language in ("", "sh"):
        for words in commands(text):
            words = [word.replace("$MODEL", "MODEL") for word in words]
            words = ["1000" if word == "16000" else word for word in words]  # of 2,048
            corpora = ["--data.corpora_dir=corpora"] * bool(re.search(PUBLISHED, " ".join(words)))
            main([*words, *OPTIONS.get(words[0], ()), *corpora])


@pytest.mark.parametrize("pages", JOURNEYS, ids="-".join)
def test_the_blocks_of_a_page_run(pages, here):
    for language, text in blocks(*pages):
        if not any(part in text for part in ELSEWHERE):
            run(language, text)
    if "reference.md" in pages:  # which lists the files of a run
        rows = "".join(re.findall(r"^\| (`.+?) \|", PAGES["reference.md"], flags=re.M))
        files = {file.name for file in Path("runs/mine").iterdir()}
        assert files <= set(re.findall(r"`(\.?[\w-]+\.\w+)`", rows))


def test_the_model_of_the_first_run_comes_with_the_package(capsys):
    (line,) = re.findall(r'^MODEL=\$\(python -c "(.*)"\)$', PAGES["start.md"], flags=re.M)
    exec(line)
    assert Path(capsys.readouterr().out.strip(), "config.json").is_file()


def test_the_papers_data_are_those_of_the_configuration():
    (text,) = (text for language, text in blocks("paper.md") if language == "yaml")
    paper = yaml.safe_load((ROOT / "configs/data/paper.yaml").read_text())
    assert yaml.safe_load(text)["data"] == paper


def test_commands_within_the_text_have_all_that_they_require():
    from export import generate
    from mrp_lightning.commands import prune

    text = "".join(PAGES.values()).replace("\\\n", " ")
    lines = re.findall(r"mrp-lightning (prune|generate) ([^`#\n]+)", text)
    assert {command for command, _ in lines} == {"prune", "generate"}
    for command, line in lines:
        arguments = shlex.split(line)
        if command == "prune":
            options = prune._parser().parse_args(arguments)
            settings = prune._settings(options)
            assert settings.recipe if options.vocabulary is None else settings is None, line
        else:
            assert generate._parser().parse_args(arguments).prompt, line
