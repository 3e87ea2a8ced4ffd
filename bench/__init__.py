"""Benchmarks and compile-time checks: timing, workloads, compilation for real TPUs without one, plots."""
