"""The machine code of the Triton kernels, also for devices that this machine lacks.

    python lab/benchmarks/kernel_code.py
    python lab/benchmarks/kernel_code.py --capability 80 --json

Compiles both kernels for bfloat16, and counts what their loops execute. Triton brings compiler and
disassembler along.
"""

import argparse
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "0"  # Triton decides when it is first imported

import torch
import triton
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from mrp_sparse.kernels import triton_kernels

COLUMNS = 65536
"""So many that no loop is unrolled whole."""
ROWS = 256
WARP = 32
TOOLS = Path(nvidia.__file__).parent / "bin"
KERNELS = {
    "triton-gemv": (triton_kernels.gemv, 1, 4 * 256 * 2),
    "triton-gemm": (triton_kernels.gemm, 8, 16 * 4 * 128 // 2),
}
"""Each kernel, a number of tokens, and the kept weights that a program reads in a step of its
loop."""


@dataclass(frozen=True)
class Code:
    """The machine code of a kernel, in numbers.

    Attributes:
        kernel: Name in `KERNELS`.
        registers: Registers of a thread.
        stack: Bytes of a thread's stack: registers that did not fit.
        shared: Bytes of shared memory of a program.
        instructions: Instructions of a thread in the loop, for each kept weight.
        barriers: Barriers in the loop.
    """

    kernel: str
    registers: int
    stack: int
    shared: int
    instructions: float
    barriers: int


def _device(capability: int) -> Any:
    """A stand-in for a device, with the attributes that compilation needs."""
    return mock.Mock(
        get_current_target=lambda: GPUTarget("cuda", capability, WARP),
        get_current_device=lambda: capability,
        get_current_stream=lambda device: device,
    )


def codes(capability: int) -> Iterator[Code]:
    """Compile the kernels for sm_`capability`, by calling the kernels without launching."""
    compiled: list[Any] = []
    run = JITFunction.run

    def compile_only(self: JITFunction, *args: Any, **options: Any) -> None:
        compiled.append(run(self, *args, **options | {"warmup": True}))

    driver.set_active(_device(capability))
    values = torch.zeros(ROWS, COLUMNS // 2, dtype=torch.bfloat16)
    meta = torch.zeros(ROWS, COLUMNS // 8, dtype=torch.uint8)
    half, bias = values.half(), torch.zeros(ROWS, dtype=torch.float16)
    with mock.patch.object(JITFunction, "run", compile_only):
        for name, (kernel, tokens, weights) in KERNELS.items():
            x = torch.zeros(tokens, COLUMNS, dtype=torch.bfloat16)
            kernel(x, values, meta, None)
            yield _code(name, weights, compiled.pop())
            # Nothing of these is counted, but they have to compile: float16, and a bias.
            kernel(x.half(), half, meta, bias)
        triton_kernels.unpack(values, meta)  # it has no loop


def _code(name: str, weights: int, compiled: Any) -> Code:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        used = _tool("cuobjdump", "--dump-resource-usage", file.name)
        listing = _tool("nvdisasm", "-c", file.name)
    loop = _loop(listing)
    threads = WARP * compiled.metadata.num_warps
    return Code(
        kernel=name,
        registers=int(re.search(r"REG:(\d+)", used)[1]),
        stack=int(re.search(r"STACK:(\d+)", used)[1]),
        shared=compiled.metadata.shared,
        instructions=len(loop) * threads / weights,
        barriers=sum("BAR.SYNC" in instruction for instruction in loop),
    )


def _tool(name: str, *arguments: str) -> str:
    command = [TOOLS / name, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _loop(listing: str) -> list[str]:
    """The instructions of the longest loop: from the target of a backward branch to the branch."""
    instructions: list[str] = []
    labels: dict[str, int] = {}
    longest: list[str] = []
    for line in listing.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif instruction := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            instructions.append(instruction[1])
            target = re.search(r"BRA.*\((\.L_x_\d+)\)", instruction[1])
            loop = instructions[labels[target[1]] :] if target and target[1] in labels else []
            longest = max(longest, loop, key=len)
    assert longest, "the listing shows no loop"
    return longest


def main() -> None:
    """Print a Markdown table, or JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--capability", type=int, nargs="+", default=[90])
    parser.add_argument("--json", action="store_true", help="instead of tables")
    options = parser.parse_args()
    found = {capability: list(codes(capability)) for capability in options.capability}
    if options.json:
        print(json.dumps({sm: [asdict(code) for code in all_] for sm, all_ in found.items()}))
        return
    print(f"Triton {triton.__version__}")
    for capability, all_ in found.items():
        print(f"\n| sm_{capability} | registers | stack | shared KiB | instructions | barriers |")
        print("|---|---|---|---|---|---|")
        for code in all_:
            print(
                f"| {code.kernel} | {code.registers} | {code.stack} "
                f"| {code.shared / 1024:.1f} | {code.instructions:.1f} | {code.barriers} |"
            )


if __name__ == "__main__":
    main()
