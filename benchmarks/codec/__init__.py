"""Size and speed of our codecs and of other systems' encodings, on the same deltas."""
