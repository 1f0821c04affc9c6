"""Draw which room imports from which: `python -m tests.import_graph` writes `docs/images/imports.svg`.

A dependency structure matrix: a row for each importer, a column for each imported room, both in the order of
the rooms. Nothing above the diagonal means that no import points upward, and so that there is no cycle.
"""

from __future__ import annotations

from tests.unit.test_imports import PACKAGES, ROOMS, ROOT, _imports, _modules, _room

PICTURE = ROOT / "docs" / "images" / "imports.svg"
_CELL = 30
_LEFT, _TOP = 118, 104
_ROWS = (*ROOMS, *(package for package in PACKAGES if package != "deltasync"))


def _edges() -> set[tuple[str, str]]:
    """(importer, imported) for each room or plugin and each room."""
    return {
        (_room(module), _room(name))
        for package in PACKAGES
        for module, path in _modules(package)
        for name in _imports(path)
        if name.startswith("deltasync.")
    }


def picture() -> str:
    """The drawing as SVG."""
    width, height = _LEFT + _CELL * len(ROOMS) + 50, _TOP + _CELL * len(_ROWS) + 12
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="13">',
        "<title>Which room imports from which</title>",
        f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>',
        '<text x="16" y="24" fill="#555555">a row imports from the columns that are blue</text>',
    ]
    for column, room in enumerate(ROOMS):
        x = _LEFT + _CELL * column + _CELL / 2
        parts.append(
            f'<text transform="translate({x + 5:g} {_TOP - 8}) rotate(-40)" fill="#222222">{room}</text>'
        )
    edges = _edges()
    for row, importer in enumerate(_ROWS):
        y = _TOP + _CELL * row
        parts.append(
            f'<text x="{_LEFT - 10}" y="{y + 20}" text-anchor="end" fill="#222222">{importer}</text>'
        )
        for column, room in enumerate(ROOMS):
            fill = "#d0d0d0" if room == importer else "#4a90c8" if (importer, room) in edges else "#f3f3f3"
            x = _LEFT + _CELL * column
            parts.append(
                f'<rect x="{x}" y="{y}" width="{_CELL - 2}" height="{_CELL - 2}" rx="3" fill="{fill}"/>'
            )
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(picture())
