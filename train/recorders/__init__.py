"""What becomes of a run's numbers: shown, written to files, or both.

base.py has the hooks that the engine calls, and the records that it hands over; each other file is one recorder.
"""
