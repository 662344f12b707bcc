"""Files of records hold any name of a file."""

import os

from mrp_lightning.journal.manifest import plain
from mrp_lightning.records.model_card import with_section
from mrp_lightning.storage.json_files import as_json, read_json


def test_names_that_are_no_utf_8_are_written_and_read(tmp_path):
    """A finished pruning is saved, whatever the name of its text, and its journal can be read."""
    name = os.fsdecode(b"caf\xe9.txt")
    (tmp_path / "a.json").write_text(as_json({name: [name]}), encoding="utf-8")
    assert read_json(tmp_path / "a.json", "") == {"caf?.txt": ["caf?.txt"]}
    assert plain({name: name}) == {"caf?.txt": "caf?.txt"}
    with_section("", "Text", [name]).encode()
