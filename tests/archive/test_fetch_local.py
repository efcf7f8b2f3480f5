"""Files on the server's disk: only below the configured folders, for every kind of link and path."""

import os
import socket
from pathlib import Path
from urllib.parse import quote

import pytest
from tarn.archive.fetching import local
from tarn.archive.fetching.fetch import Fetcher
from tarn.archive.fetching.sources import ListedFile, ListingFailure
from tarn.errors import BodyTooLarge, FileNotFound, SchemaViolation, SourceFailed, StartRefused, TarnError

from tests.archive.conftest import FetcherOf

OUT = "a link leads out of the folders"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "drop"
    root.mkdir()
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "key").write_text("secret")
    return root


@pytest.fixture
def fetcher(fetcher_of: FetcherOf, root: Path) -> Fetcher:
    return fetcher_of(fetch_roots=(root,))


def write(path: Path, data: bytes = b"data") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def fetch(fetcher: Fetcher, uri: str | Path) -> bytes:
    with fetcher.open(str(uri)) as source:
        return b"".join(source)


def refusal(fetcher: Fetcher, uri: str | Path) -> str:
    with pytest.raises(SchemaViolation) as caught:
        fetcher.open(str(uri))
    return str(caught.value.members["errors"][0].reason)


@pytest.mark.parametrize("name", ["a.txt", "für ?#%41 mich.txt", "a\nb", "日本語/файл", "-rf", "a\\b"])
def test_file_below_a_root_is_fetched_by_path_and_by_uri(fetcher: Fetcher, root: Path, name: str):
    path = write(root / name, b"12345")
    uri = f"file://{quote(str(path))}"

    for given in (str(path), uri, uri.replace("file://", "FILE://localhost")):
        with fetcher.open(given) as source:
            assert (source.uri, source.size, source.media_type) == (uri, 5, None)
            assert b"".join(source) == b"12345"
    with fetcher.open(str(path)) as source:
        assert source.name == (None if name in ("a\nb", "a\\b") else path.name)


def test_large_file_is_read_in_bounded_chunks(fetcher: Fetcher, root: Path):
    path = write(root / "large", bytes(5 << 20))

    with fetcher.open(str(path)) as source:
        assert max(map(len, source)) <= local.CHUNK


def test_every_path_is_refused_without_configured_roots(fetcher_of: FetcherOf, root: Path):
    path = write(root / "a.txt")

    assert "only from below the folders" in refusal(fetcher_of(), path)


@pytest.mark.parametrize(
    "path",
    [
        "{above}/secret.txt", "{root}/../secret.txt", "{root}/x/../../secret.txt", "{root}x/a", "/etc/passwd", "/", "",
        "file:///etc/passwd", "file://{root}/%2e%2e/secret.txt", "file://{root}/..%2fsecret.txt", "file:{root}/../x",
        "file://other.example{root}/a", "file://{root}/a?x", "file://{root}/a#x", "file:a", "file://", "file:////{root}/a",
        "{root}/a\x00b", "file://{root}/a%00b", "file://{root}/%ff", "./a", "~/a", "//{root}/a", "/proc/self/environ",
        "/dev/zero", "{root}/\udcff",
    ],
)  # fmt: skip
def test_path_outside_of_the_roots_is_refused(fetcher: Fetcher, root: Path, path: str):
    assert refusal(fetcher, path.format(root=root, above=root.parent))


@pytest.mark.parametrize("path", ["no", "no/no", "a.txt/no", "a" * 300])
def test_absent_file_is_reported_as_absent(fetcher: Fetcher, root: Path, path: str):
    write(root / "a.txt")

    with pytest.raises((FileNotFound, SourceFailed)):
        fetcher.open(f"{root}/{path}")


def test_folder_is_refused(fetcher: Fetcher, root: Path):
    assert refusal(fetcher, root) == "it is a folder"


