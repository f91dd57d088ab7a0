"""Injected faults: known causes of desynchronized ranks, to learn from and to test the diagnosis."""

from __future__ import annotations

from train.faults.base import Fault, FaultyStep
from train.faults.table import FAULTS, make_fault

__all__ = ["FAULTS", "Fault", "FaultyStep", "make_fault"]
