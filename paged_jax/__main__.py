"""`python -m paged_jax` is `paged-jax`."""

from paged_jax.cli import main

if __name__ == "__main__":
    main()
