"""Bad input, and runs that end early."""

import signal

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.nn.utils import prune
from torch.utils.data import DataLoader, Dataset, IterableDataset

from callbacks import MRPCallback, PruningCallback
from mrp_lightning import CausalLM, Trainer
from mrp_lightning.errors import (
    DataError,
    HessianError,
    JournalError,
    OutOfMemoryError,
    PatternError,
    StrategyError,
    TargetError,
)


def test_arguments_are_keywords_and_the_method_is_required():
    with pytest.raises(TypeError):
        MRPCallback("2:4")
    with pytest.raises(TypeError, match="method"):
        PruningCallback(pattern="2:4")


@pytest.mark.parametrize(
    ("name", "meant"), [("sparsty", "sparsity"), ("savedir", "save_dir"), ("layers", "There are")]
)
def test_an_unknown_argument_is_refused_with_the_nearest_one(name, meant):
    with pytest.raises(TypeError, match=f"MRPCallback has no argument `{name}`.*{meant}"):
        MRPCallback(**{name: 0.5})


@pytest.fixture
def refused(llama, loader, quiet):
    """Runs a callback that must be refused before any batch is read."""

    def run(error, message, model=None, **arguments):
        module = CausalLM(llama()) if model is None else model
        before = [p.clone() for p in module.parameters()]

        class Unread(Dataset):
            def __len__(self):
                return 1

            def __getitem__(self, index):
                raise AssertionError("work had started")

        with pytest.raises(error, match=message):
            Trainer(**quiet).predict(
                module, DataLoader(Unread()), callbacks=[MRPCallback(**arguments)]
            )
        assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))

    return run


def test_targets_that_match_nothing(refused):
    message = r"(?s)`targets` matched nothing.*'q_porj' \(nearest names:.*q_proj"
    refused(TargetError, message, pattern="2:4", targets=["q_porj", "k_proj"])
    refused(TargetError, "`ignore` matched nothing", pattern="2:4", ignore=["down_porj"])
    names = r"nearest names: act_fn, down_proj"  # each a name
    refused(TargetError, names, pattern="2:4", ignore=["zzzzzzzzzzz"])
    refused(
        TargetError, "`blocks` matched nothing.*model.layers", pattern="2:4", blocks=["model.layer"]
    )
    refused(TargetError, "leave none", pattern="2:4", targets=["mlp"], ignore=["layers"])


def test_layers_that_the_pattern_does_not_divide(refused, llama, loader, quiet):
    model = llama(intermediate_size=50)
    unfit = r"layers\.\*\.mlp\.down_proj \(2 layers\): 50 input"
    message = rf"(?s)does not fit 2 layers.*skip_indivisible.*{unfit}"
    refused(PatternError, message, model=CausalLM(model), pattern="2:4")
    callback = MRPCallback(pattern="2:4", skip_indivisible=True)
    Trainer(**quiet).predict(model, loader, callbacks=callback)
    skipped = {row.name: row.skipped for row in callback.report.layers if row.skipped}
    assert list(skipped) == [f"model.layers.{k}.mlp.down_proj" for k in (0, 1)]
    assert "50 input features" in skipped["model.layers.0.mlp.down_proj"]


def test_weights_that_are_not_plain_are_listed(refused, llama):
    model = llama()
    first, second = (layer.self_attn for layer in model.model.layers)
    nn.utils.parametrizations.weight_norm(first.q_proj)
    first.k_proj.weight = nn.Parameter(first.k_proj.weight.to("meta"))
    second.q_proj.weight = nn.Parameter(second.q_proj.weight.to(torch.float8_e4m3fn))
    second.v_proj.lora_a = nn.Parameter(torch.zeros(1))

    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("qweight", torch.zeros(4, 4, dtype=torch.int32))

    second.o_proj = Packed()
    message = (
        r"(?s)5 layers.*layers\.0\.self_attn\.q_proj: it is parametrized"
        r".*layers\.0\.self_attn\.k_proj: its weight is on the meta device"
        r".*layers\.1\.self_attn\.q_proj: its weight is torch\.float8"
        r".*layers\.1\.self_attn\.v_proj: it has parameters beyond"
        r".*layers\.1\.self_attn\.o_proj: it is a packed Packed"
    )
    with pytest.raises(TargetError, match=message):
        MRPCallback(pattern="2:4").setup(Trainer(accelerator="cpu"), CausalLM(model), "predict")
    MRPCallback(pattern="2:4", ignore=["self_attn"]).setup(
        Trainer(accelerator="cpu"), CausalLM(model), "predict"
    )


