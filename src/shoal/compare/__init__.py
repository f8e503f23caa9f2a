"""`shoal compare`: one script under several sync words and seeds, and what can be said of the difference."""
