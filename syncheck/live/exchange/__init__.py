"""Compare the objects or files of the ranks of a process group, with the same report on every rank."""

from syncheck.live.exchange.across_ranks import BUDGET, compare_across_ranks, compare_snapshots

__all__ = ["BUDGET", "compare_across_ranks", "compare_snapshots"]
