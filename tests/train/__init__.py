"""Training, workers as threads over one embedded store; the reference is plain torch without Shoal."""
