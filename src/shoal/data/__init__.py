"""Data of a job: who trains which part of which batch, in which order, and what is left after a restart."""
