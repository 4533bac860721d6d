"""Starting a job's processes."""
