"""A device without hardware: `otherdevice:0`.

Its tensors are CPU tensors in disguise. An operator that is given tensors of both devices raises,
as CUDA's do, so code that leaves a tensor behind is found on any machine. Results are those of a
CPU: nothing is learnt about kernels, their speed or their memory.

Built on the experimental interface for backends written in Python (torch 2.11 has it).
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.utils import backend_registration

NAME = "otherdevice"  # torch adds methods of this name to tensors and modules
CPU = torch.device("cpu")
# Operators that take tensors of both devices on CUDA, too: copies, and indices on the CPU.
MIXING = {"copy_", "index", "index_put_", "_index_put_impl_"}


class Disguised(Tensor):
    """A tensor on the second device; `hidden` is where its numbers are."""

    hidden: Tensor
    # Below everything that torch does with subclasses of Tensor: a device has none.
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, hidden: Tensor) -> "Disguised":
        disguised = Tensor._make_wrapper_subclass(
            cls,
            hidden.shape,
            strides=hidden.stride(),
            storage_offset=hidden.storage_offset(),
            dtype=hidden.dtype,
            device=torch.device(NAME, 0),
        )
        disguised.hidden = hidden
        return disguised

    def __repr__(self) -> str:
        return f"{NAME}: {self.hidden}"

    def data_ptr(self) -> int:
        return self.hidden.data_ptr()

    def tolist(self) -> Any:
        return self.hidden.tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied: Tensor = Disguised(self.hidden.clone())
        if isinstance(self, nn.Parameter):
            copied = nn.Parameter(copied, self.requires_grad)
        memo[id(self)] = copied
        return copied

    @classmethod
    def __torch_dispatch__(
        cls, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with torch.inference_mode(False):  # a disguised tensor of inference cannot be detached
            return _run(operator, args, dict(kwargs or {}))


def _run(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = operator._schema.name.removeprefix("aten::")
    if name == "_has_compatible_shallow_copy_type":  # whether `parameter.data = ...` works
        return False
    tensors: list[Tensor] = []
    targets: list[torch.device] = []

    def hidden(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
            return leaf.hidden if isinstance(leaf, Disguised) else leaf
        if isinstance(leaf, torch.device):
            targets.append(leaf)
            return CPU
        return leaf

    args, kwargs = _mapped(hidden, args), _mapped(hidden, kwargs)
    is_plain = (tensor.ndim > 0 and not isinstance(tensor, Disguised) for tensor in tensors)
    if name not in MIXING and any(is_plain):
        raise RuntimeError(f"{operator}: expected all tensors on one device, found {NAME} and cpu")
    if name == "histc":  # CUDA counts integers, a CPU does not
        args = (args[0].double(), *args[1:])
    result = operator(*args, **kwargs)
    if targets and targets[0].type != NAME:
        return result.clone() if any(result is tensor for tensor in args) else result
    # What an operator in place returns is what it was given.
    given = {id(getattr(tensor, "hidden", tensor)): tensor for tensor in tensors}

    def disguised(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return given[id(leaf)] if id(leaf) in given else Disguised(leaf)

    return _mapped(disguised, result)


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """Change the leaves of an operator's arguments or results, in a fraction of pytree's time."""
    if isinstance(value, list):
        return [_mapped(change, part) for part in value]
    if isinstance(value, tuple) and not isinstance(value, torch.Size):
        return tuple(_mapped(change, part) for part in value)
    if isinstance(value, dict):
        return {key: _mapped(change, part) for key, part in value.items()}
    return change(value)


def _create(operator: Any, *args: Any, **kwargs: Any) -> Disguised:
    """Operators that are given no tensor do not pass by `Disguised`."""
    kwargs = {key: value for key, value in kwargs.items() if key not in ("device", "pin_memory")}
    with torch.inference_mode(False):
        return Disguised(operator(*args, **kwargs, device=CPU))


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """What `torch.tensor(numbers, device=...)` ends in, below the dispatch to Python."""
    getattr(target, "hidden", target).copy_(getattr(source, "hidden", source))
    return target


class Presence:
    """Whether a test asked for the device; nothing else may come to use it."""

    present = False

    def is_available(self) -> bool:
        return Presence.present

    def device_count(self) -> int:
        return int(Presence.present)


class Hook(Presence, backend_registration._DummyPrivateUse1Hook):
    """What torch asks of a device."""


class Module(Presence, backend_registration._DummyBackendModule):
    """What stands in `torch.otherdevice`."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]


class Generator(torch.Generator):
    """A device that is written in Python can have no generator: it takes the CPU's."""

    def __new__(cls, device: Any = CPU) -> torch.Generator:
        device = torch.device(device)
        return cls.__base__(CPU if device.type == NAME else device)


class SecondAccelerator(Accelerator):
    """The second device as Lightning asks for it."""

    def setup_device(self, device: torch.device) -> None: ...

    def teardown(self) -> None: ...

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {}

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        return devices

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device(NAME, 0)]

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return NAME


_registered: list[Any] = []


@contextmanager
def second_device() -> Iterator[torch.device]:
    """The device, for as long as the context lasts; a process cannot forget it altogether."""
    if not _registered:
        hook = Hook()
        library = torch.library.Library("_", "IMPL")
        backend_registration._setup_privateuseone_for_python_backend(NAME, Module(), hook)
        library.fallback(_create, "PrivateUse1")
        copies = torch.library.Library("aten", "IMPL", "PrivateUse1")
        copies.impl("_copy_from", _copy_from)
        for name in ("eye", "eye.m"):  # torch would resize an empty tensor, which has one shape
            copies.impl(name, functools.partial(_create, torch.eye))
        _registered.extend((hook, library, copies))
    with mock.patch.object(Presence, "present", True), mock.patch("torch.Generator", Generator):
        yield torch.device(NAME, 0)


def assert_same(there: Any, here: Any, device: torch.device, atol: float = 0.0) -> None:
    """Compare tensors of a run on the device with those of a run on the CPU, by name.

    The stand-in computes as the CPU does. A GPU sums in another order, which may turn the choice
    between weights of one score: a few of them may differ, and the others by rounding.
    """
    assert there.keys() == here.keys()
    for name, expected in here.items():
        assert there[name].shape == expected.shape, name
        if device.type == NAME:
            torch.testing.assert_close(there[name].cpu(), expected, rtol=0, atol=atol)
            continue
        scale = expected.float().abs().mean()
        differs = (there[name].cpu().float() - expected.float()).abs() > 0.02 * scale
        assert differs.float().mean() < 0.05, name


def trainer_on(device: torch.device) -> Any:
    """A Trainer that runs on the CPU, on a GPU, or on the stand-in."""
    from mrp_lightning import Trainer

    where: dict[str, Any] = {"accelerator": device.type}
    if device.type == NAME:
        where = {"strategy": SingleDeviceStrategy(device, SecondAccelerator())}
    bars = ("enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    return Trainer(logger=False, **dict.fromkeys(bars, False), **where)
