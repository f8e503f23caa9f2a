"""Training: an ordinary PyTorch script on many workers. `join` and `Worker.prepare` are the way in."""
