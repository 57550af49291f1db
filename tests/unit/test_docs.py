"""The documents tell the truth about the tree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = sorted(
    str(path.relative_to(ROOT))
    for package in ("dejavu", "operators")
    for path in (ROOT / package).rglob("*.py")
    if path.name != "__init__.py"
)


def test_structures_names_every_module() -> None:
    text = (ROOT / "docs/structures.md").read_text()
    assert [path for path in MODULES if Path(path).name not in text] == []


def test_structures_names_no_module_that_is_not_there() -> None:
    text = (ROOT / "docs/structures.md").read_text()
    named = set(re.findall(r"`((?:dejavu|operators)/[\w/]+\.py)`", text))
    assert named
    assert sorted(path for path in named if not (ROOT / path).is_file()) == []


@pytest.mark.parametrize("document", ["README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))])
def test_links_between_documents_lead_somewhere(document: str) -> None:
    path = ROOT / document
    links = re.findall(r"\]\((?!https?://|#)([^)#]+)", path.read_text())
    assert [link for link in links if not (path.parent / link).exists()] == []
