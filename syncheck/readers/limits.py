"""Limits for the content of one file, documented in SECURITY.md.

They are far above real checkpoints: the largest published models have some hundred thousand tensors in a file, with the
optimizer's, and a state dict some million values. An untrusted file of 100 MB can claim a hundred million.
"""

from __future__ import annotations

# Tensors of a safetensors file or a fingerprint.
MOST_TENSORS = 1_000_000
# Parts of all containers of a pickle.
MOST_ENTRIES = 5_000_000
# Objects in a pickle or in JSON, weighted by memory: 1 for some hundred bytes.
MOST_OBJECTS = 20_000_000
# The same for `.metadata` of torch.distributed.checkpoint, which has several objects per chunk: a million chunks.
MOST_INDEX_OBJECTS = 120_000_000
# Unknown classes of a pickle.
MOST_CLASSES = 10_000
