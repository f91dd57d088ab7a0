"""Untrusted files and folders to snapshots. The content of a file selects its reader, never the file extension.

A checkpoint is a file (table `READERS` in formats.py) or a folder of related files (table `FOLDERS` in folders/).
Nothing in a file is executed.
"""
