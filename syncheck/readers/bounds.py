"""How much one file may hold: the numbers, which SECURITY.md states. No checkpoint that was trained comes near them.

The largest models that were published have some hundred thousand tensors in a file, with the optimizer's, and a state
dict some million values. A file of 100 MB can claim a hundred million.
"""

from __future__ import annotations

# Tensors of a safetensors file or a fingerprint.
MOST_TENSORS = 1_000_000
# Parts of all containers of a pickle.
MOST_ENTRIES = 5_000_000
# Objects that a pickle builds, or JSON, each counted by what it takes in memory: 1 for some hundred bytes.
MOST_OBJECTS = 20_000_000
# The same of the `.metadata` of torch.distributed.checkpoint, which has several for each chunk: of a million chunks.
MOST_INDEX_OBJECTS = 120_000_000
# Names of classes that are not known.
MOST_CLASSES = 10_000
