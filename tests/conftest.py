"""Shared test setup: offline, quiet, deterministic."""

import os

# Set before any Hugging Face import: tests never reach for a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES", ""))

import torch

torch.set_num_threads(1)
