"""The store as clients see it: tables and tensors, and the catalogue of them."""
