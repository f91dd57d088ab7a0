"""Conversions of a model: maps between the names and layouts of libraries, and the causes of differences."""
