"""Imported by Python at the start of each process of the tests: fewer garbage collections while it imports torch.

An import of torch creates a million objects that stay, and Python begins a search for garbage after each 700 new ones.
The searches take a fifth of the processor time of a process that only imports torch, and the tests start thousands.
"""

import atexit
import gc
import os
import sys
import time

gc.set_threshold(50_000, 20, 100)
if any(word.endswith(("/torchrun", "torch.distributed.run")) for word in sys.orig_argv[:4]):
    # The end of torchrun's own process, which has no threads of gloo, is a last search of the same objects.
    atexit.register(gc.freeze)


def wait_for_gloo() -> None:
    """Release the GIL for a moment, to give gloo's threads time to finish.

    If a program ends without destroy_process_group, as with the Trainer of transformers, a thread of gloo may still
    hold a tensor of the last collective. The thread then requests the GIL of an interpreter during shutdown, and the
    process aborts: https://github.com/pytorch/pytorch/issues/190489
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        time.sleep(0.2)


if "WAIT_FOR_GLOO" in os.environ:  # set by support/libraries.py
    atexit.register(wait_for_gloo)  # functions registered first are called last

if "SYNCHECK_LIKE_MACOS" in os.environ:  # set by tools/like_macos.py
    for name in ("O_DIRECT", "O_TMPFILE", "posix_fadvise"):
        if hasattr(os, name):
            delattr(os, name)
    import multiprocessing

    multiprocessing.set_start_method("spawn")
