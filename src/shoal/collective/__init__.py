"""Sums and averages among the workers themselves, without a server."""
