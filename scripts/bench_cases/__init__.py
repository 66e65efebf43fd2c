"""Cases of scripts/bench_kernels.py. A case is a function from a Setup to the lines of a table."""
