"""The bundled sample, and the old name of ``python -m smp.data.prepare``."""
