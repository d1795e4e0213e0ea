"""Stateless operations on a paged KV cache, on plain JAX arrays."""
