"""The perplexities that lab/benchmarks/quantised.py compares: bits, rounding."""

import few_bits
import pytest
import torch

from mrp_lightning.experiments.trials import parse_setting
from mrp_sparse.formats.bitmask import BITMASK
from mrp_sparse.formats.bitmask4 import BITMASK4
from mrp_sparse.formats.sparse24 import SPARSE24


@pytest.mark.parametrize(
    ("setting", "form"),
    [("50%", BITMASK), ("70%", BITMASK), ("2:4", SPARSE24), ("50%+4bit", BITMASK4),
     ("2:4+4bit", BITMASK4)],
)  # fmt: skip
def test_bits_are_those_of_the_packed_tensors(setting, form):
    recipe = parse_setting(setting, "magnitude")
    torch.manual_seed(0)
    codes = torch.randint(1, 9, (40, 640)).bfloat16()
    weight = codes.masked_fill(recipe.pattern.select(torch.rand(40, 640), 0), 0)
    stored = sum(tensor.nbytes for tensor in form.pack(weight))
    # Half-bytes that stay empty add some hundredths.
    assert -1e-9 < 8 * stored / weight.numel() - few_bits.bits_of(recipe) < 0.07


def test_bits_alone_need_no_places():
    assert few_bits.bits_of(parse_setting("3bit", "JM")) == 3.25


def test_int4_is_what_pytorch_multiplies_with():
    torch.manual_seed(0)
    weight = torch.randn(32, 128).bfloat16()
    found = few_bits.rounded_to_int4(weight)
    groups = weight.float().view(32, 2, 64)
    low, high = groups.amin(2), groups.amax(2)
    scales = ((high - low) / 15).bfloat16()
    zeros = (low + 8 * scales.float()).bfloat16()
    codes = (groups - zeros.float()[:, :, None]) / scales.float()[:, :, None] + 8
    codes = codes.round().clamp(0, 15).int().view(32, 128)
    tiled = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    both = torch.stack((scales, zeros), dim=2).transpose(0, 1).contiguous()
    x = torch.eye(128).bfloat16()
    products = torch.ops.aten._weight_int4pack_mm_for_cpu(x, tiled, 64, both)
    torch.testing.assert_close(products.T, found, rtol=1e-2, atol=1e-2)
