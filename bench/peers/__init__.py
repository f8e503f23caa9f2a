"""What people can pick today: one file per peer, each used the best way it offers."""
