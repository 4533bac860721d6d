"""Training data: sources, order, packing, caches."""
