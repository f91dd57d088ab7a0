"""The parallel methods, one file each. Start with single.py."""

from __future__ import annotations

from train.methods.all_methods import METHODS, MODIFIERS, assign_mesh, check_modifiers

__all__ = ["METHODS", "MODIFIERS", "assign_mesh", "check_modifiers"]
