"""The console of the commands, which interprets no markup in strings."""

from typing import Any

from rich import console


class Console(console.Console):
    """A rich console without markup, emoji and highlighting.

    rich reads `[x]` as a style, `:x:` as an emoji, and raises for `[/x]`. Names of files, models
    and layers may hold all of these. No string that comes here is therefore read as anything but
    text; a style is given by `rich.text.Text`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)
