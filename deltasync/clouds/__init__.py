"""Stores that are services: buckets of S3, GCS and Azure, and those of the Hugging Face Hub. A wing of the
stores.
"""

__all__ = ["cloud", "environment", "hub"]
