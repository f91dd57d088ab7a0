"""`python -m train.evaluate`: score each rank's checkpoint on the same test data, to measure the cost of drift.

replicas.py finds and loads the files of a run, rank_scores.py scores each rank and averages BatchNorm statistics,
__main__.py parses options and prints.
"""
