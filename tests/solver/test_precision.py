"""The precision of products, and what is left of the user's settings afterwards."""

import warnings

import pytest
import torch

from mrp_lightning import prune_weight
from mrp_lightning.errors import NumericalWarning
from mrp_lightning.solver import hessian as hessian_module
from mrp_lightning.solver.arithmetic import bfloat16_factors, full_float32, warn_of_slow_float64

SETTINGS = [
    ("generic", "all"),
    ("cuda", "all"),
    ("cuda", "matmul"),
    ("mkldnn", "all"),
    ("mkldnn", "matmul"),
]
CPU = torch.device("cpu")


def set_precision(backend, operation, precision):
    torch._C._set_fp32_precision_setter(backend, operation, precision)


def in_force():
    return {setting: torch._C._get_fp32_precision_getter(*setting) for setting in SETTINGS}


def all_backends(precision):
    torch.backends.fp32_precision = precision


def cuda(precision):
    torch.backends.cudnn.fp32_precision = precision


def cuda_matmul(precision):
    torch.backends.cuda.matmul.fp32_precision = precision


def mkldnn(precision):
    set_precision("mkldnn", "all", precision)


def mkldnn_matmul(precision):
    torch.backends.mkldnn.matmul.fp32_precision = precision


def legacy(precision):
    names = {"ieee": "highest", "tf32": "high", "bf16": "medium"}
    torch.set_float32_matmul_precision(names.get(precision, "highest"))


BEFORE = [
    [],
    [(all_backends, "tf32")],
    [(all_backends, "bf16")],
    [(cuda, "tf32"), (mkldnn, "bf16")],
    [(cuda_matmul, "tf32"), (mkldnn_matmul, "bf16")],
    [(all_backends, "tf32"), (cuda, "ieee"), (mkldnn, "ieee")],
    [(all_backends, "ieee"), (cuda, "tf32"), (mkldnn_matmul, "tf32")],
    [(all_backends, "tf32"), (cuda_matmul, "ieee"), (mkldnn, "bf16")],
    [(legacy, "tf32")],
    [(legacy, "bf16")],
]


@pytest.fixture(autouse=True)
def fresh_settings():
    yield
    reset()


def reset():
    torch.set_float32_matmul_precision("highest")
    for setting in SETTINGS:
        set_precision(*setting, "none")


def apply(changes):
    for change, precision in changes:
        change(precision)


def names(changes):
    return "+".join(f"{change.__name__}:{precision}" for change, precision in changes) or "default"


@pytest.mark.parametrize("before", BEFORE, ids=names)
def test_settings_work_on_as_if_nothing_had_been(before):
    apply(before)
    untouched = in_force()
    with bfloat16_factors():
        pass
    with full_float32(CPU):
        inside = in_force()
        assert inside["cuda", "matmul"] in ("none", "ieee")
        assert inside["mkldnn", "matmul"] in ("none", "ieee")
    assert in_force() == untouched
    with pytest.raises(KeyboardInterrupt), full_float32(CPU), full_float32(CPU):
        raise KeyboardInterrupt
    assert in_force() == untouched


def test_no_autocast():
    a = torch.randn(64, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (a @ a).dtype == torch.bfloat16
        with full_float32(CPU):
            assert (a @ a).dtype == torch.float32


@pytest.mark.parametrize(("capability", "warned"), [((8, 0), 0), ((8, 9), 1), ((12, 0), 1)])
def test_a_gpu_with_slow_float64_is_warned_of_once(capability, warned, monkeypatch):
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a card")
    warn_of_slow_float64.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for place in (device, device, torch.device("cpu")):
            warn_of_slow_float64(place)
    warn_of_slow_float64.cache_clear()
    messages = [str(one.message) for one in caught if one.category is NumericalWarning]
    assert len(messages) == warned
    assert all("cuda:0 (a card) computes float64 up to 64 times" in text for text in messages)


def test_work_in_float64_is_announced(monkeypatch):
    """Two inputs that are almost one: float32 has no factor of their Hessian."""
    announced = []
    monkeypatch.setattr(hessian_module, "warn_of_slow_float64", announced.append)
    inputs = torch.randn(64, 4, dtype=torch.float64)
    inputs[:, 1] = inputs[:, 0] * (1 + 1e-6)
    matrix = (2 * inputs.T @ inputs / 64).float()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prune_weight(torch.randn(3, 4), matrix, pattern="2:4", method="SM", damping=1e-9)
    assert announced[:1] == [torch.device("cpu")]
