"""Processes: the coordinator, servers, and clusters of them on this machine."""