def test_adapters_are_refused(refused, llama):
    class LoRA(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base_layer = base
            self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, 2)})

    model = llama()
    model.model.layers[0].self_attn.q_proj = LoRA(model.model.layers[0].self_attn.q_proj)
    message = r"1 layer to prune.*\n.*q_proj: it is wrapped by an adapter; call merge_and_unload"
    refused(TargetError, message, model=CausalLM(model), pattern="2:4")


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        (lambda layer: prune.l1_unstructured(layer, "weight", 0.5), prune.remove),
        (nn.utils.weight_norm, nn.utils.remove_weight_norm),
        (nn.utils.spectral_norm, nn.utils.remove_spectral_norm),
    ],
)
def test_weights_that_hooks_compute_are_refused_with_what_removes_these(
    change, remedy, llama, quiet
):
    model, trainer = llama(), Trainer(**quiet)
    layer = model.model.layers[0].mlp.up_proj
    change(layer)
    with pytest.raises(TargetError, match=rf"up_proj: .*; call torch\..*\.{remedy.__name__}\("):
        MRPCallback(pattern="2:4").setup(trainer, CausalLM(model), "predict")
    remedy(layer, "weight")
    MRPCallback(pattern="2:4").setup(trainer, CausalLM(model), "predict")


def test_a_layer_that_is_used_in_two_places_stays_dense(quiet):
    shared = nn.Linear(16, 16)

    class Block(nn.Module):
        def __init__(self, layer: nn.Linear) -> None:
            super().__init__()
            self.layer, self.norm = layer, nn.LayerNorm(16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.layer(x))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers = (shared, nn.Linear(16, 16), shared)
            self.blocks = nn.ModuleList(Block(layer) for layer in layers)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    callback = MRPCallback(pattern="2:4")
    loader = DataLoader(torch.randn(8, 16), batch_size=4)
    Trainer(**quiet).predict(Net(), loader, callbacks=[callback])
    skipped = {row.name: row.skipped for row in callback.report.layers}
    assert skipped["blocks.1.layer"] is None
    assert skipped["blocks.0.layer"].startswith("the same layer is used at blocks.2.layer, too")


def test_an_empty_loader(llama, quiet, loader):
    with pytest.raises(ValueError, match="gave no batch"):
        Trainer(**quiet).predict(llama(), [], callbacks=[MRPCallback(pattern="2:4")])
    with pytest.raises(ValueError, match="limit_predict_batches"):
        Trainer(limit_predict_batches=0, **quiet).predict(
            llama(), loader, callbacks=[MRPCallback(pattern="2:4")]
        )


def test_an_empty_stream(llama, quiet):
    class Nothing(IterableDataset):
        def __iter__(self):
            return iter(())

    model = llama()
    with pytest.raises(ValueError, match="gave no batch"):
        Trainer(**quiet).predict(
            model, DataLoader(Nothing()), callbacks=[MRPCallback(pattern="2:4", offload=True)]
        )
    assert not {"predict_step", "_apply"} & set(model.__dict__)


def test_sequences_longer_than_the_model(llama, quiet):
    model = llama()
    with pytest.raises(ValueError, match="33 tokens, more than the 32 positions"):
        Trainer(**quiet).predict(
            model, DataLoader(torch.ones(1, 33).long()), callbacks=[MRPCallback(pattern="2:4")]
        )
    assert "predict_step" not in model.__dict__


@pytest.mark.parametrize("wrong", [64, 70, -1])
def test_tokens_that_the_model_does_not_know(wrong, llama, quiet):
    model = llama()
    calls = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    ids = torch.tensor([[1, 63, wrong, 0]])
    message = rf"token id {wrong}, .*vocabulary has 64 tokens, 0 to 63: .*`tokenizer`"
    for batch in (ids, {"input_ids": ids}):
        with pytest.raises(DataError, match=message):
            Trainer(**quiet).predict(
                model, DataLoader([batch], batch_size=None), callbacks=[MRPCallback(pattern="2:4")]
            )
    assert calls == []


