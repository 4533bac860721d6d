"""A small public-domain text with its tokenizer, so that the main job runs offline."""
