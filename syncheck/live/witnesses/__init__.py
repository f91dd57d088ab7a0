"""Witnesses of a watched run: what ranks post at each step, and how the posts of all ranks are judged."""
