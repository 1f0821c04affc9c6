"""What the fuzzers found worth keeping, read again by the readers as they are. Needs no fuzzer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.targets import TARGETS

CORPUS = Path(__file__).parent / "corpus"


@pytest.mark.parametrize("target", TARGETS)
def test_readers_withstand_the_corpus(target: str) -> None:
    inputs = sorted((CORPUS / target).iterdir())
    assert inputs
    for path in inputs:
        try:
            TARGETS[target](path.read_bytes())
        except BaseException as error:
            error.add_note(str(path))
            raise
