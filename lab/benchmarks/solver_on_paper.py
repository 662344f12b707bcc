"""Products, bytes and seconds of the solver on an H100, computed, not measured.

    python lab/benchmarks/solver_on_paper.py

The counts are those of the code: factorisations and exact gradients in float32, products that only
steer in bfloat16. Rates are what large products reach on an H100 SXM; launches are not counted.
"""

BFLOAT16, FLOAT32, BANDWIDTH = 600e12, 50e12, 2.8e12  # multiply-adds count as two operations
BLOCK = 128  # columns
# As measured on layers of a 0.5B model: products between blocks, steps of the last solve and of J.
PRODUCTS_BETWEEN, LAST_STEPS, JOINT_STEPS, INVERSES = 5, 25, 30, 3
RENEWAL = 4  # blocks from one exact gradient to the next
MODELS = {  # layers of a block (rows, columns), blocks, parameters
    "Mistral-7B": (
        [
            *((4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096)),
            *((14336, 4096), (14336, 4096), (4096, 14336)),
        ],
        32,
        7.2e9,
    ),
    "LLaMA-70B": (
        [
            *((8192, 8192), (1024, 8192), (1024, 8192), (8192, 8192)),
            *((28672, 8192), (28672, 8192), (8192, 28672)),
        ],
        80,
        69e9,
    ),
}
TOKENS = 128 * 2048


def operations(rows: int, columns: int, method: str) -> tuple[float, float]:
    """Return the operations of a method on one layer, in bfloat16 and in float32."""
    product, cube = 2.0 * rows * columns**2, float(columns) ** 3
    factor = 4 / 3 * cube  # Cholesky and the inverse of the triangle
    if method == "SS":
        return 0.0, factor + product / 2
    # The last solve: its steps, and exact gradients, the certificate and two losses.
    narrow, full = LAST_STEPS * product, factor + 7 * product
    if method == "SM":
        # Products with the leading columns cost a third of a full one, averaged over the blocks.
        blocks = columns / BLOCK
        narrow += PRODUCTS_BETWEEN * blocks / 3 * product
        full += blocks / RENEWAL / 3 * product
        full += 4 / 3 * cube  # the inverse, and the Schur complements with their triangles
    elif method == "JM":
        narrow += JOINT_STEPS * product
        full += INVERSES * cube
    return narrow, full


def seconds(rows: int, columns: int, method: str) -> float:
    """Return the seconds of one layer: those of its operations, or of its memory traffic."""
    narrow, full = operations(rows, columns, method)
    steps = narrow / (2.0 * rows * columns**2)
    # A step reads the rounded H and passes ten times over matrices of the weight's size.
    traffic = steps * (2 * columns**2 + 40 * rows * columns)
    return narrow / BFLOAT16 + full / FLOAT32 + traffic / BANDWIDTH


def main() -> None:
    """Print the tables."""
    print(
        "| rows × columns | method | TFLOP bf16 | TFLOP float32 | seconds |\n|---|---|---|---|---|"
    )
    for rows, columns in ((4096, 4096), (4096, 14336), (8192, 28672)):
        for method in ("SS", "SM", "JM"):
            narrow, full = operations(rows, columns, method)
            time = seconds(rows, columns, method)
            print(
                f"| {rows}×{columns} | {method} | {narrow / 1e12:.2f} | {full / 1e12:.2f} | ",
                end="",
            )
            print(f"{time:.2f} |")
    print("\n| model | calibration | SS | SM | JM |\n|---|---|---|---|---|")
    for name, (layers, blocks, parameters) in MODELS.items():
        # q, k and v share an input, and so do gate and up.
        inputs = [layers[i][1] for i in (0, 3, 4, 6)]
        hessians = sum(2.0 * TOKENS * columns**2 for columns in inputs)
        calibration = (4 * parameters * TOKENS + blocks * hessians) / BFLOAT16
        times = [
            blocks * sum(seconds(*layer, method) for layer in layers)
            for method in ("SS", "SM", "JM")
        ]
        print(f"| {name} | {calibration:.0f} s | " + " | ".join(f"{t:.0f} s" for t in times) + " |")


if __name__ == "__main__":
    main()
