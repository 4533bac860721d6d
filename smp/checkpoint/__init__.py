"""Checkpoints: layout on disk, saving, loading, export to Hugging Face."""
