"""Processes that die and disks that fail, at a chosen place."""

import hashlib
import os
import pickle
import resource
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from callbacks import MRPCallback
from mrp_lightning import CausalLM, Trainer

Change = tuple[Any, str, Callable[[Callable[..., Any]], Callable[..., Any]]]
"""A module or class, the name of a function in it, and what makes another one of that."""


def in_child(work: Callable[[], Any]) -> Any:
    """What a forked process returns; the exception that it raises; or the signal that killed it."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            torch.set_num_threads(1)  # the threads of the parent are not here
            try:
                result = work()
            except BaseException as error:
                traceback.print_exc()
                result = error
            with os.fdopen(writing, "wb") as pipe:
                pickle.dump(result, pipe)
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        content = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status))
    result = pickle.loads(content)
    if isinstance(result, BaseException):
        raise result
    return result


def die() -> None:
    """End this process as nothing can prevent."""
    os.kill(os.getpid(), signal.SIGKILL)


def torn(tensors: Any, file: Any, *_: Any) -> None:
    """Die when half of a file is written."""
    Path(file).write_bytes(bytes(1000))
    die()


@contextmanager
def changed(*changes: Change) -> Iterator[None]:
    """Put other functions in the place of some."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, change in changes:
            patch.setattr(owner, name, change(getattr(owner, name)))
        yield


def at_call(
    number: int, before: Callable[..., None] | None, after: Callable[..., None] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes of a function one that does more before or after one of its calls."""

    def change(function: Callable[..., Any]) -> Callable[..., Any]:
        calls: list[int] = []

        def called(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            if len(calls) == number and before is not None:
                before(*args, **kwargs)
            result = function(*args, **kwargs)
            if len(calls) == number and after is not None:
                after()
            return result

        return called

    return change


@contextmanager
def small_files(num_bytes: int) -> Iterator[None]:
    """No file can grow beyond so many bytes: writing fails in the middle, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def contents(directory: Path) -> dict[str, str]:
    """A checksum of each file in a directory."""
    return {
        path.relative_to(directory).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def weights(directory: Path) -> dict[str, str]:
    """A checksum of each file of weights in a directory."""
    return {name: sha for name, sha in contents(directory).items() if name.endswith("tensors")}


def prune_into(source: Path, save_dir: Path, **arguments: Any) -> MRPCallback:
    """Prune the model, 2:4, into a directory."""
    windows = torch.randint(3, 512, (8, 16), generator=torch.Generator().manual_seed(1))
    callback = MRPCallback(pattern="2:4", save_dir=save_dir, **arguments)
    trainer = Trainer(accelerator="cpu", logger=False, barebones=True)
    trainer.predict(CausalLM(str(source)), DataLoader(windows, batch_size=4), callbacks=[callback])
    return callback
