"""A process that publishes is suspended (SIGSTOP) while another opens the channel, and goes on afterwards."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection

import huggingface_hub.constants
import torch

from deltasync import Publisher, Replica
from deltasync.channel.documents import VersionId
from deltasync.channel.reading import ChannelReader
from deltasync.errors import FencedError, NotPublishedError
from tests.faults_matrix.matrix import PATIENCE_S, REPEATS, Lab, Seen, assert_holds, publish, row, weights
from tests.faults_matrix.places import chosen, open_at, short_leases, url_of
from tests.processes import PROCESSES, end_with_parent


def _train(url: str, environ: Mapping[str, str], told: Connection) -> None:
    """Publish until another publisher does; tells each version, then the error."""
    end_with_parent()
    torch.set_num_threads(1)
    os.environ.update(environ)
    huggingface_hub.constants.ENDPOINT = environ.get("HF_ENDPOINT", "")
    huggingface_hub.constants.HF_HUB_OFFLINE = False
    with short_leases():
        publisher = Publisher(open_at(url))
        for seed in itertools.count(1):
            time.sleep(0.05)
            try:
                told.send(publisher.publish(weights(seed).items(), step=seed).wait(PATIENCE_S).version)
            except FencedError as error:
                told.send(f"FencedError: {error}")
                return


def _suspended(kind: str, lab: Lab) -> Seen:
    """The old writer is suspended at a moment of chance, and goes on when the new one has published."""
    url = url_of(lab, kind)
    environ = {name: value for name, value in os.environ.items() if name.startswith(("AWS_", "HF_"))}
    if kind == "hub":
        environ = dict(lab.request.getfixturevalue("hub").env)
    receiver, sender = PROCESSES.Pipe(duplex=False)
    old = PROCESSES.Process(target=_train, args=(url, environ, sender))
    old.start()
    sender.close()
    served: dict[VersionId, int] = {}
    replica = Replica(open_at(url))

    def follow() -> None:
        with contextlib.suppress(NotPublishedError):
            replica.sync()
            assert replica.identity is not None
            served[replica.identity] = int(replica.state_dict()["step"])
            assert_holds(replica, served[replica.identity])

    try:
        while receiver.recv() < 3:
            follow()
        time.sleep(random.Random(lab.folder.name).uniform(0, 0.05))
        assert old.pid is not None
        os.kill(old.pid, signal.SIGSTOP)
        follow()
        with Publisher(open_at(url), resume=True) as new:
            for seed in (2001, 2002):
                publish(new, seed)
                follow()
            os.kill(old.pid, signal.SIGCONT)
            resumed_s = time.perf_counter()
            said = receiver.recv()
            while not isinstance(said, str):
                said = receiver.recv()
            took_s = time.perf_counter() - resumed_s
            publish(new, 2003)
        follow()
        assert_holds(replica, 2003)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(old.pid or 0, signal.SIGCONT)
        old.join(PATIENCE_S)
    reader = ChannelReader(open_at(url))
    history = list(reader.versions())
    assert history[0] == replica.identity
    assert [version.version for version in history] == list(range(len(history), 0, -1))
    for version in history[:5]:
        step, again = reader.record(version).record.step, Replica(open_at(url))
        assert step is not None
        again.sync(version.version)
        assert_holds(again, step)
        assert served.get(version, step) == step
    return Seen(said, took_s)


@row(
    "One writer after another",
    "a writer is suspended (SIGSTOP) while another opens the channel",
    noticed="the seal, or the epoch",
    back="stopping",
)
def _suspended_everywhere(lab: Lab) -> Seen:
    seen = []
    url_of(lab, "hub")  # its fixtures patch too, and so come first
    with short_leases():
        for kind in chosen(lab):
            for number in range(REPEATS if kind == "file" else 1):
                folder = lab.folder / f"{kind} {number}"
                folder.mkdir()
                seen.append(_suspended(kind, Lab(folder, lab.request)))
    return Seen(seen[0].said, max(each.recovered_s for each in seen), len(seen))
