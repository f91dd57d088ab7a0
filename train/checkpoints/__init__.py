"""What a run saves: one checkpoint per rank, at its end, at steps on the way, and of its best epoch.

saver.py says when, and what of the run goes into a file; formats.py makes the bytes; files.py names the files and
writes them whole or not at all; block.py makes the metadata that syncheck reads; attempts.py lets a save fail without
ending the run. What --resume needs is another kind of file: see train/resume/.
"""
