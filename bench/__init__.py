"""Benchmarks of Shoal and of what people can pick today. Run `python -m bench` from the repository's root."""