def test_file_larger_than_the_limit_is_refused_without_reading_it(fetcher_of: FetcherOf, root: Path):
    path = write(root / "a.txt", b"12345")

    with pytest.raises(BodyTooLarge):
        fetcher_of(fetch_roots=(root,), fetch_max_bytes=4).open(str(path))


# Links


@pytest.mark.parametrize(
    "target",
    [
        "../secret.txt", "{above}/secret.txt", "../drop/../secret.txt", "inner/../../secret.txt",
        "{root}/../secret.txt",
        "/etc/passwd", "/proc/self/cwd/secret.txt", "/", "..", "inner/up/secret.txt", "twice",
    ],
)  # fmt: skip
def test_link_out_of_the_root_is_refused(fetcher: Fetcher, root: Path, target: str):
    (root / "inner").mkdir()
    (root / "inner" / "up").symlink_to("../..")
    (root / "twice").symlink_to("../secret.txt")
    (root / "link").symlink_to(target.format(root=root, above=root.parent))

    assert OUT in refusal(fetcher, root / "link")


def test_folder_that_is_a_link_out_of_the_root_is_refused(fetcher: Fetcher, root: Path):
    (root / "folder").symlink_to(root.parent / "secrets")

    assert OUT in refusal(fetcher, root / "folder" / "key")


@pytest.mark.parametrize("target", ["inner/a.txt", "./inner/../inner/a.txt", "{root}/inner/a.txt", "chain"])
def test_link_within_the_root_is_followed(fetcher: Fetcher, root: Path, target: str):
    write(root / "inner" / "a.txt", b"inside")
    (root / "chain").symlink_to("inner/b.txt")
    (root / "inner" / "b.txt").symlink_to("../inner/a.txt")
    (root / "link").symlink_to(target.format(root=root))

    assert fetch(fetcher, root / "link") == b"inside"


def test_circular_links_are_refused(fetcher: Fetcher, root: Path):
    (root / "a").symlink_to("b")
    (root / "b").symlink_to("a")

    assert "too many links" in refusal(fetcher, root / "a")


def test_root_may_be_a_link(fetcher_of: FetcherOf, root: Path):
    write(root / "inner" / "a.txt", b"inside")
    (root / "link").symlink_to(root / "inner" / "a.txt")
    (root.parent / "alias").symlink_to(root)

    assert fetch(fetcher_of(fetch_roots=(root.parent / "alias",)), root.parent / "alias" / "link") == b"inside"


@pytest.mark.parametrize("swap", ["file", "folder"])
def test_link_created_after_the_check_is_not_followed(
    fetcher: Fetcher, root: Path, swap: str, monkeypatch: pytest.MonkeyPatch
):
    """Swap the file between check and open, the moment that an attacker would have to hit."""
    path = write(root / "folder" / "key", b"mine")
    original_stat, swapped = os.stat, path if swap == "file" else path.parent
    secret = root.parent / ("secrets/key" if swap == "file" else "secrets")

    def check_and_swap(name, *, dir_fd=None, follow_symlinks=True):
        result = original_stat(name, dir_fd=dir_fd, follow_symlinks=follow_symlinks)
        if name == swapped.name and not swapped.is_symlink():
            swapped.rename(root / "renamed")
            swapped.symlink_to(secret)
        return result

    monkeypatch.setattr(os, "stat", check_and_swap)

    with pytest.raises(TarnError):
        fetcher.open(str(path))
    assert swapped.is_symlink()


# Pipes, sockets and devices


def test_pipe_is_refused_without_blocking(fetcher: Fetcher, root: Path):
    os.mkfifo(root / "pipe")

    assert refusal(fetcher, root / "pipe") == "it is no regular file"


def test_pipe_created_after_the_check_is_refused(fetcher: Fetcher, root: Path, monkeypatch: pytest.MonkeyPatch):
    path = write(root / "a.txt")
    opening = os.open

    def swap_and_open(name, *arguments, **options):
        if name == "a.txt" and path.is_file():
            path.unlink()
            os.mkfifo(path)
        return opening(name, *arguments, **options)

    monkeypatch.setattr(os, "open", swap_and_open)

    assert refusal(fetcher, path) == "it is no regular file"


