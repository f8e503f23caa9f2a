"""Checkpoints: a store in files, and back. The format is in docs/checkpoints.md."""
