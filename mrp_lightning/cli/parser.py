"""The parser of every command line: jsonargparse's, which reports a mistake in one line."""

import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from jsonargparse import ArgumentParser, set_parsing_settings

from mrp_lightning.cli.arguments_given import Argument, arguments_given
from mrp_lightning.cli.mistakes import explain, unknown_key
from mrp_lightning.errors import OptionError
from mrp_lightning.upstream.other_names import options_of

# The documentation of attributes, which `Settings` has, takes half a second: for help only.
_WANTS_HELP = any(arg == "-h" or "help" in arg for arg in sys.argv)
set_parsing_settings(docstring_parse_attribute_docstrings=_WANTS_HELP)


class Parser(ArgumentParser):
    """jsonargparse's parser, which raises a mistake instead of printing the usage.

    Options are not abbreviated: a short form of one option today may fit two tomorrow.

    Attributes:
        defaults_given: Arguments of an object that is parsed without a command line; for messages.
    """

    defaults_given: Sequence[Argument] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, allow_abbrev=False, **kwargs)
        self._given: Sequence[Argument] = ()

    def parse_args(self, args: Sequence[str] | None = None, *more: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Parse a command line, and keep its arguments for messages.

        Raises:
            OptionError: There is a mistake in it, or in one of its YAML files.
        """
        takes_files = "--config" in options_of(self)
        self._given = arguments_given(sys.argv[1:] if args is None else args, files=takes_files)
        return super().parse_args(args, *more, **kwargs)

    def refuse_unknown(self) -> None:
        """Refuse keys of YAML files that are no option.

        jsonargparse reports unknown keys with a value, but drops empty ones, such as `{}`.

        Raises:
            OptionError: There is one.
        """
        if problem := unknown_key(options_of(self), self._given):
            raise OptionError(problem)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise the mistake with its origin and the nearest name."""
        if not self.exit_on_error:  # a parser inside another one, which reports
            super().error(message, ex)
        parser = getattr(ex, "subcommand_parser", None) or self
        types = options_of(parser).items()
        options = {name.lstrip("-").removesuffix("+"): kind for name, kind in types}
        arguments = [*self._given, *self.defaults_given]
        raise OptionError(explain(message, options, arguments)) from ex
