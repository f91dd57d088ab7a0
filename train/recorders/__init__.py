"""Recorders of a run's metrics: progress on the terminal, logs, JSON lines, TensorBoard.

base.py contains the hooks that the engine calls, and their records. metrics_logger.py measures the run and calls the
hooks.
"""
