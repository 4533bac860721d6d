"""Optimizers: each an entry in its file, and the one that updates a model by them."""
