from __future__ import annotations

from tests.import_graph import PICTURE, picture


def test_the_drawing_of_imports_is_what_is_imported() -> None:
    assert PICTURE.read_text() == picture(), "python -m tests.import_graph draws it again"
