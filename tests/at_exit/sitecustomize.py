"""Imported by Python when a program of libraries.py starts: gives gloo's threads time to finish at exit.

If a program ends without destroy_process_group, as with the Trainer of transformers, a thread of gloo may still hold a
tensor of the last collective. The thread then requests the GIL of an interpreter during shutdown, and the process
aborts: https://github.com/pytorch/pytorch/issues/190489
"""

import atexit
import gc
import sys
import time

gc.set_threshold(50_000, 20, 100)  # as in tests/quick_start, which this module replaces


@atexit.register  # functions registered first are called last
def wait_for_gloo() -> None:
    """Release the GIL for a moment."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        time.sleep(0.2)
