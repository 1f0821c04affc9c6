"""The worker extension, whose process kills itself at the step that FAULT_AT tells."""

from __future__ import annotations

from tests.kills import steps
from tests.kills.killing import reach
from vllm_plugin import DeltaSyncWorkerExtension

_patches = steps.patched(reach)  # undone when it is forgotten
_patches.__enter__()


class KillingExtension(DeltaSyncWorkerExtension):
    """With its steps patched."""
