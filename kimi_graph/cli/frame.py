"""The frame of the command line: how a command is declared, how help reads, and which exit code ends it."""

import functools
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from kimi_graph.errors import KimiGraphError

from .output import Manner, fail, interrupted, manner, refuse

INTERRUPTED = 130
EXIT_CODES = {
    0: "done",
    1: "it cannot be done, or what was looked at does not hold",
    2: "the command line was not understood",
    INTERRUPTED: "interrupted",
    141: "whoever read the output went away",
}
ENVIRONMENT = dict(os.environ)  # as it was given: `main` adds to it
UsageError: type[Exception] = typer.BadParameter.__mro__[1]  # typer brings its own click and does not show this name

Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else; of a refusal too.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print the last line alone, and errors; no progress.")]


class _PurposeFirst:
    """Help that starts with what the command is for and an example; how to spell it comes after."""

    def format_help(self: Any, ctx: Any, formatter: Any) -> None:
        self.format_help_text(ctx, formatter)
        formatter.write_paragraph()
        self.format_usage(ctx, formatter)
        self.format_options(ctx, formatter)
        self.format_epilog(ctx, formatter)


class Command(_PurposeFirst, TyperCommand):
    def get_short_help_str(self, limit: int = 45) -> str:
        """Its purpose in the list of commands: the whole first sentence, which the list breaks between words."""
        return super().get_short_help_str(limit=1000)


class Group(_PurposeFirst, TyperGroup):
    """Commands; what is wrong with a command line is said as every other error is."""

    def main(self, args: Sequence[str] | None = None, *rest: Any, standalone_mode: bool = True, **more: Any) -> Any:
        words = sys.argv[1:] if args is None else list(args)
        if not standalone_mode:
            return super().main(words, *rest, standalone_mode=False, **more)
        token = manner.set(Manner(as_json="--json" in words))
        try:
            code = super().main(words, *rest, standalone_mode=False, **more)
        except UsageError as e:
            refuse(_misunderstood(e, words))
            code = 2
        except (KeyboardInterrupt, typer.Abort):
            code = INTERRUPTED
        if code == INTERRUPTED:  # some releases of typer make this of Ctrl-C
            interrupted()
        manner.reset(token)
        sys.exit(code or 0)


def _misunderstood(e: Any, words: Sequence[str]) -> str:
    """What is wrong with a command line: where, what was found, what was expected; and where to read more."""
    said, param = e.format_message().rstrip("."), getattr(e, "param", None)
    hint = getattr(e, "param_hint", None)
    if hint is not None:
        said = f"{hint}: {e.message.rstrip('.')}"
    elif said == "Missing command":
        said = f"expected a command: {', '.join(e.ctx.command.commands)}"
    elif param is not None and e.message:
        name = max(param.opts, key=len) if param.param_type_name == "option" else param.metavar or param.name.upper()
        given = _given(param.opts, words)
        said = f"{name}{given}: {e.message[0].lower()}{e.message[1:].partition(', unable')[0].rstrip('.')}"
    more = "" if e.ctx is None else f" See {e.ctx.command_path} --help."
    return said + ("" if said.endswith("?") else ".") + more


def _given(names: Sequence[str], words: Sequence[str]) -> str:
    """The value that an option has on a command line, for a message."""
    for word, after in zip(words, [*words[1:], ""], strict=True):
        name, equal, value = word.partition("=")
        if name in names:
            return f" {value if equal else after}"
    return ""


app = typer.Typer(
    cls=Group,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    epilog="Exit codes: " + "; ".join(f"{code} {words}" for code, words in EXIT_CODES.items()) + ".",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def command(function: Callable[..., None], of: typer.Typer = app, name: str | None = None) -> Callable[..., None]:
    """Decorator: a command that ends in an exit code and one clean line, never in a traceback of ours.

    Every command takes `--json` and `--quiet`; what it prints by (`output`) follows them.
    """

    @functools.wraps(function)
    def run(*args: Any, as_json: bool, quiet: bool, **kwargs: Any) -> None:
        token = manner.set(Manner(as_json, quiet))
        try:
            function(*args, **kwargs)
            sys.stdout.flush()
        except KimiGraphError as e:
            fail(str(e))
        except BrokenPipeError:
            # Python flushes standard output once more at exit; there is nobody to write to.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(141) from None
        except OSError as e:
            if e.strerror is None:
                raise
            fail(f"{e.filename}: {e.strerror}" if e.filename else e.strerror)
        finally:
            manner.reset(token)

    own = inspect.signature(function)
    added = [
        inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=annotation)
        for key, annotation in (("as_json", Json), ("quiet", Quiet))
    ]
    run.__signature__ = own.replace(parameters=[*own.parameters.values(), *added])  # type: ignore[attr-defined]
    return of.command(name, cls=Command)(run)
