"""Save and restore the full state of a run: --checkpoint-every and --resume.

state_saver.py decides when to save and restore, and compares the options of the saved and the resumed run.
state_files.py reads and writes state files, and finds the newest state complete on all ranks. state.py collects and
restores one rank's state with its RNG states, and sharded_state.py gives torch the shards for another number of ranks.
"""

from __future__ import annotations

from train.resume.state_files import state_path, states_folder
from train.resume.state_saver import StateSaver

__all__ = ["StateSaver", "state_path", "states_folder"]
