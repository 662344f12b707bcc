"""`predict` of a LightningModule and a LightningDataModule of the user's own."""

import json
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from mrp_lightning.commands.main import main
from mrp_lightning.embedded import STDLIB_LLAMA

SOURCE = """
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch.utils.data import DataLoader


def windows(number):
    return DataLoader(torch.arange(3, 3 + 16 * number).view(number, 16), batch_size=2)


class Mine(LightningModule):
    def __init__(self, width: int):
        super().__init__()
        self.table = torch.nn.Embedding(256, width)
        block = lambda: torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Tanh())
        self.blocks = torch.nn.ModuleList(block() for _ in range(2))

    def predict_step(self, batch, batch_idx):
        hidden = self.table(batch)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


class WithData(Mine):
    def predict_dataloader(self):
        return windows(3)


class Windows(LightningDataModule):
    def __init__(self, number: int = 2):
        super().__init__()
        self.number = number

    def predict_dataloader(self):
        return windows(self.number)
"""

TRAINER = [
    *("--trainer.accelerator=cpu", "--trainer.logger=false"),
    *("--trainer.callbacks=callbacks.MRPCallback", "--trainer.callbacks.pattern=2:4"),
    "--trainer.callbacks.save_dir=out",
]


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """A directory with the user's module, where the command is started."""
    (tmp_path / "of_hers.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "of_hers", raising=False)
    return tmp_path


def tokens() -> set[int]:
    """How many tokens the layers saw, which are 2:4 on disk."""
    weights = load_file("out/model.safetensors")
    for k in range(2):
        assert ((weights[f"blocks.{k}.0.weight"].reshape(-1, 4) == 0).sum(1) == 2).all()
    report = json.loads(Path("out/pruning_report.json").read_text())
    return {row["tokens"] for row in report["layers"]}


def test_classes_on_the_command_line(here):
    model = ["--model.class_path", "of_hers.Mine", "--model.init_args.width", "8"]
    main(["predict", *model, "--data.class_path=of_hers.Windows", "--data.number=4", *TRAINER])
    assert tokens() == {4 * 16}


def test_classes_in_yaml(here):
    Path("run.yaml").write_text(
        "model: {class_path: of_hers.Mine, init_args: {width: 8}}\n"
        "data: {class_path: of_hers.Windows, init_args: {number: 5}}\n"
    )
    main(["predict", "--config=run.yaml", *TRAINER])
    assert tokens() == {5 * 16}


def test_a_module_with_data_of_its_own(here):
    main(["predict", "--model.class_path=of_hers.WithData", "--model.width=8", *TRAINER])
    assert tokens() == {3 * 16}


def test_a_module_on_text(here):
    Path("text.txt").write_text("value = compute(7)\n" * 400)
    text = ["--data.train_files=text.txt", "--data.num_samples=2", "--data.sequence_length=16"]
    tokenizer = f"--data.tokenizer={STDLIB_LLAMA}"
    model = ["--model.class_path=of_hers.Mine", "--model.width=8"]
    with pytest.raises(IndexError):  # its table has 256 tokens, the tokenizer more: it runs on text
        main(["predict", *model, *text, tokenizer, *TRAINER])


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("class_path: of_hers.Mne", "of_hers.Mne"),
        ("class_path: of_his.Mine", "of_his.Mine"),
        ("class_path: of_hers.Mine\n  init_args: {wdth: 8}", "wdth"),
    ],
)
def test_mistakes(lines, message, here, capsys):
    Path("run.yaml").write_text(f"model:\n  {lines}\n")
    with pytest.raises(SystemExit) as stop:
        main(["predict", "--config=run.yaml", *TRAINER])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
