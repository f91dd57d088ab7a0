"""Start the processes of a run, give each its rank, and end them.

launch_options.py declares the options, environment.py finds out which rank and which GPU a process has,
process_group.py connects the ranks, and spawn.py starts the ranks of a machine for --spawn. signals.py ends a process.
"""

from __future__ import annotations

from train.launch.environment import RankContext

__all__ = ["RankContext"]
