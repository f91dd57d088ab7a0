"""Logical tensors: the tensors of a whole model, whatever files and ranks store their parts.

A logical tensor has a global shape, and shards that cover it. A shard is a box of the tensor with its location in a
file. `model.join` makes the logical tensors of a checkpoint from the files of its ranks; each kind of source has a
module of its own.
"""
