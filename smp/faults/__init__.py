"""Fault handling of a run: signals, crashed and hung ranks, numbers that are not finite."""
