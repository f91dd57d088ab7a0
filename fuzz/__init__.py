"""Mutate checkpoints and check the readers: `python -m fuzz` and `python -m fuzz.damages`. See README.md."""
