"""Deploy replicas: Spaces on the Hugging Face Hub, a router in front of servers, and checks before a server starts."""

__all__ = ["router", "serving", "space"]
