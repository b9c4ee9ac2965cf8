"""What an SVG says."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree


def texts_of(path: Path) -> list[str]:
    return [element.text for element in ElementTree.parse(path).iter() if element.text]
