"""`python -m train.evaluate`: each rank's checkpoint on the same test data, to see what drifted statistics cost.

replicas.py finds the files of a run and loads them, rank_scores.py scores each rank and averages BatchNorm statistics,
__main__.py has the options and prints.
"""
