"""Helpers of the tests: files, models, ranks and reports to test with."""
