"""Tensor and sequence parallelism for Hugging Face models: split layers, exchanges, forward."""
