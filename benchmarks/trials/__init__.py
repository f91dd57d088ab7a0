"""Trials of the diagnosis: faults with known causes, injected into simulated runs, and the findings of their files."""
