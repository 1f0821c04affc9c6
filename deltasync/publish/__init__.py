"""PUBLISH: how versions get into a channel, and how one writer follows another."""
