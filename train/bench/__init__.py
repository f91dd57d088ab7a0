"""`python -m train.bench`: run methods, modifiers and launchers in turns, and print one table of their speeds.

cases.py lists the cases, runs.py runs a case and reads its metrics, table.py formats the table. `benchmarks/trainer.py`
measures the parts of a DDP step, and compares the trainer with a bare training loop.
"""
