"""Tests on several ranks: each rank is a process that runs the test in its own pytest session."""
