"""The name of `infer.generate` in head folders that were published earlier."""

from draftheads.infer.generate import generate_from_repository, speculative

__all__ = ["generate_from_repository", "speculative"]
