"""Who may ask: one token, presented as a bearer token or, by browsers, as the password of any user."""

from __future__ import annotations

import base64
import binascii
import hmac


def presents(authorization: str | None, token: str) -> bool:
    """Whether an Authorization header presents the token; takes the same time wherever the two differ."""
    scheme, _, credentials = (authorization or "").partition(" ")
    found = credentials.strip().encode("utf-8", "replace")
    if scheme.lower() == "basic":
        try:
            found = base64.b64decode(found, validate=True).partition(b":")[2]
        except binascii.Error:
            return False
    elif scheme.lower() != "bearer":
        return False
    return hmac.compare_digest(found, token.encode())
