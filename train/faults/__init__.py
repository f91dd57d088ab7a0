"""Injected faults: known causes of desynchronized ranks, to learn from and to test the diagnosis."""

from __future__ import annotations

from train.faults.base import Fault
from train.faults.table import FAULTS, list_faults, make_fault

__all__ = ["FAULTS", "Fault", "list_faults", "make_fault"]
