"""Read tensors block by block and group replicas with equal bytes."""
