"""What all command lines of the trainer share."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, NoReturn

from train.errors import UserError
from train.launch import speaks

if TYPE_CHECKING:
    from _typeshed import SupportsWrite


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that says what is wrong in one line, once."""

    def error(self, message: str) -> NoReturn:
        """Hand over to the place where all mistakes are reported."""
        raise UserError(message)

    def print_help(self, file: SupportsWrite[str] | None = None) -> None:
        """Print the help once, whatever the number of processes."""
        if speaks(os.environ):
            super().print_help(file)
