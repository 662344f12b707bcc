"""The Trainer's arguments and its checkpoints."""

import resource
import tracemalloc

import families
import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import BatchSampler, DataLoader
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    MusicgenConfig,
    MusicgenForConditionalGeneration,
)

from callbacks import MRPCallback
from mrp_lightning import CausalLM, Trainer
from mrp_lightning.errors import DataError, SaveError
from mrp_lightning.loop.trainer import TensorsOnly

OTHER = {"__module__": "pytorch_lightning.core"}
"""What makes a class one of the other package, which need not be installed here."""


@pytest.fixture
def trainer() -> Trainer:
    return Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)


class Mine(type("LightningModule", (nn.Module,), OTHER)):
    """A user's module, of a base class of the other package."""


@pytest.mark.parametrize("argument", ["model", "datamodule", "dataloaders"])
def test_a_module_or_data_of_the_other_lightning_are_refused(argument, trainer):
    data = type("Data", (), OTHER)()
    given = {"model": nn.Linear(2, 2)} | {argument: Mine() if argument == "model" else data}
    message = rf"`{argument}`.*(Mine|Data) of `pytorch_lightning`.*lightning\.pytorch"
    with pytest.raises(TypeError, match=message):
        trainer.predict(**given)


def test_callbacks_of_the_other_lightning_are_refused(trainer):
    other, mine = type("EarlyStopping", (), OTHER)(), Callback()
    with pytest.raises(TypeError, match=r"Got the class MRPCallback: make .*`MRPCallback\(…\)`"):
        Trainer(callbacks=[MRPCallback])
    for given in (other, [mine, other]):
        with pytest.raises(TypeError, match="Got EarlyStopping of `pytorch_lightning`"):
            Trainer(accelerator="cpu", callbacks=given)
        with pytest.raises(TypeError, match="Got EarlyStopping of `pytorch_lightning`"):
            trainer.predict(nn.Linear(2, 2), callbacks=given)
    assert mine in Trainer(accelerator="cpu", logger=False, callbacks=mine).callbacks


def test_a_callback_that_is_named_twice_is_one(trainer):
    class Counting(Callback):
        runs = 0

        def on_predict_start(self, *_):
            self.runs += 1

    class Module(LightningModule):
        def forward(self, x):
            return x

    callback = Counting()
    trainer.predict(Module(), [torch.zeros(1)], callbacks=[callback, callback])
    assert callback.runs == 1


@pytest.mark.parametrize("run", ["predict", "test"])
def test_dataloaders_are_as_before_where_one_cannot_be_made(run, trainer):
    class Data(LightningDataModule):
        def predict_dataloader(self):
            return DataLoader([], -1)

        test_dataloader = predict_dataloader

    kinds = (DataLoader, BatchSampler)
    before = [(kind.__init__, kind.__setattr__, kind.__delattr__) for kind in kinds]
    model = CausalLM(families.build("llama"))
    with pytest.raises(ValueError, match="batch_size should be a positive"):
        getattr(trainer, run)(model, datamodule=Data())
    assert [(kind.__init__, kind.__setattr__, kind.__delattr__) for kind in kinds] == before
    batches = DataLoader(torch.arange(3, 19).view(2, 8), 2)  # refused by Lightning if wrapped
    assert len(trainer.predict(model, batches)) == 1


