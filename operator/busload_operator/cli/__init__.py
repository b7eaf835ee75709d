"""The `busload` command. Every module of this package is one command of that name; see README.md for the rules."""

import importlib
import pkgutil

import typer


def build_app() -> typer.Typer:
    """The typer app with one command per module of this package that has a function `command`."""
    app = typer.Typer(
        name="busload",
        help="Fill the bus before you buy another: an LLM runtime and the Kubernetes operator that tunes it.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
    )
    app.callback()(_root)
    for module in sorted(found.name for found in pkgutil.iter_modules(__path__)):
        command = getattr(importlib.import_module(f"{__name__}.{module}"), "command", None)
        if command is not None:
            app.command(module.rstrip("_").replace("_", "-"))(command)
    return app


def _root() -> None:
    # A callback keeps `busload serve` a subcommand even when it is the only one (typer would hoist it otherwise).
    pass


def main() -> None:
    """Entry point of the console script."""
    build_app()()
