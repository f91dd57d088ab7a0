"""Group checkpoint files into replicas, by metadata and by the numbers in their paths."""
