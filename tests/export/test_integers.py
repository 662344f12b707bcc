"""Four bits times activations of 8 bits: every kernel, AVX-512's in emulation, against float64."""

import ctypes
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.cpp_extension import include_paths

import export
from export.conversion import parity
from export.conversion.parity import compare_logits
from export.generate import main as generate
from export.to_sparse import main
from mrp_lightning.errors import FormatError
from mrp_sparse.formats import bitmask4, slices
from mrp_sparse.formats.bitmask4 import BITMASK4, GROUP
from mrp_sparse.huggingface import Bitmask4Config, BitmaskConfig
from mrp_sparse.kernels import library
from mrp_sparse.packed_linear import Bitmask4Linear, round_activations

from .conftest import AVX2, IN_TILES, PORTABLE, TILES, refusal

KERNELS = Path(bitmask4.__file__).parents[1] / "kernels" / "cpu"
BEST = 0
"""`Way` in operators.cpp: AVX-512's, if this CPU has it, or that of tiles."""
VNNI, TILES_OF_INTEGERS = 2, 3
"""The numbers of kernels in emulated_vnni.cpp."""
quick = settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
columns_of_weights = st.integers(1, 300) | st.sampled_from([2048, 2050, 4500])
"""Some are decoded in several spans of columns."""
sizes = st.tuples(
    st.sampled_from([1, 2, 3, 5, 8, 13, 16, 33, 300]), st.integers(1, 40), columns_of_weights
)
kept = st.sampled_from([0.0, 0.1, 0.5, 1.0])
seeds = st.integers(0, 999)


@pytest.fixture(
    params=[
        pytest.param(PORTABLE, id="portable"),
        pytest.param(AVX2, id="avx2"),
        IN_TILES,
    ]
)
def way(request: pytest.FixtureRequest) -> int:
    if request.param == TILES:
        request.getfixturevalue("tiles")
    return request.param


def weight_and_tokens(size: tuple[int, int, int], part: float, seed: int) -> tuple[Tensor, Tensor]:
    """Weights of four bits, and tokens, some groups and whole tokens or rows of zeros; float32."""
    tokens, rows, columns = size
    random = torch.Generator().manual_seed(seed)
    groups = -(-columns // GROUP)

    def by_group(count: int, low: int, high: int) -> Tensor:
        factors = 2.0 ** torch.randint(low, high, (count, groups), generator=random)
        factors[torch.rand(count, groups, generator=random) < 0.2] = 0.0
        factors[torch.rand(count, generator=random) < 0.1] = 0.0
        return factors.repeat_interleave(GROUP, 1)[:, :columns]

    weight = torch.randint(-8, 9, (rows, columns), generator=random) * by_group(rows, -6, 0)
    weight[torch.rand(rows, columns, generator=random) >= part] = 0.0
    return weight, torch.randn(tokens, columns, generator=random) * by_group(tokens, -3, 9)


def rounded(x: Tensor) -> Tensor:
    """Round by the formula, group by group, in float64 but for the scale and the quotient."""
    parts = []
    for group in x.float().split(GROUP, dim=1):
        scale = (group.abs().amax(1, keepdim=True) / 127).clamp_min(2.0**-126)
        parts.append((group / scale).round().double() * scale.double())
    return torch.cat(parts, 1)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None, way: int = BEST) -> Tensor:
    if not library.load():
        pytest.skip("needs a C++ compiler")
    packed = bitmask4.pack(weight)
    offsets = bitmask4.row_offsets(packed[1])
    return torch.ops.mrp_lightning_cpu.linear_bitmask4(x, *packed, offsets, bias, True, way)


