"""Memory that Linux may back by huge pages."""

import mmap
from pathlib import Path

import pytest
import torch

from mrp_sparse.kernels import huge_pages

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8, torch.int8])
@pytest.mark.parametrize("shape", [(0, 3), (3,), (2**21,), (1037, 5001)])
def test_it_is_memory_like_any_other(shape, dtype):
    expected = torch.randint(0, 100, shape).to(dtype)
    view = huge_pages.empty(shape, dtype, CPU).copy_(expected)[1:]  # keeps the memory
    torch.rand(2**20)
    assert torch.equal(view, expected[1:])
    assert view.is_contiguous()


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="the system has no huge pages")
def test_large_tensors_begin_at_a_huge_page_for_which_the_kernel_was_asked():
    tensor = huge_pages.empty((3 * 2**20 + 8,), torch.bfloat16, CPU).fill_(1)
    assert tensor.data_ptr() % huge_pages.SIZE == 0
    flags = {}
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if "-" in name and not name.endswith(":"):
            begin, end = (int(address, 16) for address in name.split("-"))
        elif name == "VmFlags:":
            flags |= {p: rest for p in (0, 6 * 2**20 - 1) if begin <= tensor.data_ptr() + p < end}
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("the kernel has no huge pages")
    assert "hg" in flags[0]
    assert "hg" in flags[6 * 2**20 - 1]
