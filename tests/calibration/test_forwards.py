from torch import nn

from mrp_lightning.calibration.walks import replaced


def test_replacements_nest_and_what_stood_there_comes_back():
    module = nn.Linear(2, 2)
    with replaced(module, "forward", lambda _: "outer"):
        with replaced(module, "forward", lambda _: "inner"):
            assert module(0) == "inner"
        assert module(0) == "outer"
    assert "forward" not in vars(module)
    module.note = None  # of its own, and as false as nothing
    with replaced(module, "note", 1):
        assert module.note == 1
    assert vars(module)["note"] is None
