"""E2E: a click model, trained by Shoal and by its peers."""
