"""Tests on several ranks. Each rank is a process with its own pytest session."""