@pytest.mark.parametrize(
    ("strategy", "problem"),
    [
        (DDPStrategy(start_method="spawn"), "DDPStrategy runs in workers that are spawned"),
        ("ddp_spawn", "DDPStrategy runs in workers that are spawned"),
        (ModelParallelStrategy(), "ModelParallelStrategy shards the model"),
    ],
)
def test_strategies_without_whole_models_are_refused_by_name(strategy, problem, llama, quiet):
    trainer = pl.Trainer(strategy=strategy, devices=2, **quiet)
    with pytest.raises(StrategyError, match=rf"{problem}.*Use strategy='ddp'.*devices=1"):
        MRPCallback(pattern="2:4").setup(trainer, CausalLM(llama()), "predict")


def test_no_worker_is_started_to_be_refused(llama, loader, quiet, monkeypatch):
    trainer = Trainer(strategy="ddp_notebook", devices=2, **quiet)
    monkeypatch.setattr(type(trainer.strategy.launcher), "launch", None)
    with pytest.raises(StrategyError, match="DDPStrategy runs in workers"):
        trainer.predict(llama(), loader, callbacks=[MRPCallback(pattern="2:4")])


def test_activations_that_are_not_finite(llama, loader, quiet):
    model = llama()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.fill_(1e30)
    callback = MRPCallback(pattern="2:4")
    with pytest.raises(HessianError, match=r"layers\.1\.mlp\.down_proj"):
        Trainer(**quiet).predict(model, loader, callbacks=[callback])
    assert not callback.report.complete


def test_two_pruning_callbacks_are_refused(llama, loader, quiet):
    with pytest.raises(ValueError, match="one PruningCallback"):
        Trainer(**quiet).predict(
            llama(), loader, callbacks=[MRPCallback(pattern="2:4"), MRPCallback(sparsity=0.5)]
        )


@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
def test_an_interrupted_run_leaves_whole_layers(error, llama, loader, quiet, tmp_path, monkeypatch):
    from mrp_lightning.pruning import prune_layers

    model, dense = llama(), llama()
    original, calls = prune_layers.prune_together, []

    def prune(*args, **kwargs):
        calls.append(1)
        if len(calls) == 6:
            raise error("stop")
        return original(*args, **kwargs)

    monkeypatch.setattr(prune_layers, "prune_together", prune)
    callback = MRPCallback(pattern="2:4", save_dir=tmp_path / "out")
    handler = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit if error is KeyboardInterrupt else OutOfMemoryError):
            Trainer(**quiet).predict(model, loader, callbacks=[callback])
    finally:
        signal.signal(signal.SIGINT, handler)  # Lightning switches Ctrl-C off
    assert not callback.report.complete
    done = [row.name for row in callback.report.layers]
    assert len(done) == 5
    for name, module in model.named_modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert not {"forward", "predict_step"} & set(module.__dict__)
        if isinstance(module, nn.Linear):
            untouched = torch.equal(module.weight, dense.get_submodule(name).weight)
            assert untouched is (name not in done)
    assert list(tmp_path.iterdir()) == [tmp_path / ".out.partial"]

    # This model is not the dense one any more.
    monkeypatch.setattr(prune_layers, "prune_together", original)
    with pytest.raises(JournalError, match="`weights of the model` differ"):
        Trainer(**quiet).predict(model, loader, callbacks=[callback])
    callback.resume = False
    Trainer(**quiet).predict(model, loader, callbacks=[callback])
    assert callback.report.complete
    assert callback.report.totals["already_pruned"] == 5
    assert (tmp_path / "out" / "model.safetensors").is_file()


def too_large(*_):
    torch.empty(2**50)  # a petabyte


def python_has_none(*_):
    raise MemoryError


def gpu_has_none(*_):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


