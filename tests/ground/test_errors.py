"""What is told of a library's error."""

import pytest

from mrp_lightning.errors import first_line


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (EOFError(), "EOFError"),
        (RuntimeError("\n  \n"), "RuntimeError"),
        (RuntimeError("\nno kernel\nat line 3"), "RuntimeError: no kernel"),
        (KeyError("weight"), "KeyError: 'weight'"),
    ],
)
def test_the_kind_and_the_first_line_that_says_something(error, told):
    assert first_line(error) == told
