"""One weight matrix, without Lightning or transformers.

    python examples/one_matrix.py

Prunes one matrix to 2:4 by four methods, and compares the errors of its outputs on inputs that the
calibration did not see.
"""

import torch

from mrp_lightning import HessianAccumulator, prune_weight


def inputs(tokens: int, mixing: torch.Tensor) -> torch.Tensor:
    """Correlated features, as the activations of a network are."""
    return torch.randn(tokens, mixing.shape[0]) @ mixing


def main() -> dict[str, float]:
    torch.manual_seed(0)
    rows, columns = 256, 128
    weight = torch.randn(rows, columns) / columns**0.5
    mixing = torch.randn(columns, columns) / columns**0.5
    accumulator = HessianAccumulator(columns)
    for _ in range(8):  # as many batches as there are; only XᵀX is kept
        accumulator.update(inputs(512, mixing))

    unseen = inputs(4096, mixing)
    errors = {}
    for method in ("magnitude", "sparsegpt", "SM", "MM"):
        solution = prune_weight(weight, accumulator.hessian(), pattern="2:4", method=method)
        change = (solution.weight - weight) @ unseen.T
        errors[method] = float(change.square().sum() / (weight @ unseen.T).square().sum())
        certified = "" if solution.gap is None else f", certified gap {solution.gap:.0e}"
        print(f"{method:10} relative output error {errors[method]:.4f}{certified}")
    return errors


if __name__ == "__main__":
    main()
