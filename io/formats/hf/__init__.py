"""Hugging Face checkpoints: safetensors files and an index."""
