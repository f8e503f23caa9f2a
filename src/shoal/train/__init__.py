"""Training: what a worker does between `shoal.join()` and the end of its script."""
