"""Check the ranks of a training run every N optimizer steps."""

from syncheck.live.monitor.monitor import SyncMonitor

__all__ = ["SyncMonitor"]
