"""SIGTERM and Ctrl-C end a pruning in seconds, with the right status, and it can go on."""

import os
import signal
import threading
import time

import pytest
from lightning.pytorch import LightningDataModule
from torch import nn
from warm import Piped

from callbacks import MRPCallback
from mrp_lightning import CausalLM, Trainer
from mrp_lightning.pruning import prune_layers
from mrp_lightning.signals import Interrupted, interruptible


@pytest.fixture
def handlers():
    """The handlers of Python, and whatever stood there before put back afterwards."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    defaults = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    for number, handler in defaults.items():
        signal.signal(number, handler)
    yield defaults
    for number, handler in before.items():
        signal.signal(number, handler)


def send_in_a_solve(monkeypatch, number, *, layer: int) -> None:
    """Let the signal come while a layer is solved for."""
    prune, calls = prune_layers.prune_together, []

    def prune_and_send(*args, **kwargs):
        calls.append(1)
        if len(calls) == layer:
            os.kill(os.getpid(), number)
        return prune(*args, **kwargs)

    monkeypatch.setattr(prune_layers, "prune_together", prune_and_send)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_run_which_goes_on(
    number, status, handlers, llama, loader, quiet, tmp_path, monkeypatch, caplog
):
    model = llama()
    callback = MRPCallback(pattern="2:4", save_dir=tmp_path / "out")
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
        send_in_a_solve(patch, number, layer=10)
        Trainer(**quiet).predict(model, loader, callbacks=[callback])
    assert ended.value.code == status
    assert {number: signal.getsignal(number) for number in handlers} == handlers
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert not {"forward", "predict_step"} & set(module.__dict__)
    assert (
        sum(bool((m.weight == 0).any()) for m in model.modules() if isinstance(m, nn.Linear)) == 9
    )
    assert f"Stopped by {number.name}." in caplog.messages
    line = f"1 of 2 blocks are pruned, and kept in {tmp_path / '.out.partial'}."
    assert any(message.startswith(line) for message in caplog.messages)

    callback = MRPCallback(pattern="2:4", save_dir=tmp_path / "out")
    Trainer(**quiet).predict(llama(), loader, callbacks=[callback])
    assert callback.report.totals["resumed_blocks"] == 1


def test_a_signal_while_batches_are_read(handlers, llama, loader, quiet):
    module = CausalLM(llama())

    class Sending(MRPCallback):
        def on_predict_batch_end(self, *_):
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as ended:
        Trainer(**quiet).predict(module, loader, callbacks=[Sending(pattern="2:4")])
    assert ended.value.code == 143
    assert "predict_step" not in module.__dict__
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_signal_before_the_first_batch(handlers, llama, loader, quiet):
    module = CausalLM(llama())

    class Sending(LightningDataModule):
        def predict_dataloader(self):
            os.kill(os.getpid(), signal.SIGTERM)
            return loader

    with pytest.raises(SystemExit) as ended:
        Trainer(**quiet).predict(
            module, datamodule=Sending(), callbacks=[MRPCallback(pattern="2:4")]
        )
    assert ended.value.code == 143
    assert not any(bool((p == 0).all(0).any()) for p in module.model.parameters() if p.ndim == 2)


SLOW = """
import signal, sys, time
from mrp_lightning import TextDataModule
from mrp_lightning.commands.main import main

def predict_dataloader(self):
    print("reading", flush=True)
    time.sleep(60)

TextDataModule.predict_dataloader = predict_dataloader
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background of a shell
main(sys.argv[1:])
"""


def test_a_command_ends_at_once_while_it_reads_text(tiny_llama, tmp_path):
    (tmp_path / "text.txt").write_text("import this\n" * 3000)
    options = [f"--model.model={tiny_llama}", f"--data.train_files={tmp_path / 'text.txt'}"]
    options += ["--trainer.callbacks=callbacks.MRPCallback", "--trainer.callbacks.pattern=2:4"]
    options.append(f"--trainer.callbacks.save_dir={tmp_path / 'out'}")
    process = Piped(["-c", SLOW, "predict", *options])
    assert "reading\n" in process.stdout
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=50) == 130  # reading takes 60 s


def test_handlers_of_the_program_are_left_alone(
    handlers, llama, loader, quiet, tmp_path, monkeypatch
):
    came = []
    signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    send_in_a_solve(monkeypatch, signal.SIGTERM, layer=3)
    callback = MRPCallback(pattern="2:4")
    Trainer(**quiet).predict(llama(), loader, callbacks=[callback])
    assert callback.report.complete
    assert came == [signal.SIGTERM]


def test_prunes_in_another_thread(handlers, llama, loader, quiet):
    callback = MRPCallback(pattern="2:4")
    trainer = Trainer(**quiet)
    thread = threading.Thread(target=lambda: trainer.predict(llama(), loader, callbacks=[callback]))
    thread.start()
    thread.join()
    assert callback.report.complete


def test_a_second_signal_does_not_disturb_the_first(handlers):
    ended = []
    with pytest.raises(Interrupted) as caught, interruptible(list(handlers)):
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(10)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            ended.append(1)
    assert ended
    assert caught.value.code == 130
