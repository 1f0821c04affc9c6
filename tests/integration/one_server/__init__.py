"""Tests that share one real vLLM server, which lives as long as the tests of this package run."""
