"""The frame of the command line: how a command is declared, how help reads, and which exit code ends it.

Exit codes: 0 done; 1 the request cannot be met, or a bundle differs from its model; 2 the command line was not
understood; 130 interrupted; 141 whoever read the output went away.
"""

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from kimi_graph.errors import KimiGraphError

from .output import fail


class _PurposeFirst:
    """Help that starts with what the command is for and an example; how to spell it comes after."""

    def format_help(self: Any, ctx: Any, formatter: Any) -> None:
        self.format_help_text(ctx, formatter)
        formatter.write_paragraph()
        self.format_usage(ctx, formatter)
        self.format_options(ctx, formatter)


class Command(_PurposeFirst, TyperCommand):
    pass


class Group(_PurposeFirst, TyperGroup):
    pass


app = typer.Typer(
    cls=Group,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def command(function: Callable[..., None], of: typer.Typer = app, name: str | None = None) -> Callable[..., None]:
    """Decorator: a command that ends in an exit code and one clean line, never in a traceback of ours."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            function(*args, **kwargs)
            sys.stdout.flush()
        except KimiGraphError as e:
            fail(str(e), as_json=kwargs.get("as_json", False))
        except BrokenPipeError:
            # Python flushes standard output once more at exit; there is nobody to write to.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(141) from None
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            raise typer.Exit(130) from None
        except OSError as e:
            if e.strerror is None:
                raise
            words = f"{e.filename}: {e.strerror}" if e.filename else e.strerror
            fail(words, as_json=kwargs.get("as_json", False))

    return of.command(name, cls=Command)(run)
