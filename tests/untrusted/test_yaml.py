"""A configuration that is no YAML, or stands for more than fits into memory, is refused at once."""

import itertools
import re

import pytest

from mrp_lightning.commands.arguments_given import arguments_given as given

DOUBTS = "a: &a [x, x]\n" + "".join(
    f"{key}: &{key} [*{before}, *{before}]\n" for before, key in zip("abcd", "bcde", strict=True)
)


def laughs(depth: int) -> str:
    names = [f"n{i}" for i in range(depth)]
    lines = [f"n0: &n0 [{', '.join('x' * 9)}]"]
    lines += [
        f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]"
        for before, name in itertools.pairwise(names)
    ]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (laughs(12), "its aliases stand for more than 100,000 values"),
        ("a: &a [*a]", "nested too deeply, or in themselves"),
        ("[" * 1200 + "]" * 1200, "nested too deeply"),
        (b"\xff\xfe\x00", "no YAML"),
        ("a: \0", "no YAML"),
        ("a: 1\n---\nb: 2", "line 2: no YAML, but found another document"),
    ],
    ids=["laughs", "cycle", "deep", "bytes", "nul", "two"],
)
def test_what_is_refused(tmp_path, text, message, capsys):
    pytest.importorskip("jsonargparse", reason="needs the extra `cli`")
    from mrp_lightning.commands.main import main

    file = tmp_path / "a.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    for command in ("predict", "sweep"):
        with pytest.raises(SystemExit) as ended:
            main([command, "--config", str(file)])
        assert ended.value.code == 2
        assert re.search(message, capsys.readouterr().err)


def test_aliases_that_stand_for_little_are_taken(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text(DOUBTS)
    found = given(["--config", str(file)])
    assert [one.path for one in found if one.value == "x"][:2] == ["a", "a"]


def test_tags_call_nothing(tmp_path, capsys):
    pytest.importorskip("jsonargparse", reason="needs the extra `cli`")
    from mrp_lightning.commands.main import main

    file, ran = tmp_path / "a.yaml", tmp_path / "ran"
    for text in (
        f"model: !!python/object/apply:os.mkdir [{ran}]",
        f"trainer: {{callbacks: [{{class_path: os.mkdir, init_args: {{path: {ran}}}}}]}}",
    ):
        file.write_text(text)
        with pytest.raises(SystemExit):
            main(["predict", "--config", str(file)])
    assert not ran.exists()
