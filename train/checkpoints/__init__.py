"""Checkpoints of a run: one per rank, at the end, every N steps, and for the best epoch.

saver.py decides when to save, and builds the metadata block for syncheck. checkpoint_files.py encodes the content,
names the files and replaces them atomically. lock.py keeps two runs of the same name out of one folder.
The states for --resume are separate files: see train/resume/.
"""
