"""What scripts/bench_kernels.py measures, and how."""
