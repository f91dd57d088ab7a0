"""Repair a job whose ranks are out of sync, with copies from a healthy rank."""

from syncheck.live.repair.resynchronization import Resync, resync

__all__ = ["Resync", "resync"]
