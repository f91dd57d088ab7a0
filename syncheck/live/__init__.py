"""Models in memory: seen as checkpoints are, and compared across ranks."""
