"""How the processes of a run are started, and how each of them learns who it is.

torchrun.py, by_hand.py, spawn.py and slurm.py are the ways to start; choose.py picks the one at work. Whichever it
is, the trainer sees a RankContext, and process_group opens and closes what its collectives need.
"""

from __future__ import annotations

from train.launch import spawn
from train.launch.choose import LAUNCHERS, from_environment, launched, launcher_name
from train.launch.context import RankContext
from train.launch.devices import idle_gpus
from train.launch.group import PeerLost, process_group
from train.launch.leaving import INTERRUPTED, Ending, leave, say, speaks, tell, write_line
from train.launch.options import LaunchOptions, add_options
from train.launch.signals import SIGNALS

__all__ = [
    "INTERRUPTED",
    "LAUNCHERS",
    "SIGNALS",
    "Ending",
    "LaunchOptions",
    "PeerLost",
    "RankContext",
    "add_options",
    "from_environment",
    "idle_gpus",
    "launched",
    "launcher_name",
    "leave",
    "process_group",
    "say",
    "spawn",
    "speaks",
    "tell",
    "write_line",
]
