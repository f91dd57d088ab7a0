"""The parallel methods, by the name that --method takes. Read single.py first, then what others add to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from train.methods.ddp import Ddp
from train.methods.single import Single

if TYPE_CHECKING:
    from train.methods.base import Method

METHODS: dict[str, type[Method]] = {
    "single": Single,
    "ddp": Ddp,
}
