"""Compare the gradient of a parallel program with the definition of its loss, computed by one process.

`case` has what the user writes, `reference` computes the definition, `program` runs the parallel program, `weights` is
the mechanism, and `causes` the table of findings. torch and numpy are imported only by a check.
"""