def test_socket_and_device_are_refused(fetcher: Fetcher, fetcher_of: FetcherOf, root: Path, monkeypatch):
    monkeypatch.chdir(root)  # a socket's whole path would be too long
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
    assert refusal(fetcher, root / "socket") == "it is no regular file"
    # The lake of this test may be in shared memory, which is below /dev.
    elsewhere = {"lake_uri": "/none", "database_url": "sqlite:////none/tarn.db", "admin_key_file": Path("/none/key")}
    assert refusal(fetcher_of(fetch_roots=(Path("/dev"),), **elsewhere), "/dev/null") == "it is no regular file"


# Files that change


def changes(fetcher: Fetcher, path: Path, change) -> None:
    with fetcher.open(str(path)) as source:
        chunks = iter(source)
        next(chunks)
        change()
        with pytest.raises(SourceFailed):
            b"".join(chunks)


def test_file_that_grows_during_the_read_is_a_failure(fetcher: Fetcher, root: Path):
    path = write(root / "a", bytes(3 << 20))
    changes(fetcher, path, lambda: os.truncate(path, 4 << 20))


def test_file_that_shrinks_during_the_read_is_a_failure(fetcher: Fetcher, root: Path):
    path = write(root / "a", bytes(3 << 20))
    changes(fetcher, path, lambda: os.truncate(path, 1 << 20))


def test_file_overwritten_during_the_read_is_a_failure_even_with_restored_timestamps(fetcher: Fetcher, root: Path):
    path = write(root / "a", bytes(3 << 20))
    os.utime(path, ns=(1, 1))

    def overwrite() -> None:
        with path.open("r+b") as file:
            file.seek(2 << 20)
            file.write(b"other")
        os.utime(path, ns=(1, 1))

    changes(fetcher, path, overwrite)


# Listing


def listed(fetcher: Fetcher, uri: str | Path, **choice) -> tuple[list[str], dict[str, str]]:
    """Return the paths found, in order, and the failures."""
    results = [*fetcher.sources(str(uri), **choice)]
    failed = {each.path: each.error.detail for each in results if isinstance(each, ListingFailure)}
    return [each.path for each in results if isinstance(each, ListedFile)], failed


def test_listing_returns_files_in_order_with_their_uris(fetcher: Fetcher, root: Path):
    for name in ("b/2", "a", "b/1", "b-c", "für ?%.txt", "c/d/e", "a.txt"):
        write(root / name, name.encode())
    (root / "empty").mkdir()

    results = [*fetcher.sources(str(root))]

    assert [each.path for each in results] == sorted(["b/2", "a", "b/1", "b-c", "für ?%.txt", "c/d/e", "a.txt"])
    for each in results:
        assert isinstance(each, ListedFile)
        assert each.size == len(each.path.encode())
        assert fetch(fetcher, each.uri) == each.path.encode()


def test_listing_of_a_folder_within_the_root_is_relative_to_it(fetcher: Fetcher, root: Path):
    write(root / "a" / "b" / "c")

    for uri in (f"{root}/a", f"{root}/a/", f"file://{root}/a"):
        (listed_file,) = fetcher.sources(uri)
        assert listed_file == ListedFile(f"file://{root}/a/b/c", "b/c", 4)


@pytest.mark.parametrize(
    ("choice", "paths"),
    [
        ({"prefix": "a/"}, ["a/1.pdf", "a/b/2.PDF", "a/b/3.pdf"]),
        ({"prefix": "a/b"}, ["a/b/2.PDF", "a/b/3.pdf"]),
        ({"glob": ["*.pdf"]}, ["4.pdf", "a/1.pdf", "a/b/3.pdf"]),
        ({"glob": ["*.pdf", "*.PDF"], "exclude": ["a/b/*"]}, ["4.pdf", "a/1.pdf"]),
        ({"glob": ["?.*"], "prefix": "4"}, ["4.pdf"]),
        ({"exclude": ["*"]}, []),
    ],
)
def test_listing_applies_filters(fetcher: Fetcher, root: Path, choice, paths: list[str]):
    for name in ("4.pdf", "a/1.pdf", "a/b/2.PDF", "a/b/3.pdf"):
        write(root / name)

    assert listed(fetcher, root, **choice) == (paths, {})


