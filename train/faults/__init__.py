"""Injected faults: known causes of desynchronized ranks, to learn from and to test the diagnosis."""

from __future__ import annotations

from train.faults.all_faults import FAULTS, make_fault
from train.faults.base import Fault

__all__ = ["FAULTS", "Fault", "make_fault"]
