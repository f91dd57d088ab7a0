"""Witnesses of a watched run: each sees one kind of fault before it damages the model."""
