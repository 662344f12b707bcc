"""Write sparsegpt.json: what the original SparseGPT code does to a small seeded problem.

    git clone https://github.com/IST-DASLab/sparsegpt
    python tests/solver/reference/make.py sparsegpt

The file records the commit. For unstructured sparsity that code removes the weights up to a
threshold, which is one more than asked for in each block; so it is asked for half a weight less
than the number that ours removes. Sparsities are multiples of 1/8, where ours removes the same
number in every block.
"""

import json
import subprocess
import sys
from pathlib import Path

import torch

CASES = [("2:4", None, "2:4", 128), ("4:8", None, "4:8", 32), ("1:4", None, "1:4", 128)]
CASES += [("50%", 0.5, None, 128), ("50%, blocks of 32", 0.5, None, 32), ("75%", 0.75, None, 32)]


def problem():
    """A weight (64, 128) and inputs with correlated features and a few large channels."""
    generator = torch.Generator().manual_seed(2023)
    mixing = torch.randn(128, 128, generator=generator) * torch.arange(1, 129) ** -0.6
    channels = torch.exp(0.5 * torch.randn(128, generator=generator))
    channels[::40] *= 8
    inputs = torch.randn(1024, 128, generator=generator) @ mixing.T * channels
    weight = torch.randn(64, 128, generator=generator) / 8
    return weight, inputs


def main() -> None:
    repository = Path(sys.argv[1])
    sys.path.insert(0, str(repository))
    from sparsegpt import SparseGPT

    torch.cuda.synchronize = lambda: None  # the code assumes a GPU for its clock only
    weight, inputs = problem()
    hessian = 2 * inputs.double().T @ inputs.double() / len(inputs)
    cases = []
    for name, sparsity, pattern, block_size in CASES:
        layer = torch.nn.Linear(128, 64, bias=False)
        layer.weight.data = weight.clone()
        pruner = SparseGPT(layer)
        pruner.add_batch(inputs, None)
        removed, group = 0, 0
        asked = 0.0
        if pattern is None:
            in_block = 64 * block_size
            asked = (int(sparsity * in_block + 0.5) - 0.5) / in_block
        else:
            kept, group = map(int, pattern.split(":"))
            removed = group - kept
        pruner.fasterprune(asked, prunen=removed, prunem=group, blocksize=block_size)
        change = layer.weight.data.double() - weight.double()
        zeros = (layer.weight.data == 0).flatten()
        cases.append(
            {
                "name": name,
                "sparsity": sparsity,
                "pattern": pattern,
                "block_size": block_size,
                "loss": float(((change @ hessian) * change).sum()) / 2,
                "num_removed": int(zeros.sum()),
                "removed_bits": "".join("01"[int(z)] for z in zeros),
            }
        )
    for case in cases:
        case["removed_bits"] = f"{int(case['removed_bits'], 2):02048x}"
    result = {
        "repository": "https://github.com/IST-DASLab/sparsegpt",
        "commit": sys.argv[2] if len(sys.argv) > 2 else commit_of(repository),
        "weight_head": weight.flatten()[:4].tolist(),
        "inputs_head": inputs.flatten()[:4].tolist(),
        "cases": cases,
    }
    path = Path(__file__).parent / "sparsegpt.json"
    path.write_text(json.dumps(result, indent=1) + "\n")


def commit_of(repository: Path) -> str:
    command = ["git", "-C", str(repository), "rev-parse", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
