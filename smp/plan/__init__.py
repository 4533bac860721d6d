"""`smp plan`: what a job would hold, how long its step takes, and which layout is best, before anything is rented."""
