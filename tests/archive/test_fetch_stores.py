"""Files in object stores: only the configured ones, and never the lake's own."""

import pickle

import pytest
from tarn.archive.fetching.fetch import Fetcher
from tarn.archive.fetching.sources import ListedFile
from tarn.errors import BodyTooLarge, FileNotFound, SchemaViolation, StartRefused, Unavailable

from tests.archive.conftest import FetcherOf
from tests.s3 import BUCKET, SECRET_KEY, S3Server, moto_server

DROP = f"s3://{BUCKET}/drop"


@pytest.fixture(scope="module")
def drop(s3: S3Server) -> dict[str, bytes]:
    """Write objects below the configured folder, and next to it others that must not be reachable."""
    files = {name: name.encode() for name in ("a.txt", "b/c.pdf", "b/d e+%41.pdf", "b/ü.txt", "b-/x")}
    client = s3.client()
    for name, data in files.items():
        client.put_object(Bucket=BUCKET, Key=f"drop/{name}", Body=data)
    for name in ("secret.txt", "dropped/secret.txt"):
        client.put_object(Bucket=BUCKET, Key=name, Body=b"secret")
    return files


@pytest.fixture
def fetcher(fetcher_of: FetcherOf, s3: S3Server, drop: dict[str, bytes]) -> Fetcher:
    return fetcher_of(fetch_stores={DROP: s3.options})


def fetch(fetcher: Fetcher, uri: str) -> bytes:
    with fetcher.open(uri) as source:
        return b"".join(source)


def test_object_is_fetched_with_its_metadata(fetcher: Fetcher):
    with fetcher.open(f"{DROP}/b/c.pdf") as source:
        assert (source.uri, source.name, source.size, source.media_type) == (f"{DROP}/b/c.pdf", "c.pdf", 7, None)
        assert b"".join(source) == b"b/c.pdf"


def test_listing_returns_objects_in_order_with_their_uris(fetcher: Fetcher, drop: dict[str, bytes]):
    results = [*fetcher.sources(DROP)]

    assert [each.path for each in results] == sorted(drop)
    for each in results:
        assert isinstance(each, ListedFile)
        assert each.size == len(drop[each.path])
        assert fetch(fetcher, each.uri) == drop[each.path]


def test_listing_of_a_folder_applies_filters(fetcher: Fetcher):
    assert [each.path for each in fetcher.sources(f"{DROP}/b/", glob=["*.pdf"], exclude=["d*"])] == ["c.pdf"]
    assert [each.path for each in fetcher.sources(DROP, prefix="b/c")] == ["b/c.pdf"]


@pytest.mark.parametrize(
    "uri",
    [
        f"s3://{BUCKET}/secret.txt", f"s3://{BUCKET}/dropped/secret.txt", f"{DROP}ped/secret.txt",
        f"{DROP}/../secret.txt",
        f"{DROP}/b/../../secret.txt", f"{DROP}//a.txt", f"{DROP}/./a.txt", f"s3://{BUCKET}", "s3://other/drop/a.txt",
        f"gs://{BUCKET}/drop/a.txt", f"az://{BUCKET}/drop/a.txt", f"S3://{BUCKET}/drop/a.txt", "s3:///", "s3:a",
        f"s3://me:pw@{BUCKET}/drop/a.txt",
    ],
)  # fmt: skip
def test_object_outside_of_the_configured_folder_is_refused_without_a_request(fetcher: Fetcher, s3: S3Server, uri: str):
    with s3.counted() as requests:
        for ask in (fetcher.open, fetcher.sources):
            with pytest.raises(SchemaViolation):
                ask(uri)
    assert requests == []


def test_absent_object_is_reported_as_absent(fetcher: Fetcher):
    with pytest.raises(FileNotFound):
        fetcher.open(f"{DROP}/nothing")


@pytest.mark.parametrize("uri", [DROP, f"{DROP}/"])
def test_root_of_a_store_is_refused_as_a_file(fetcher: Fetcher, uri: str):
    with pytest.raises(SchemaViolation):
        fetcher.open(uri)


def test_object_larger_than_the_limit_is_refused_without_reading_it(
    fetcher_of: FetcherOf, s3: S3Server, drop: dict[str, bytes]
):
    with pytest.raises(BodyTooLarge):
        fetcher_of(fetch_stores={DROP: s3.options}, fetch_max_bytes=4).open(f"{DROP}/a.txt")


def test_pickled_fetcher_has_the_same_stores(fetcher: Fetcher):
    fetch(fetcher, f"{DROP}/a.txt")

    assert fetch(pickle.loads(pickle.dumps(fetcher)), f"{DROP}/a.txt") == b"a.txt"


def test_options_are_not_in_the_representation(fetcher: Fetcher):
    assert SECRET_KEY not in repr(fetcher)


def test_unreachable_store_is_unavailable(fetcher_of: FetcherOf, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tarn.storage.connection.RETRIES", 0)
    with moto_server() as server:
        fetcher = fetcher_of(fetch_stores={DROP: server.options})
    with pytest.raises(Unavailable):
        fetcher.open(f"{DROP}/a.txt")


# Stores that are refused


@pytest.mark.parametrize("lake", [BUCKET, f"{BUCKET}/drop", f"{BUCKET}/drop/lake"])
def test_store_through_which_the_lake_could_be_read_stops_the_start(fetcher_of: FetcherOf, s3: S3Server, lake: str):
    with pytest.raises(StartRefused, match="tenants could read the lake itself"):
        fetcher_of(lake_uri=f"s3://{lake}", storage_options=s3.options, fetch_stores={DROP: s3.options})
    fetcher_of(lake_uri=f"s3://{BUCKET}/drop2", storage_options=s3.options, fetch_stores={DROP: s3.options})


def test_wrong_option_stops_the_start_and_names_the_setting(fetcher_of: FetcherOf):
    with pytest.raises(StartRefused, match=r"TARN_FETCH_STORES: s3://lake/drop: nonsense is not an option"):
        fetcher_of(fetch_stores={DROP: {"nonsense": "x"}})


@pytest.mark.parametrize("uri", ["s3://", "s3:///x", "http://bucket", "s3://me@bucket", "s3://bucket?x", "bucket"])
def test_invalid_store_uri_stops_the_start(fetcher_of: FetcherOf, uri: str):
    with pytest.raises(StartRefused, match="TARN_FETCH_STORES: each store must look like"):
        fetcher_of(fetch_stores={uri: {}})
