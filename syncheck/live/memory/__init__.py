"""Snapshots of modules, optimizers, state dicts and tensors in memory."""

from syncheck.live.memory.capture import FORMAT, agree_on_buffers, snapshot

__all__ = ["FORMAT", "agree_on_buffers", "snapshot"]
