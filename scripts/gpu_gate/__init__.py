"""Compiles the project's programs for GPUs that are not there and looks at what came out."""
