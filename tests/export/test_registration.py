"""transformers learns the packed formats, in whichever order it and we are imported."""

import re
import subprocess
import sys

import pytest

from mrp_sparse.formats.packed_format import NOTE

TEACH = "import export"
READ = "from transformers import AutoModelForCausalLM"
LOAD = (
    "import sys; model = AutoModelForCausalLM.from_pretrained(sys.argv[1]);"
    "print(type(model.model.layers[0].mlp.up_proj).__name__)"
)


@pytest.mark.parametrize(
    "order",
    [(READ, TEACH), ("import transformers", "import mrp_sparse", READ)],
)
def test_from_pretrained_knows_the_formats_in_any_order_of_imports(order, exports, tmp_path):
    packed = exports("packed", tmp_path).packed
    command = [sys.executable, "-c", ";".join([*order, LOAD]), str(packed)]
    shown = subprocess.run(command, capture_output=True, text=True, check=False)
    assert shown.stdout.split() == ["Sparse24Linear"], shown.stderr
    assert "UNEXPECTED" not in shown.stderr


def test_without_the_runtime_transformers_shows_what_to_install(exports, tmp_path):
    packed = exports("packed", tmp_path).packed
    code = (
        "from transformers import AutoModelForCausalLM as M\n"
        f"try: M.from_pretrained({str(packed)!r})\n"
        "except RuntimeError: raise SystemExit(3)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 3
    assert re.search(rf"^{NOTE} +\| UNEXPECTED", ended.stderr, flags=re.M)
