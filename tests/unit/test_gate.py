"""The gate between forward calls and commits."""

from __future__ import annotations

import threading

from deltasync.serve.gate import Gate
from tests.waiting import wait_until


def test_a_thread_with_the_identifier_of_one_that_has_ended_is_a_new_one() -> None:
    gate, ends = Gate(), threading.Event()

    def commit() -> None:
        with gate.alone():
            pass

    def compute() -> None:
        with gate.inside():
            pass

    ended, committing = threading.Thread(target=ends.wait), threading.Thread(target=commit)
    ended.start()
    with gate.inside():
        committing.start()
        wait_until(lambda: gate.waits_since_s is not None)
        ends.set()
        ended.join()
        for _ in range(8):  # Linux gives the first one that identifier
            new = threading.Thread(target=compute, daemon=True)
            new.start()
            new.join(5)
            assert not new.is_alive(), "the caller may wait for it, so it must not wait for the commit"
    committing.join(5)
    assert not committing.is_alive()
