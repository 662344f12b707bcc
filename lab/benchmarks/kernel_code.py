"""The machine code of the Triton kernels, also for devices that this machine lacks.

    python lab/benchmarks/kernel_code.py
    python lab/benchmarks/kernel_code.py --capability 80 --json

Compiles every configuration that a device would measure, for bfloat16, and counts what its loop
executes. Triton brings compiler and disassembler along.
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

from mrp_sparse.kernels import triton_bitmask, triton_kernels
from mrp_sparse.kernels.candidates import KERNELS, PackedWeight

COLUMNS = 65536
"""So many that no loop is unrolled whole."""
ROWS = 256
WARP = 32
TOOLS = Path(nvidia.__file__).parent / "bin"


@dataclass(frozen=True)
class Code:
    """The machine code of one configuration of a kernel, in numbers.

    Attributes:
        kernel: Name in `KERNELS`.
        config: Its configuration.
        registers: Registers of a thread.
        stack: Bytes of a thread's stack: registers that did not fit.
        shared: Bytes of shared memory of a program.
        instructions: Instructions of a thread in the loop, for each kept weight.
        barriers: Barriers in the loop.
    """

    kernel: str
    config: dict[str, int]
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
    """Compile all configurations for sm_`capability`, by calling the kernels without launching."""
    compiled: list[Any] = []
    run = JITFunction.run

    def compile_only(self: JITFunction, *args: Any, **options: Any) -> None:
        compiled.append(run(self, *args, **options | {"warmup": True}))

    driver.set_active(_device(capability))
    values = torch.zeros(ROWS, COLUMNS // 2, dtype=torch.bfloat16)
    meta = torch.zeros(ROWS, COLUMNS // 8, dtype=torch.uint8)
    weight = PackedWeight(values, meta)
    with mock.patch.object(JITFunction, "run", compile_only):
        for name, tokens in {"triton-gemv": 1, "triton-gemm": 8}.items():
            x = torch.zeros(tokens, COLUMNS, dtype=torch.bfloat16)
            for config in KERNELS[name].configs:
                KERNELS[name].multiply(x, weight, None, **config)
                yield _code(name, dict(config), compiled.pop())
            # Nothing of these is counted, but they have to compile: float16, and a bias.
            half = PackedWeight(values.half(), meta)
            bias = torch.zeros(ROWS, dtype=torch.float16)
            KERNELS[name].multiply(x.half(), half, bias, **KERNELS[name].configs[0])
        triton_kernels.unpack(values, meta)  # it has no loop
        _compile_bitmasks()


def _compile_bitmasks() -> None:
    """Compile the kernels for bitmasks, of which nothing is counted."""
    bits, offsets = torch.zeros(ROWS, COLUMNS // 8, dtype=torch.uint8), torch.zeros(ROWS).long()
    for dtype in (torch.bfloat16, torch.float16):
        values, bias = torch.zeros(64, dtype=dtype), torch.zeros(ROWS, dtype=dtype)
        scales = torch.zeros(ROWS, COLUMNS // triton_bitmask.GROUP, dtype=dtype)
        for stored in ((values, bits, None, offsets), (values.byte(), bits, scales, offsets)):
            triton_bitmask.product(torch.zeros(8, COLUMNS, dtype=dtype), *stored, bias)
            triton_bitmask.unpack(*stored, COLUMNS)


def _code(name: str, config: dict[str, int], compiled: Any) -> Code:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        used = _tool("cuobjdump", "--dump-resource-usage", file.name)
        listing = _tool("nvdisasm", "-c", file.name)
    loop = _loop(listing)
    weights = _weights_a_step(name, config) / (WARP * compiled.metadata.num_warps)
    return Code(
        kernel=name,
        config=config,
        registers=int(re.search(r"REG:(\d+)", used)[1]),
        stack=int(re.search(r"STACK:(\d+)", used)[1]),
        shared=compiled.metadata.shared,
        instructions=len(loop) / weights,
        barriers=sum("BAR.SYNC" in instruction for instruction in loop),
    )


def _tool(name: str, *arguments: str) -> str:
    command = [TOOLS / name, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _weights_a_step(name: str, config: dict[str, int]) -> float:
    """Return the number of kept weights that a program reads in one step of its loop."""
    if name == "triton-gemv":
        return config["rows"] * config["groups"] * 2 * config.get("unroll", 1)
    return config["rows"] * config["columns"] * config.get("split", 1) / 2


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
            config = " ".join(f"{name}={value}" for name, value in code.config.items())
            print(
                f"| {code.kernel} {config} | {code.registers} | {code.stack} "
                f"| {code.shared / 1024:.1f} | {code.instructions:.1f} | {code.barriers} |"
            )


if __name__ == "__main__":
    main()
