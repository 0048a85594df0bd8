"""Scripts that measure, run as `python -m benchmarks.NAME`, and what they share. Their kept results are in results/."""
