"""In-place transforms that make a model train over many ranks: one file or folder for each technique."""
