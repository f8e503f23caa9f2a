"""How workers synchronise: the words of `--sync` and what they stand for."""
