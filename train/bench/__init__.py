"""`python -m train.bench`: run methods, modifiers and launchers in turns, and print one table of their speeds.

cases.py lists the cases, runs.py runs a case and reads its metrics, table.py formats the table. measure.py measures the
parts of a DDP step, which explain its speed-up, and compares the trainer with a bare training loop.
"""
