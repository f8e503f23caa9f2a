"""The workloads of BENCHMARKS.md: one file per family."""
