"""Watch a run whose script knows nothing of it: each rank posts what it steps with, and one rank compares the posts."""
