"""The parser of all command lines: jsonargparse's, with mistakes reported in one line."""

import logging
import re
import sys
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NoReturn

from jsonargparse import ArgumentParser, set_parsing_settings

from mrp_lightning.commands.arguments_given import Argument, arguments_given
from mrp_lightning.commands.mistakes import explain, nearest, unknown_key
from mrp_lightning.errors import ArgumentError, OptionError
from mrp_lightning.upstream.other_names import option_named, options_of, take_strings

# Reading attribute docstrings, which `Settings` has, takes half a second: for help only.
_WANTS_HELP = any(arg == "-h" or "help" in arg for arg in sys.argv)
set_parsing_settings(docstring_parse_attribute_docstrings=_WANTS_HELP)


class Parser(ArgumentParser):
    """jsonargparse's parser, but mistakes raise an error instead of printing the usage.

    Options cannot be abbreviated, since an abbreviation may become ambiguous in a later version.
    They may be written with underscores, as in Python and YAML, in place of dashes.

    Attributes:
        defaults_given: Arguments of an object that is parsed without a command line, for messages.
        model_first: Whether the first positional argument is the model, as an alternative to
            `--model`.
        spellings: The words in messages for a `key` or `key: value`, in lower case, that is no
            option with the name of its key.
    """

    defaults_given: Sequence[Argument] = ()
    model_first: bool = False
    spellings: Mapping[str, str] = MappingProxyType({})

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, allow_abbrev=False, **kwargs)
        self._arguments: Sequence[Argument] = ()

    def add_class_arguments(self, *args: Any, **kwargs: Any) -> list[str]:
        """Add the arguments of a class; those that take a string read no file of that name."""
        added: list[str] = super().add_class_arguments(*args, **kwargs)
        take_strings(self)
        return added

    def parse_args(self, args: Sequence[str] | None = None, *more: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Parse a command line, and keep its arguments for messages.

        Raises:
            OptionError: The command line or one of its YAML files has a mistake.
        """
        options = options_of(self)
        args = [_dashed(arg, options) for arg in (sys.argv[1:] if args is None else args)]
        if self.model_first and "--model" in (names := [arg.partition("=")[0] for arg in args]):
            position = names.index("--model")
            _, equals, value = args[position].partition("=")
            following = args[position + 1 : position + 2]
            if not value and (equals or not following or following[0].startswith("--")):
                raise OptionError("`--model` has no value: give a directory, a hub id or a file.")
            rest = args[position + (1 if equals else 2) :]
            args = [value or following[0], *args[:position], *rest]
        takes_files = "--config" in options
        if not takes_files:
            _refuse_others(args, options)
        self._arguments = arguments_given(args, files=takes_files)
        return super().parse_args(args, *more, **kwargs)

    @contextmanager
    def options_in_messages(self) -> Iterator[None]:
        """Name this parser's options in the errors, warnings and log records of this context.

        The package names arguments as Python and YAML have them. Records and warnings are changed
        where they are shown, so that a caller's own handlers get them as they are.
        """
        handler = logging.StreamHandler()
        handler.setFormatter(_OptionsFormatter(self, logging.Formatter()))
        log = logging.getLogger("mrp_lightning")
        log.addHandler(handler)
        # Messages of progress go through Lightning's logger, whose handler is there already.
        lightnings = logging.getLogger("lightning.pytorch")
        others = [(each, each.formatter) for each in lightnings.handlers]
        for other, formatter in others:
            other.setFormatter(_OptionsFormatter(self, formatter or logging.Formatter()))
        show = warnings.showwarning

        def show_with_options(message: Warning | str, *args: Any, **kwargs: Any) -> None:
            show(self.in_options(str(message)), *args, **kwargs)

        warnings.showwarning = show_with_options
        try:
            yield
        except Exception as error:
            # The error is changed and raised again, and not wrapped, so that its type still decides
            # the exit status.
            if isinstance(error, ArgumentError) and error.argument is not None:
                error.argument = option_named(self, error.argument) or error.argument
            if len(error.args) == 1 and isinstance(error.args[0], str):
                error.args = (self.in_options(error.args[0]),)
            raise
        finally:
            warnings.showwarning = show
            for other, formatter in others:
                other.setFormatter(formatter)
            log.removeHandler(handler)

    def in_options(self, message: str) -> str:
        """Return a message in which backquoted arguments of this parser are written as options.

        `--a b` stands for `a: b` or `a=b`. Other names stay.
        """
        message = re.sub(r"`(\w+)(?:(?:: *|=)([^`]+))?`", self._in_options, message)
        return re.sub(r"(`[^`]+`) or \1", r"\1", message)  # two names of one option

    def _in_options(self, argument: re.Match[str]) -> str:
        text, name, value = argument[0], argument[1], argument[2]
        option = self.spellings.get(text[1:-1].replace("=", ": ").lower())
        if option is None and (option := option_named(self, name)) is None:
            return text
        if value is not None and option_named(self, name) and value.lower() != "true":
            option = f"{option} {re.sub(r'[^-+.:/*_ 0-9A-Za-z]', '', value)}"
        return option if "`" in option else f"`{option}`"

    def refuse_unknown(self, within: Mapping[str, Collection[str]] = MappingProxyType({})) -> None:
        """Raise for keys of YAML files that are no options.

        jsonargparse reports unknown keys with a value, but ignores empty ones, such as `{}`.

        Args:
            within: The known keys of each nested mapping, by the mapping's dotted key; these are
                checked on the command line, too.

        Raises:
            OptionError: There is such a key.
        """
        if problem := unknown_key(options_of(self), self._arguments, within):
            raise OptionError(problem)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise an `OptionError` with the origin of the mistake and the nearest name."""
        if not self.exit_on_error:  # an inner parser, whose outer parser reports
            super().error(message, ex)
        parser = getattr(ex, "subcommand_parser", None) or self
        types = options_of(parser).items()
        options = {name.lstrip("-").removesuffix("+"): kind for name, kind in types}
        arguments = [*self._arguments, *self.defaults_given]
        message = re.sub(r"^argument (--[\w-]+): ", r"`\1`: ", message)
        explained = explain(message, options, arguments)
        missing = re.fullmatch(r"the following arguments are required: (.*)", explained)
        if missing:  # and no other key is nearly one of them
            raise OptionError(_missing(parser, missing[1].split(", "))) from ex
        takes_files = "--config" in options_of(parser)
        raise OptionError(explained if takes_files else self.in_options(explained)) from ex


class _OptionsFormatter(logging.Formatter):
    """Formats records as another formatter, with a parser's options in place of arguments."""

    def __init__(self, parser: Parser, formatter: logging.Formatter) -> None:
        super().__init__()
        self._parser, self._formatter = parser, formatter

    def format(self, record: logging.LogRecord) -> str:
        """Format a record."""
        return self._parser.in_options(self._formatter.format(record))


def _refuse_others(args: Sequence[str], options: Mapping[str, Any]) -> None:
    """Raise for an option that does not exist, with the nearest name."""
    names = [arg.partition("=")[0] for arg in args if arg.startswith("--")]
    long_options = [option for option in options if option.startswith("--")]
    for name in names:
        if name not in long_options:
            raise OptionError(f"there is no option `{name}`. {nearest(name, long_options)}")


def _missing(parser: Parser, names: Iterable[str]) -> str:
    """Return a message on missing required arguments of a parser, or of its subcommand."""
    command, shown = parser.prog, []
    for name in names:
        subcommand, dot, rest = name.partition(".")
        option = option_named(parser, name)
        if option is None and dot:
            command, option = f"mrp-lightning {subcommand}", f"--{rest}"
        shown.append(f"`{option or name}`")
    return f"`{command}` needs {', '.join(shown)}; see `{command} --help`."


def _dashed(arg: str, options: Mapping[str, Any]) -> str:
    """Return a word of a command line, with dashes for underscores in an option if need be."""
    name, equals, value = arg.partition("=")
    dashed = name.replace("_", "-")
    return f"{dashed}{equals}{value}" if name not in options and dashed in options else arg
