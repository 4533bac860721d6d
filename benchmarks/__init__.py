"""Benchmarks; ``README.md`` describes them."""