# In the whole forward, the trial of one block, and its walk.
@pytest.mark.parametrize(
    ("fail", "calls"), [(too_large, 0), (python_has_none, 1), (gpu_has_none, 5)]
)
def test_out_of_memory_says_what_to_lower(fail, calls, llama, loader, quiet, own):
    module, seen = own(llama()), []

    def count(*_):
        seen.append(1)
        if len(seen) > calls:
            fail()

    module.net.model.layers[0].mlp.register_forward_hook(count)
    message = r"on cpu\. Lower `batch_size` or `sequence_length`"
    with pytest.raises(OutOfMemoryError, match=message) as caught:
        Trainer(**quiet).predict(module, loader, callbacks=[MRPCallback(pattern="2:4")])
    assert isinstance(caught.value.__cause__, RuntimeError | MemoryError)
    assert caught.traceback[-1].name == "explained_out_of_memory"


def test_a_model_too_large_for_its_device(llama, loader, quiet, monkeypatch):
    module = CausalLM(llama())
    monkeypatch.setattr(module, "to", gpu_has_none)
    with pytest.raises(OutOfMemoryError, match=r"on cpu.*CUDA out of memory"):
        Trainer(**quiet).predict(module, loader, callbacks=[MRPCallback(pattern="2:4")])
    with pytest.raises(torch.OutOfMemoryError):
        Trainer(**quiet).predict(module, loader)


def test_callbacks_of_one_call_do_not_stay(llama, quiet, loader):
    trainer = Trainer(**quiet)
    before = list(trainer.callbacks)
    callback = MRPCallback(pattern="2:4")
    trainer.predict(llama(), loader, callbacks=[callback])
    assert trainer.callbacks == before
    assert "log" not in callback.__dict__
    assert trainer.num_devices == 1


def test_dataloader_batches_are_not_changed(llama, quiet, windows):
    batches = [{"input_ids": w, "attention_mask": torch.ones_like(w)} for w in windows.split(4)]
    copies = [{k: v.clone() for k, v in batch.items()} for batch in batches]
    loader = DataLoader(batches, batch_size=None)
    Trainer(**quiet).predict(llama(), loader, callbacks=[MRPCallback(pattern="2:4")])
    for batch, copy in zip(batches, copies, strict=True):
        assert all(torch.equal(batch[k], copy[k]) for k in copy)


def test_damping_that_had_to_be_raised_is_reported(llama, quiet):
    few = torch.randint(3, 64, (1, 8))  # fewer tokens than input features: H has no inverse
    prune = MRPCallback(pattern="2:4", damping=0.0)
    Trainer(**quiet).predict(CausalLM(llama()), DataLoader(few), callbacks=[prune])
    rows = [row.to_dict() for row in prune.report.layers]
    assert all(row["raised_damping"] >= 1e-6 for row in rows)
    prune = MRPCallback(pattern="2:4", damping=0.01)
    Trainer(**quiet).predict(CausalLM(llama()), DataLoader(few), callbacks=[prune])
    assert not any(row.to_dict().get("raised_damping") for row in prune.report.layers)


@pytest.mark.parametrize("options", [{"allocation": "output"}, {"tuning": True}])
def test_what_works_on_blocks_is_refused_for_layers_outside_of_them(llama, quiet, options):
    model = llama(tie_word_embeddings=False)

    def no_batch():
        raise AssertionError("the data was read before the refusal")
        yield

    for each, target in ((model, "lm_head"), (nn.Sequential(nn.Linear(8, 8)), None)):
        prune = MRPCallback(sparsity=0.5, targets=target, **options)
        (name,) = options
        with pytest.raises(TargetError, match=f"`{name}`: this is for layers in repeated blocks"):
            Trainer(**quiet).predict(each, no_batch(), callbacks=[prune])


def test_token_ids_that_are_no_whole_numbers_are_refused_as_such(llama, quiet):
    batches = DataLoader([{"input_ids": torch.rand(8)}], batch_size=1)
    with pytest.raises(TypeError, match=r"int64 tensor .*token ids torch.float32"):
        Trainer(**quiet).predict(llama(), batches, callbacks=[MRPCallback(sparsity=0.5)])


def test_inputs_that_no_causal_model_reads_are_refused_with_a_way_that_helps(llama, quiet):
    batches = DataLoader([{"inputs_embeds": torch.randn(8, 32)}], batch_size=1)
    with pytest.raises(DataError, match=r"`inputs_embeds` .* Give your own LightningModule"):
        Trainer(**quiet).predict(llama(), batches, callbacks=[MRPCallback(sparsity=0.5)])
