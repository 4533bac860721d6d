"""Collectives of our own, where a backend's are slow."""