def test_listing_counts_files_that_cannot_be_fetched_and_continues(fetcher: Fetcher, root: Path):
    write(root / "inner" / "a")
    write(root / "z")
    (root / "in").symlink_to("inner/a")
    (root / "out").symlink_to("../secret.txt")
    (root / "outer").symlink_to("../secrets")
    (root / "again").symlink_to("inner")
    (root / "dangling").symlink_to("nothing")
    (root / "loop").symlink_to("loop")
    os.mkfifo(root / "pipe")
    write(Path(os.fsdecode(os.fsencode(root) + b"/\xff")))

    paths, failed = listed(fetcher, root)

    assert paths == ["in", "inner/a", "z"]
    assert failed.keys() == {"out", "outer", "again", "dangling", "loop", "pipe", "\ufffd"}
    assert OUT in failed["out"]
    assert OUT in failed["outer"]
    assert "a link to a folder" in failed["again"]
    assert "no such file" in failed["dangling"]
    assert "too many links" in failed["loop"]
    assert "no regular file" in failed["pipe"]
    assert "not UTF-8" in failed["\ufffd"]


def test_listing_does_not_fail_for_excluded_files(fetcher: Fetcher, root: Path):
    (root / "out").symlink_to("../secret.txt")

    assert listed(fetcher, root, exclude=["out"]) == ([], {})


def test_depth_of_a_listing_is_limited(fetcher: Fetcher, root: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(local, "DEPTH", 2)
    write(root / "a" / "b" / "c" / "d")
    write(root / "a" / "b" / "e")

    paths, failed = listed(fetcher, root)

    assert paths == ["a/b/e"]
    assert [*failed] == ["a/b/c"]


@pytest.mark.parametrize("uri", ["{above}", "{above}/secrets", "{root}/out", "{root}/a.txt", "{root}/no", "/"])
def test_listing_outside_of_the_roots_fails_at_once(fetcher: Fetcher, root: Path, uri: str):
    write(root / "a.txt")
    (root / "out").symlink_to("../secrets")

    with pytest.raises((SchemaViolation, FileNotFound)):
        fetcher.sources(uri.format(root=root, above=root.parent))


def test_listing_that_is_abandoned_closes_its_files(fetcher: Fetcher, root: Path):
    write(root / "a" / "b" / "c")
    before = len(os.listdir("/proc/self/fd"))

    listing = fetcher.sources(str(root))
    next(listing)
    del listing

    assert len(os.listdir("/proc/self/fd")) == before


# Roots that are refused


@pytest.mark.parametrize(
    ("opened", "what"),
    [
        ("", "the lake"), ("lake", "the lake"), ("lake/dataset", "the lake"), ("alias", "the lake"),
        ("data", "the database"), ("keys", "the administrator's key"),
    ],
)  # fmt: skip
def test_root_through_which_the_lake_could_be_read_stops_the_start(
    fetcher_of: FetcherOf, tmp_path: Path, opened: str, what: str
):
    (tmp_path / "alias").symlink_to("lake")
    settings = {
        "lake_uri": str(tmp_path / "lake"),
        "database_url": f"sqlite:///{tmp_path}/data/tarn.db",
        "admin_key_file": tmp_path / "keys" / "admin.key",
    }

    with pytest.raises(StartRefused, match=f"TARN_FETCH_ROOTS: tenants could read {what} below"):
        fetcher_of(fetch_roots=(tmp_path / opened,), **settings)
    fetcher_of(fetch_roots=(tmp_path / "lake2",), **settings)
