"""The page's modules that need no browser, under Node: see the ``*.test.js`` beside this."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from octavo.page.site import STATIC

NODE = shutil.which("node")
HERE = Path(__file__).parent


@pytest.mark.skipif(NODE is None, reason="needs Node.js 20 or later (apt-get install nodejs)")
@pytest.mark.parametrize("script", sorted(file.name for file in HERE.glob("*.test.js")))
def test_module(script, tmp_path):
    shutil.copytree(STATIC, tmp_path / "static")
    shutil.copy(HERE / script, tmp_path)
    (tmp_path / "package.json").write_text('{"type": "module"}')  # what Node takes .js files for
    done = subprocess.run(
        [str(NODE), "--test", script], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "# fail 0" in done.stdout or "ℹ fail 0" in done.stdout
