"""The seeded simulator of the protocol, and the tests that run it."""
