"""Measure how far replicas of a tensor differ, and in how many elements."""
