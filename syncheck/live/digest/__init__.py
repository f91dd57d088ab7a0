"""128-bit digests of tensors, computed on the device of each tensor."""

from syncheck.live.digest.host import COMMON, WIDTH, XXH3, Stream
from syncheck.live.digest.lanes import LANES
from syncheck.live.digest.tensors import KERNEL, digest_all, hash_digests

__all__ = ["COMMON", "KERNEL", "LANES", "WIDTH", "XXH3", "Stream", "digest_all", "hash_digests"]
