"""The console of the commands, which interprets no markup in strings."""

from typing import IO, Any

from rich import console


class Console(console.Console):
    """A rich console without markup, emoji and highlighting.

    rich reads `[x]` as a style, `:x:` as an emoji, and raises for `[/x]`. Names of files, models
    and layers may hold all of these. No string that comes here is therefore read as anything but
    text; a style is given by `rich.text.Text`.

    Args:
        width: The number of columns; `None` means the variable COLUMNS, else the width of the
            terminal, else 80. Longer lines are wrapped.
        file: The stream, by default standard output.
        stderr: Whether standard error takes the place of standard output.
    """

    def __init__(
        self, *, width: int | None = None, file: IO[str] | None = None, stderr: bool = False
    ) -> None:
        plain: dict[str, Any] = {"markup": False, "emoji": False, "highlight": False}
        super().__init__(width=width, file=file, stderr=stderr, **plain)
