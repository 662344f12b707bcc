"""lab/results/models.md against a new run of what it shows."""

from pathlib import Path

import pytest
from models import COLUMNS, row
from tiny_configs import FAMILIES

PAGE = (Path(__file__).parents[2] / "lab" / "results" / "models.md").read_text()
TABLE = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("|")
]


def test_the_page_has_all_families():
    assert TABLE[0] == COLUMNS
    assert [line[0] for line in TABLE[2:]] == list(FAMILIES)


@pytest.mark.parametrize("family", ["gemma3_text", "t5"])
def test_a_row_is_what_a_run_gives(family):
    (shown,) = [line for line in TABLE if line[0] == family]
    *pruned, error = row(family)
    assert shown[:-1] == pruned
    # The last bits are those of the machine.
    assert float(error) <= 1e-5
    assert float(shown[-1]) <= 1e-5
