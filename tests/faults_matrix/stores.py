"""The store fails while a publisher and a replica run: the tables of `tests/integration/test_store_faults.py`."""

from __future__ import annotations

import functools
from collections.abc import Callable

from tests.faults_matrix.matrix import Lab, Seen, listening, row
from tests.integration.test_store_faults import FOLLOWING, PUBLISHING, Case, follows_through, publishes_through
from tests.servers.services import Service

_RETRY = "the same call, which tries again"


def _run(action: Callable[[Service, Case], tuple[str, float]], case: Case, lab: Lab) -> Seen:
    with listening() as warned:
        said, recovered_s = action(lab.request.getfixturevalue("s3_service"), case)
    return Seen(said or next(iter(warned.messages), "(nothing: the client tried again)"), recovered_s)


for _when, _part, _cases, _action in (
    ("publishing", "A store that fails while publishing", PUBLISHING, publishes_through),
    ("following", "A store that fails while following", FOLLOWING, follows_through),
):
    for _case in _cases:
        row(
            _part,
            f"{_when}: {_case.shows}",
            noticed="the store's answer" if _case.error is None else _case.error.__name__,
            back=_RETRY if _case.error is None else "the next publish" if _cases is PUBLISHING else "the next sync",
            slow=True,
        )(functools.partial(_run, _action, _case))
