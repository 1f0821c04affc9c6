"""How long Hypothesis may search; a plugin of pytest that needs nothing else of this folder."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# No deadline: machines are busy.
settings.register_profile(
    "deltasync", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("many", settings.get_profile("deltasync"), max_examples=1000)
settings.register_profile("long", settings.get_profile("deltasync"), max_examples=10_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "deltasync"))
