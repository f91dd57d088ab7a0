"""Collect evidence about the causes of differences: damaged files, flipped bits, directions, earlier steps."""
