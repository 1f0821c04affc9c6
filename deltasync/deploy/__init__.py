"""What it takes to run deltasync elsewhere: the Spaces, and how they come to the Hub."""

__all__ = ["router", "serving", "space"]