def assert_as_defined(found: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> None:
    """Rounding of the result, and of float32 sums over groups, and nothing else."""
    activations = rounded(x)
    exact = activations @ weight.double().T + bias.double()
    size = activations.abs() @ weight.double().abs().T + bias.double().abs()
    groups = -(-x.shape[1] // GROUP)
    sums = (groups + 2) * torch.finfo(torch.float32).eps * size
    bound = torch.finfo(found.dtype).eps * exact.abs() + sums + 1e-30
    assert bool(((found.double() - exact).abs() <= bound).all())


@given(sizes, kept, seeds, st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
@quick
def test_it_is_the_formula_by_every_kernel(way, size, part, seed, dtype):
    weight, x = (tensor.to(dtype) for tensor in weight_and_tokens(size, part, seed))
    bias = torch.randn(len(weight), generator=torch.Generator().manual_seed(seed)).to(dtype)
    found = multiply(x, weight, bias)
    assert found.dtype == dtype
    assert_as_defined(found, x, weight, bias)
    plain = bitmask4.multiply_rounded(x, *bitmask4.pack(weight)) + bias
    assert_as_defined(plain, x, weight, bias)
    assert torch.equal(multiply(x, weight, bias, way), found)
    # Whatever the number of tokens, each has its sums in the same order.
    assert torch.equal(multiply(x[-1:], weight, bias), found[-1:])


@given(sizes, kept, seeds)
@quick
def test_sums_of_integers_are_exact(way, size, part, seed):
    """With all scales 1, numbers from −127 to 127 and codes from −8 to 8 are multiplied."""
    tokens, rows, columns = size
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(-8, 9, (rows, columns), generator=random).float()
    codes[torch.rand(rows, columns, generator=random) >= part] = 0.0
    x = torch.randint(-127, 128, (tokens, columns), generator=random).float()
    x[:, ::GROUP] = 127.0  # the scale of each group
    expected = (x.long() @ codes.long().T).float()
    for kernel in (BEST, way):
        assert torch.equal(multiply(x, codes, way=kernel), expected)
    assert torch.equal(bitmask4.multiply_rounded(x, *bitmask4.pack(codes)), expected)


def test_the_largest_sums_fit_their_integers(way):
    x = torch.full((9, 640), 127.0)
    for code in (8.0, -8.0):
        weight = torch.full((17, 640), code)
        for kernel in (BEST, way):
            assert multiply(x, weight, way=kernel).unique().tolist() == [640 * 127 * code]


def test_tiny_and_huge_activations_are_rounded_like_others():
    weight = weight_and_tokens((1, 20, 128), 0.5, 0)[0]
    for factor in (2.0**-149, 1e-42, 1e-30, 1e30):
        x = torch.randn(3, 128, generator=torch.Generator().manual_seed(1)).clamp(-9, 9) * factor
        assert_as_defined(multiply(x, weight), x, weight, torch.zeros(20))


# ---- AVX-512 in emulation ----


@pytest.fixture(scope="module")
def emulated(tmp_path_factory) -> Callable[..., Tensor | None]:
    """A function that multiplies by the kernel of a number; `None` if it refuses."""
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    if shutil.which("g++") is None or "avx2" not in flags:
        pytest.skip("needs g++, and a CPU with AVX2")
    built = tmp_path_factory.mktemp("emulated") / "vnni.so"
    options = ["-std=c++20", "-O1", "-march=x86-64-v3", "-fPIC", "-shared", "-w", f"-I{KERNELS}"]
    options += [f"-isystem{path}" for path in include_paths()]
    source = Path(__file__).with_name("emulated_vnni.cpp")
    subprocess.run(["g++", *options, str(source), "-o", str(built)], check=True)
    kernel = ctypes.CDLL(str(built)).multiply
    kernel.restype = ctypes.c_bool

    def run(way: int, x: Tensor, packed: tuple[Tensor, ...], offsets: Tensor) -> Tensor | None:
        nibbles, places, scales = packed
        y = torch.empty(len(x), len(places), dtype=x.dtype)
        sizes = len(x), len(places), x.shape[1]
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in (nibbles, places, scales, offsets, x, y)]
        pointers.insert(1, ctypes.c_int64(nibbles.numel()))
        kind = ctypes.c_bool(x.dtype == torch.bfloat16)
        done = kernel(kind, ctypes.c_int64(way), *pointers, *map(ctypes.c_int64, sizes))
        return y if done else None

    return run


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernel", [VNNI, TILES_OF_INTEGERS])
@given(sizes, kept, seeds)
@quick
def test_avx512_gives_the_bits_of_the_portable_kernel(emulated, kernel, dtype, size, part, seed):
    weight, x = (tensor.to(dtype) for tensor in weight_and_tokens(size, part, seed))
    packed = bitmask4.pack(weight)
    offsets = bitmask4.row_offsets(packed[1])
    found = emulated(kernel, x, packed, offsets)
    assert torch.equal(found, emulated(0, x, packed, offsets))
    assert torch.equal(found, multiply(x, weight, way=PORTABLE))
    damaged = packed[0][:-1].clone(), *packed[1:]
    if packed[0].numel():
        assert emulated(kernel, x, damaged, offsets) is None


# ---- Layers, slices and checkpoints ----


def test_layers_compute_the_formula():
    weight, x = weight_and_tokens((6, 24, 100), 0.5, 3)
    linear = nn.Linear(100, 24)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    layer = Bitmask4Linear.from_linear(linear)
    exact = layer(x)
    round_activations(layer)
    assert "activations=int8" in repr(layer)
    found = layer(x.view(2, 3, 100)).detach()
    assert not torch.equal(found.flatten(0, 1), exact)
    assert_as_defined(found.flatten(0, 1), x, weight, linear.bias.detach())


@given(st.integers(1, 4), st.integers(2, 30), seeds, st.data())
@quick
def test_the_slices_of_two_workers_equal_the_whole(tokens, rows, seed, data):
    """Rows are cut anywhere and columns between groups; sums of two workers are those of one."""
    weight, x = weight_and_tokens((tokens, rows, 200), 0.5, seed)
    packed, whole = bitmask4.pack(weight), multiply(x, weight)

    def part(tensors: list[Tensor], some: Tensor) -> Tensor:
        offsets = bitmask4.row_offsets(tensors[1])
        return BITMASK4.multiply(some.contiguous(), tensors, None, True, offsets=offsets)

    row = data.draw(st.integers(1, rows - 1))
    halves = [slices.rows(BITMASK4, packed, *ends) for ends in ((0, row), (row, rows))]
    assert torch.equal(torch.cat([part(half, x) for half in halves], 1), whole)
    column = GROUP * data.draw(st.integers(1, 3))
    ends = (0, column), (column, 200)
    found = sum(part(slices.columns(BITMASK4, packed, *end), x[:, slice(*end)]) for end in ends)
    assert_as_defined(found, x, weight, torch.zeros(rows))


@pytest.fixture(scope="module")
def rounding(exports, tmp_path_factory) -> Path:
    source = exports("bitmask4", tmp_path_factory.mktemp("source")).source
    main([str(source), "--activations", "int8", "--overwrite", "--device", "cpu"])
    return source


def layers_of(model: nn.Module) -> list[Bitmask4Linear]:
    return [m for m in model.modules() if isinstance(m, Bitmask4Linear)]


def settings_of(directory: Path) -> dict:
    return json.loads((directory / "config.json").read_text())["quantization_config"]


@pytest.fixture
def rounding_by_hand() -> Iterator[Callable[[nn.Module], None]]:
    """A function that rounds the inputs of the linear layers in a model's blocks."""
    handles = []

    def change(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        flat = inputs[0].flatten(0, -2)
        return (rounded(flat).to(flat.dtype).view_as(inputs[0]), *inputs[1:])

    def register(model: nn.Module) -> None:
        layers = [m for m in model.model.modules() if isinstance(m, nn.Linear)]
        handles.extend(layer.register_forward_pre_hook(change) for layer in layers)

    yield register
    for handle in handles:
        handle.remove()


def test_a_checkpoint_says_so_and_its_logits_are_those_of_rounded_inputs(
    rounding, ids, rounding_by_hand, tmp_path
):
    packed = rounding.with_name("llama-bitmask4")
    assert settings_of(packed)["activations"] == "int8"
    model = export.load(packed, dtype=torch.float32).eval()
    layers = layers_of(model)
    assert len(layers) == 14
    assert all(layer.eight_bit_activations for layer in layers)
    dense = export.load(rounding, dtype=torch.float32).eval()
    with torch.no_grad():
        exact, found = dense(ids).logits, model(ids).logits
        rounding_by_hand(dense)
        expected = dense(ids).logits
    change = float((expected - exact).norm())
    assert 0 < change < 0.05 * float(exact.norm())
    # A value at a tie may be rounded to the other side after sums of another order.
    assert float((found - expected).norm()) < 0.1 * change
    model.save_pretrained(tmp_path / "again")
    assert settings_of(tmp_path / "again") == settings_of(packed)
    report = json.loads((packed / "export_report.json").read_text())["parity"]
    assert report["text"]["perplexity_before"] == report["activations"]["perplexity_before"]
    assert 0 < report["activations"]["divergence"] < 0.01
    assert report["text"]["divergence"] < report["activations"]["divergence"]
    assert "after that, 8 bits for activations: perplexity" in (packed / "README.md").read_text()


@pytest.mark.parametrize("rise", [0.004, 0.006])
def test_by_default_they_are_rounded_where_perplexity_rises_by_half_a_percent_at_most(
    rise, exports, tmp_path, monkeypatch, capsys
):
    source = exports("bitmask4", tmp_path).source

    def compare(expected, packed, *others, **options):
        text = compare_logits(expected, packed, *others, **options)
        rounds = any(getattr(m, "eight_bit_activations", False) for m in packed.modules())
        after = text.perplexity_before * (1 + rise)
        return replace(text, perplexity_after=after) if rounds else text

    monkeypatch.setattr(parity, "compare_logits", compare)
    main([str(source), "--overwrite", "--device", "cpu"])
    packed = source.with_name("llama-bitmask4")
    is_free = rise < 0.005
    assert settings_of(packed).get("activations") == ("int8" if is_free else None)
    shown = " ".join(capsys.readouterr().out.split())
    assert ("not rounded: it would change the perplexity" in shown) is not is_free
    model = export.load(packed)
    assert {m.eight_bit_activations for m in layers_of(model)} == {is_free}
    check = [str(source), "--check-only", "--device", "cpu"]
    asked = "int8" if is_free else "exact"
    main([*check, "--activations", asked])
    assert settings_of(packed).get("activations") == ("int8" if is_free else None)
    other = "exact" if is_free else "int8"
    assert "no export with these options" in refusal([*check, "--activations", other], capsys)


def test_by_default_they_stay_where_their_effect_on_text_is_unknown(exports, tmp_path, capsys):
    source = exports("bitmask4", tmp_path).source
    for file in source.glob("tokenizer*"):
        file.unlink()
    main([str(source), "--overwrite", "--device", "cpu"])
    assert "activations" not in settings_of(source.with_name("llama-bitmask4"))
    assert "would change the perplexity of random tokens" in " ".join(
        capsys.readouterr().out.split()
    )


def test_generation_takes_them_as_they_are(rounding, capsys):
    arguments = ["--prompt", "import os", "--max-new-tokens", "3", "--device", "cpu", "--eager"]
    packed = str(rounding.with_name("llama-bitmask4"))
    generate([packed, *arguments, "--activations", "int8"])
    assert "[activations of 8 bits: the directory asks for them]" in capsys.readouterr().out
    generate([str(rounding), *arguments, "--activations", "int8"])
    assert "no layer has four bits, and none is rounded" in capsys.readouterr().out


def test_other_formats_and_values_are_refused(llama, capsys):
    assert Bitmask4Config({}, 1, activations=None).activations is None
    with pytest.raises(FormatError, match="`activations` is 'int4', expected 'int8'"):
        Bitmask4Config({}, 1, activations="int4")
    with pytest.raises(FormatError, match=r"`activations` is 'int8', expected none with mrp_bitm"):
        BitmaskConfig({}, 1, activations="int8")
    rounds = ["--activations", "int8", "--device", "cpu"]
    shown = refusal([str(llama), "--format", "packed", *rounds], capsys)
    assert "`--activations int8` is for `--format bitmask4`, and not for packed." in shown
    assert "not for packed. Leave it out" in refusal([str(llama), *rounds], capsys)
    assert [path.name for path in llama.parent.iterdir()] == ["llama"]
