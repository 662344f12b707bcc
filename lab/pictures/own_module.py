"""The picture of docs/notebooks.md: the last one of the notebook `own_module`.

    python lab/pictures/own_module.py

It runs the script of the notebook, half a minute on a CPU.
"""

import io
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import matplotlib

from mrp_lightning.experiments.pictures import PAPER, STYLE

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples/notebooks/own_module.py"
OUT = ROOT / "docs/pictures/own-module.svg"


def main() -> None:
    """Run the script, and write its picture."""
    matplotlib.use("Agg")
    with matplotlib.rc_context(STYLE):
        names: dict = {"__name__": "notebook"}
        exec(compile(SCRIPT.read_text("utf-8"), str(SCRIPT), "exec"), names)
        stream = io.StringIO()
        names["figure"].savefig(stream, format="svg", facecolor=PAPER, metadata={"Date": None})
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(re.sub(r"[ \t]+$", "", stream.getvalue(), flags=re.M), encoding="utf-8")


if __name__ == "__main__":
    main()
