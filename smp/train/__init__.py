"""The training job: ``python -m smp.train``, which ``train_lib.py`` starts too."""