def test_an_encoder_decoder_is_called_with_its_own_entries(trainer):
    sizes = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32}
    sizes |= {"num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
    config = AutoConfig.for_model("t5", **sizes)
    model = AutoModelForSeq2SeqLM.from_config(config).eval()
    ids = torch.arange(4, 36).view(2, 16)
    prune = MRPCallback(pattern="2:4")
    batches = DataLoader([{"input_ids": row, "labels": row.flip(0)} for row in ids], 2)
    trainer.predict(model, batches, callbacks=[prune])
    pruned = {row.name for row in prune.report.pruned}
    assert {name.partition(".")[0] for name in pruned} == {"encoder", "decoder"}
    assert not [row.name for row in prune.report.layers if row.skipped]


def test_a_model_that_sees_is_called_with_its_images(trainer):
    text = {"model_type": "llama", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32}
    text |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    vision = {"model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 32}
    vision |= {"num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 8, "patch_size": 4}
    config = AutoConfig.for_model(
        "llava", text_config=text, vision_config=vision, image_token_index=63
    )
    model = AutoModelForImageTextToText.from_config(config).eval()
    ids = torch.cat([torch.full((4,), 63), torch.arange(1, 13)])
    batch = {"input_ids": ids, "pixel_values": torch.randn(3, 8, 8)}
    prune = MRPCallback(pattern="2:4")
    trainer.predict(model, DataLoader([batch, batch], 2), callbacks=[prune])
    named = [row.name for row in prune.report.pruned]
    assert any("vision_tower" in name for name in named)
    assert any("language_model" in name for name in named)
    with pytest.raises(DataError, match=r"so `pixel_values` of the batch would have no part"):
        trainer.predict(
            CausalLM(model), DataLoader([batch]), callbacks=[MRPCallback(pattern="2:4")]
        )


def test_a_model_of_several_texts_is_pruned(trainer):
    small = {"vocab_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = MusicgenConfig(
        text_encoder={"model_type": "t5", "vocab_size": 64, "d_model": 16, "d_ff": 32}
        | {"d_kv": 8, "num_layers": 1, "num_heads": 2},
        audio_encoder={"model_type": "encodec", "hidden_size": 16, "num_filters": 4}
        | {"codebook_size": 64, "codebook_dim": 16, "upsampling_ratios": [2, 2]},
        decoder={"model_type": "musicgen_decoder", "hidden_size": 16, "ffn_dim": 32}
        | {"num_codebooks": 1, **small},
    )
    ids = torch.arange(3, 35).view(4, 8)
    batches = DataLoader([{"input_ids": row, "decoder_input_ids": row} for row in ids], 2)
    prune = MRPCallback(pattern="2:4")
    model = MusicgenForConditionalGeneration(config).eval()
    trainer.predict(model, batches, callbacks=[prune])
    parts = {row.name.partition(".")[0] for row in prune.report.pruned}
    assert parts == {"text_encoder", "decoder"}


def test_a_lack_of_memory_is_one_to_prune_only_while_something_is_pruned(trainer):
    model = families.build("llama")
    batches, prune = DataLoader(torch.arange(3, 19).view(2, 8), 2), MRPCallback(pattern="2:4")
    trainer.predict(model, batches, callbacks=[prune])

    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    model.register_forward_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        trainer.predict(model, batches, callbacks=[prune])


def test_a_path_is_loaded(trainer, tiny_llama):
    ids = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(0))
    by_path, by_model = (
        trainer.predict(model, DataLoader(ids, batch_size=2))
        for model in (str(tiny_llama), CausalLM(tiny_llama))
    )
    assert torch.equal(by_path[0], by_model[0])
    with pytest.raises(TypeError, match="`model` must be a LightningModule, .* got int"):
        trainer.predict(3, DataLoader(ids, batch_size=2))


def test_a_checkpoint_is_not_held_in_memory_beside_its_content(tmp_path):
    """Lightning's own has it in memory twice before it writes a byte."""
    content = {"state_dict": {"weight": torch.zeros(2**25)}}  # 128 MiB
    file = tmp_path / "new" / "last.ckpt"
    tracemalloc.start()
    try:
        TensorsOnly().save_checkpoint(content, file)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
    assert [path.name for path in file.parent.iterdir()] == ["last.ckpt"]


def test_a_checkpoint_that_cannot_be_written_leaves_the_last_one(tmp_path, monkeypatch):
    io, file = TensorsOnly(), tmp_path / "last.ckpt"
    io.save_checkpoint({"state_dict": {}, "global_step": 1}, file)
    save = torch.save

    def full(content, path):
        save(content, path)
        raise OSError("No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space"):
        io.save_checkpoint({"state_dict": {}, "global_step": 2}, file)
    assert torch.load(file)["global_step"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


def test_a_full_disk_is_named(tmp_path):
    """A limit on the size of files stops torch's writer as a full disk does."""
    file, limits = tmp_path / "last.ckpt", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(SaveError, match=r"last\.ckpt cannot be written: .* Make room"):
            TensorsOnly().save_checkpoint({"state_dict": {"weight": torch.zeros(100_000)}}, file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not any(tmp_path.iterdir())
