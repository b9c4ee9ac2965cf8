"""The hub's client is replaced: these tests need no network."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import errors

from octavo import hub
from octavo.base.errors import DownloadError, ModelNotFoundError, UnsupportedModelError
from octavo.hub.huggingface import HubId

COMMIT = "c" * 40


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/name", HubId("org/name")),
        ("org/name.v1@main", HubId("org/name.v1", "main")),
        ("org/name@refs/pr/1:sub/x-q4.gguf", HubId("org/name", "refs/pr/1", "sub/x-q4.gguf")),
        ("org/name:x.gguf", HubId("org/name", None, "x.gguf")),
        ("org/name:Q4_K_M", HubId("org/name", tag="Q4_K_M")),
        ("org/name@main:ud-q4_k_xl", HubId("org/name", "main", tag="ud-q4_k_xl")),
        ("org/name:a/b", None),
        ("name", None),
        ("org/name/more", None),
        ("org/name:x.bin", None),
        ("org/name:../x.gguf", None),
        ("org/name@../x", None),
        ("org/name@a/../x", None),
        ("org/name:a/../x.gguf", None),
        ("../name", None),
        ("-org/name", None),
        ("org/näme", None),
    ],
)
def test_hub_ids(text: str, expected: HubId | None) -> None:
    assert HubId.parse(text) == expected


@pytest.fixture
def repository(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, bytes]], list[list[str]]]:
    """``repository(files)`` is what the hub has; returns the log of what was asked for."""

    def make(files: dict[str, bytes], lie: bytes | None = None) -> list[list[str]]:
        asked: list[list[str]] = []

        def sibling(name: str, content: bytes) -> SimpleNamespace:
            lfs = SimpleNamespace(sha256=hashlib.sha256(content).hexdigest())
            is_lfs = name.endswith((".safetensors", ".gguf"))
            return SimpleNamespace(rfilename=name, size=len(content), lfs=lfs if is_lfs else None)

        def model_info(self: object, repo: str, **kwargs: object) -> SimpleNamespace:
            return SimpleNamespace(
                sha=COMMIT,
                siblings=[sibling(name, content) for name, content in files.items()],
                card_data=SimpleNamespace(license="mit"),
            )

        def snapshot_download(
            repo: str, *, revision: str, local_dir: Path, allow_patterns: list[str]
        ) -> None:
            assert revision == COMMIT
            asked.append(allow_patterns)
            for name in allow_patterns:
                path = Path(local_dir) / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(files[name] if lie is None else lie)

        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
        return asked

    return make


FOLDER = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "model.safetensors": b"weights",
    "consolidated.safetensors": b"weights again",
    "pytorch_model.bin": b"pickle",
    "modeling_evil.py": b"code",
    "original/model.safetensors": b"weights again",
    "README.md": b"",
    "chat_template.jinja": b"",
}


def test_folder_has_weights_and_no_code(octavo_home: Path, repository: Callable) -> None:
    asked = repository(FOLDER)
    path = hub.resolve("org/name")
    expected = ["chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json"]
    assert asked == [expected]
    assert sorted(p.name for p in path.iterdir()) == sorted([*expected, "manifest.json"])
    (entry,) = hub.installed()
    assert (entry.name, entry.license, entry.source) == ("org/name", "mit", f"hf:org/name@{COMMIT}")
    assert hub.resolve("org/name") == path
    assert len(asked) == 1
    hub.remove("org/name")
    assert not path.exists()


def test_one_gguf_file(octavo_home: Path, repository: Callable) -> None:
    asked = repository({"q4/x.gguf": b"GGUF", "y.gguf": b"GGUF"})
    path = hub.resolve("org/name:q4/x.gguf")
    assert path.read_bytes() == b"GGUF"
    assert asked == [["q4/x.gguf"]]
    with pytest.raises(ModelNotFoundError, match=r"of: q4/x.gguf, y.gguf"):
        hub.pull("org/name:z.gguf")


@pytest.mark.parametrize(
    ("tag", "fetched"),
    [
        ("Q4_K_M", ["m-Q4_K_M.gguf"]),
        ("q4_k_m", ["m-Q4_K_M.gguf"]),
        ("Q8_0", ["big/m.q8_0-00001-of-00002.gguf", "big/m.q8_0-00002-of-00002.gguf"]),
        ("UD-Q4_K_XL", ["m-UD-Q4_K_XL.gguf"]),
        ("bf16", ["m-bf16.gguf"]),
    ],
)
def test_a_quantization_names_a_file(octavo_home, repository, tag, fetched) -> None:
    names = ["sub/m-Q4_K_M.gguf", "m-Q4_K_M.gguf", "m-UD-Q4_K_XL.gguf", "m-bf16.gguf", "Q2.gguf"]
    parts = [f"big/m.q8_0-0000{i}-of-00002.gguf" for i in (1, 2)]
    asked = repository(dict.fromkeys([*names, *parts], b"GGUF"))
    path = hub.resolve(f"org/name:{tag}")
    assert asked == [fetched]
    assert path.name == fetched[0].rpartition("/")[2]
    assert [each.name for each in hub.installed()] == [f"org/name:{tag}"]


def test_a_quantization_that_there_is_not_is_said_with_those_that_there_are(
    octavo_home, repository
) -> None:
    repository({"m-Q4_K_M.gguf": b"GGUF", "m-Q8_0.gguf": b"GGUF"})
    with pytest.raises(ModelNotFoundError, match="no GGUF file of Q4_K_S; did you mean Q4_K_M"):
        hub.pull("org/name:Q4_K_S")
    repository(FOLDER)
    with pytest.raises(ModelNotFoundError, match="it has none at all"):
        hub.pull("org/other:Q4_K_S")


SPLIT = {f"q8/m-{i:05}-of-00003.gguf": b"GGUF%d" % i for i in (1, 2, 3)}


@pytest.mark.parametrize("asked_for", SPLIT)
def test_any_part_of_a_split_gguf_file_is_all_of_them(
    octavo_home: Path, repository: Callable, asked_for: str
) -> None:
    asked = repository({"m-00002-of-00003.gguf": b"another", **SPLIT})
    path = hub.resolve(f"org/name:{asked_for}")
    assert asked == [list(SPLIT)]
    assert path.name == "m-00001-of-00003.gguf"  # what a loader opens
    found = {file.name: file.read_bytes() for file in path.parent.iterdir()}
    assert found == {name.removeprefix("q8/"): content for name, content in SPLIT.items()}
    assert hub.resolve(f"org/name:{asked_for}") == path and len(asked) == 1


def test_a_split_gguf_file_that_lacks_a_part(octavo_home: Path, repository: Callable) -> None:
    first, second, third = SPLIT
    asked = repository({first: b"GGUF", third: b"GGUF"})
    with pytest.raises(ModelNotFoundError, match=rf"one of 3 parts.*does not have {second}$"):
        hub.pull(f"org/name:{first}")
    assert not asked


def test_one_part_that_an_older_octavo_fetched_is_not_a_model(
    octavo_home: Path, repository: Callable
) -> None:
    first, *_ = SPLIT
    asked = repository(SPLIT)
    path = hub.pull(f"org/name:{first}")
    manifest = path.parent.parent / "manifest.json"
    entry = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(entry | {"files": entry["files"][:1]}))
    assert hub.installed() == []
    hub.pull(f"org/name:{first}")
    assert len(asked) == 2 and len(hub.installed()) == 1


def test_repository_of_gguf_files_lists_them(octavo_home: Path, repository: Callable) -> None:
    repository({"x.gguf": b"", "config.json": b"{}"})
    with pytest.raises(UnsupportedModelError, match=r"org/name:FILE, of: x\.gguf"):
        hub.pull("org/name")


def test_pickles_are_refused(octavo_home: Path, repository: Callable) -> None:
    repository({"pytorch_model.bin": b"", "config.json": b"{}"})
    with pytest.raises(UnsupportedModelError, match="Pickled"):
        hub.pull("org/name")


@pytest.mark.parametrize(("lie", "words"), [(b"longer than that", "bytes"), (b"weighty", "sha256")])
def test_what_came_is_checked(
    octavo_home: Path, repository: Callable, lie: bytes, words: str
) -> None:
    repository({"model.safetensors": b"weights"}, lie)
    with pytest.raises(DownloadError, match=words):
        hub.pull("org/name")
    assert hub.installed() == []


def _bare(error: type[Exception]) -> Exception:
    """The error without the HTTP response, whose type depends on the client's version."""
    return error.__new__(error)


@pytest.mark.parametrize(
    ("make", "expected", "words"),
    [
        (lambda: _bare(errors.GatedRepoError), DownloadError, "hf auth login"),
        (lambda: _bare(errors.RepositoryNotFoundError), ModelNotFoundError, "no model"),
        (lambda: _bare(errors.RevisionNotFoundError), ModelNotFoundError, "no revision"),
        (lambda: OSError("Network is unreachable"), DownloadError, "Network is unreachable"),
        (lambda: errors.OfflineModeIsEnabled("offline"), DownloadError, "offline"),
    ],
)
def test_errors_of_the_hub_become_ours(
    octavo_home: Path,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable,
    expected: type[Exception],
    words: str,
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise make()

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", fail)
    with pytest.raises(expected, match=words):
        hub.pull("org/name@v1")
