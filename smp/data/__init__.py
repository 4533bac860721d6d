"""Where training tokens come from: sources, order, packing, caches."""
