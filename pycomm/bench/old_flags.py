"""Renamed flags of command lines: the old names still work, with a warning."""

from __future__ import annotations

import argparse
import sys
from typing import Any


class _OldFlag(argparse.Action):
    def __init__(self, option_strings: list[str], dest: str, new: argparse.Action) -> None:
        super().__init__(
            option_strings,
            dest,
            nargs=new.nargs,
            type=new.type,  # type: ignore[arg-type] # typeshed: it may be a registered name
            choices=new.choices,
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )
        self._new = new

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Warns, and then acts like the renamed flag."""
        name = self._new.option_strings[-1]
        print(f"{parser.prog}: warning: {option_string} is called {name} now", file=sys.stderr)
        self._new(parser, namespace, values, option_string)


def keep_old_flag(parser: argparse.ArgumentParser, old: str, new: argparse.Action) -> None:
    """Accepts `old` as a name of the flag `new`, from ``add_argument``; the help hides it."""
    parser.add_argument(old, action=_OldFlag, dest=new.dest, new=new)
