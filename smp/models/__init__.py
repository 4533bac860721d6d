"""Model families, presets and the settings that choose a model. Imports nothing distributed."""
