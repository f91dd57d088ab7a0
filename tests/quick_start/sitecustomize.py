"""Imported by Python at the start of each process of the tests: fewer garbage collections while it imports torch.

An import of torch creates a million objects that stay, and Python begins a search for garbage after each 700 new ones.
The searches take a fifth of the processor time of a process that only imports torch, and the tests start thousands.
"""

import atexit
import gc
import sys

gc.set_threshold(50_000, 20, 100)
if any(word.endswith(("/torchrun", "torch.distributed.run")) for word in sys.orig_argv[:4]):
    # The end of torchrun's own process, which has no threads of gloo, is a last search of the same objects.
    atexit.register(gc.freeze)
