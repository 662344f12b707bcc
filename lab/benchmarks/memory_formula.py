"""The memory of pruning a streamed model, by a formula of its shape."""

from dataclasses import dataclass

VOCABULARY = 32000
GB = 1e9


@dataclass(frozen=True)
class Shape:
    """A LLaMA-shaped model in 16 bits, and the windows that calibrate it.

    Attributes:
        hidden: The size of the hidden state.
        intermediate: The size of the MLP's inner features.
        blocks: The number of blocks.
        key_values: The rows of the projections of keys and of values.
        windows: The number of calibration windows.
        length: Tokens a window; windows run one at a time.
    """

    hidden: int
    intermediate: int
    blocks: int
    key_values: int
    windows: int = 128
    length: int = 2048

    @property
    def groups(self) -> list[list[tuple[int, int]]]:
        """The layers of a block (rows, columns), in their order, grouped by input."""
        h, i, kv = self.hidden, self.intermediate, self.key_values
        return [[(h, h), (kv, h), (kv, h)], [(h, h)], [(i, h), (i, h)], [(h, i)]]

    @property
    def block_bytes(self) -> int:
        """The weights of a block."""
        layers = sum(rows * columns for group in self.groups for rows, columns in group)
        return 2 * (layers + 2 * self.hidden)

    @property
    def rest_bytes(self) -> int:
        """The weights in no block: embedding, head and the last norm."""
        return 2 * (2 * VOCABULARY * self.hidden + self.hidden)

    @property
    def model_bytes(self) -> int:
        """All weights."""
        return self.rest_bytes + self.blocks * self.block_bytes


MODELS = {
    "7B": Shape(4096, 11008, 32, 4096),
    "13B": Shape(5120, 13824, 40, 5120),
    "70B": Shape(8192, 28672, 80, 1024),
}


def parts(shape: Shape, solver: tuple[float, float]) -> dict[str, float]:
    """Return the bytes of pruning, besides the libraries, by purpose.

    Args:
        shape: The model and its calibration.
        solver: Float32 numbers of the solver for each weight of a layer, and for each element of
            its Hessian.
    """
    hessians = [4 * group[0][1] ** 2 for group in shape.groups]
    per_weight, per_square = solver
    solving = []
    for j, group in enumerate(shape.groups):
        rows, columns = max(group)
        mine = 4 * (per_weight * rows * columns + per_square * columns**2)
        solving.append(sum(hessians[j:]) + mine)
    tokens = shape.length
    # The inputs of the MLP's layers in 16 bits, one of them in float32 for its Hessian.
    running = tokens * shape.intermediate * (3 * 2 + 4)
    first = tokens * VOCABULARY * 2  # the logits of the one whole forward, before all else
    return {
        "embedding and head": shape.rest_bytes,
        "a block": shape.block_bytes,
        "hidden states": shape.windows * shape.length * shape.hidden * 2,
        "Hessians and solver": max(*solving, sum(hessians) + running, first),
    }


def print_formula(
    method: str,
    measured: Shape,
    taken: dict[str, int],
    constants: dict[str, tuple[float, float]],
) -> None:
    """Print the formula's and the measured bytes of the run, and the formula's of larger models."""
    libraries = taken["libraries"]
    rows: list[tuple[str, str, Shape]] = [("this run", method, measured)]
    rows += [(name, "SM", shape) for name, shape in MODELS.items()]
    for name, (weights, squares) in constants.items():
        print(f"{name}: a = {weights:.1f}, b = {squares:.1f} numbers.")
    names = list(parts(measured, constants[method]))
    print(f"\nIn GB; the libraries take {libraries / GB:.2f}:\n")
    print(f"| model | method | windows | weights | {' | '.join(names)} | all | measured |")
    print(f"| --- | --- | --- | --- | {' | '.join('---' for _ in names)} | --- | --- |")
    for name, how, shape in rows:
        found = parts(shape, constants[how])
        total = libraries + sum(found.values())
        cells = [f"{shape.windows} × {shape.length}", f"{shape.model_bytes / GB:.1f}"]
        cells += [f"{value / GB:.2f}" for value in found.values()]
        known = f"{taken['peak'] / GB:.2f}" if shape is measured else ""
        print(f"| {name} | {how} | {' | '.join(cells)} | {total / GB:.2f} | {known} |")
