"""One source of data per file, and the pipeline that serves any of them to the training loop."""
