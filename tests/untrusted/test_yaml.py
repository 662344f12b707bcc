"""A configuration that is no YAML is refused at once, and calls nothing by its tags."""

import re

import pytest

pytest.importorskip("jsonargparse", reason="needs the extra `cli`")

from mrp_lightning.commands.main import main


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 1200 + "]" * 1200, "nested too deeply"),
        (b"\xff\xfe\x00", "a.yaml, or a file named there, is no UTF-8: "),
        ("a: \0", "not allowed"),
        ("a: 1\n---\nb: 2", "expected a single document"),
        ("a: {b: 1, c: 2, b: 3}", "given twice: b"),
    ],
    ids=["deep", "bytes", "nul", "two", "twice"],
)
def test_files_that_are_refused(tmp_path, text, message, capsys):
    file = tmp_path / "a.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    for command in ("predict", "sweep")[: 1 + (text[0] == "[")]:
        with pytest.raises(SystemExit) as ended:
            main([command, "--config", str(file)])
        assert ended.value.code == 2
        assert re.search(message, capsys.readouterr().err)


def test_tags_call_nothing(tmp_path, capsys):
    file, ran = tmp_path / "a.yaml", tmp_path / "ran"
    for text in (
        f"model: !!python/object/apply:os.mkdir [{ran}]",
        f"trainer: {{callbacks: [{{class_path: os.mkdir, init_args: {{path: {ran}}}}}]}}",
    ):
        file.write_text(text)
        with pytest.raises(SystemExit):
            main(["predict", "--config", str(file)])
    assert not ran.exists()


def test_a_file_of_one_group_that_is_no_text_is_named(tmp_path, capsys):
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SystemExit):
        main(["predict", f"--data={tmp_path / 'bytes.yaml'}", "--model=absent"])
    assert "bytes.yaml, or a file named there, is no UTF-8" in capsys.readouterr().err
