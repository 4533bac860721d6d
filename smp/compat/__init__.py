"""SMP v2's names: the table of all, its ``state``, and its flags that are gone; :mod:`smp.sagemaker` uses the table."""
