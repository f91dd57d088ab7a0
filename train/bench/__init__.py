"""Methods, modifiers and launchers side by side: `python -m train.bench` runs each for real and prints one table.

cases.py lists what can be run, runs.py runs it and reads what the run has recorded, table.py prints. parts.py takes a
step of ddp apart, which says why the speed-up is what it is; overhead.py holds the trainer against a loop written by
hand (bare.py).
"""
