"""What is measured: one module per kernel, named like its Python package.

Each has KERNEL (the repo's name), DEFAULT_WORKLOAD, DTYPES, TOKENS, `workloads(kernel)` (named sizes, from the
kernel's own cases.py where it has them) and `cases(kernel, workload, dtypes, tokens, everything)`: a generator, because
one case can hold gigabytes until the next is asked for.
"""
