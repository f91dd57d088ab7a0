"""--checkpoint-every and --resume: a run that was interrupted goes on as if it had not been.

files.py: where the states lie, and how one is read with suspicion. state.py: what a rank saves and takes back.
generators.py: random numbers. search.py: the newest state that all ranks have. shards.py: what is divided, for another
number of ranks. differences.py: what may have changed since, and what that means. keeper.py: when all this happens.
"""

from __future__ import annotations

from train.resume.files import state_path, states_folder
from train.resume.keeper import Keeper, Stateful

__all__ = ["Keeper", "Stateful", "state_path", "states_folder"]
