"""What one GPU shows in one call of nine minutes: ``benchmarks/gpu_first.sh``, see ``benchmarks/README.md``."""
