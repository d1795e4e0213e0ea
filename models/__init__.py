"""Flax nnx decoders and the loading of their weights and tokenizers; knows nothing of requests."""
