"""What one GPU shows: ``benchmarks/gpu_first.sh``, see ``benchmarks/README.md``."""
