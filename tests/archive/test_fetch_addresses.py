"""Hosts that may be connected to: every form in which a forbidden address can be written, named or embedded."""

from ipaddress import IPv4Address, IPv6Address, ip_address

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tarn.archive.fetching.addresses import NAT64, Guard, ascii_host, kind_of, resolve_by_system
from tarn.archive.fetching.fetch import Fetcher
from tarn.archive.fetching.urls import Url
from tarn.errors import SchemaViolation, SourceFailed, StartRefused

from tests.archive.conftest import FetcherOf
from tests.archive.web import Canary

NO_DEADLINE = settings(deadline=None)

NOT_PUBLIC = {
    "0.0.0.0": "unspecified", "0.0.0.1": "unspecified", "0.255.255.255": "unspecified", "10.0.0.0": "private",
    "10.255.255.255": "private", "100.64.0.1": "shared", "100.100.100.200": "shared", "100.127.255.255": "shared",
    "127.0.0.1": "loopback", "127.0.0.53": "loopback", "127.255.255.254": "loopback", "168.63.129.16": "platform",
    "169.254.0.1": "link-local", "169.254.169.254": "link-local", "169.254.170.2": "link-local",
    "172.16.0.1": "private", "172.31.255.255": "private", "192.0.0.1": "reserved", "192.0.0.192": "reserved",
    "192.0.2.1": "documentation", "192.88.99.1": "reserved", "192.168.0.1": "private",
    "192.168.255.255": "private", "198.18.0.1": "benchmarking", "198.19.255.255": "benchmarking",
    "198.51.100.7": "documentation", "203.0.113.7": "documentation", "224.0.0.1": "multicast",
    "239.255.255.250": "multicast", "240.0.0.1": "reserved", "255.255.255.255": "reserved",
    "::": "unspecified", "::1": "loopback", "::2": "reserved", "::127.0.0.1": "reserved", "::8.8.8.8": "reserved",
    "::ffff:127.0.0.1": "loopback", "::ffff:10.0.0.1": "private", "::ffff:169.254.169.254": "link-local",
    "::ffff:0:127.0.0.1": "reserved", "64:ff9b::127.0.0.1": "loopback", "64:ff9b::10.0.0.1": "private",
    "64:ff9b::a9fe:a9fe": "link-local", "64:ff9b:1::10.0.0.1": "reserved", "100::1": "reserved",
    "2001::1": "reserved", "2001:0:4136:e378:8000:63bf:3fff:fdd2": "reserved", "2001:2::1": "reserved",
    "2001:10::1": "reserved", "2001:20::1": "reserved", "2001:db8::1": "documentation", "2002:7f00:1::": "6to4",
    "2002:a00:1::1": "6to4", "2002:808:808::1": "6to4", "3fff::1": "documentation", "5f00::1": "reserved",
    "fc00::1": "private", "fd00:ec2::254": "private", "fe80::1": "link-local", "fe80::1%eth0": "link-local",
    "febf::1": "link-local", "fec0::1": "private", "ff02::1": "multicast", "ff05::2": "multicast",
}  # fmt: skip

PUBLIC = [
    "1.1.1.1", "8.8.8.8", "9.255.255.255", "11.0.0.0", "100.63.255.255", "100.128.0.0", "126.255.255.255", "128.0.0.1",
    "169.253.255.255", "172.15.255.255", "172.32.0.0", "192.0.1.1", "192.167.255.255", "198.17.255.255",
    "223.255.255.255",
    "2606:4700:4700::1111", "2a00:1450:4001::200e", "2001:200::1", "::ffff:8.8.8.8", "64:ff9b::8.8.8.8",
]  # fmt: skip

LOOPBACK_FORMS = [
    "127.0.0.1", "127.0.0.1.", "127.1", "127.0.1", "127.00.0.1", "0127.0.0.1", "0177.0.0.1", "0177.0.0.01",
    "0x7f.0.0.1", "0x7f.1", "0x7F000001", "0x7f000001.", "2130706433", "017700000001", "0", "0.0.0.0", "0x0", "00",
    "1", "127.0.0.1.0", "256.0.0.1", "4294967297", "127.0.0.0x1", "localhost", "LOCALHOST", "localhost.",
    "\uff11\uff12\uff17.\uff10.\uff10.\uff11", "\u2460\u2461\u2466.\u24ea.\u24ea.\u2460", "127\u30020\u30020\u30021",
    "127\uff0e0\uff0e0\uff0e1", "\u24db\u24de\u24d2\u24d0\u24db\u24d7\u24de\u24e2\u24e3", "local\u00adhost",
    "%31%32%37.0.0.1", "127.0.0.1%00.example.com", "localhost%2eexample", "[::1]", "[::]", "[0:0:0:0:0:0:0:1]",
    "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[0:0:0:0:0:ffff:127.0.0.1]", "[64:ff9b::7f00:1]", "[::127.0.0.1]",
    "[::1%25lo]", "[::1%lo]", "[fe80::1%25eth0]", "[v1.1]", "[127.0.0.1]", "[]", "[::1", "::1", "[::1]x", "x[::1]",
    "[[::1]]", "..", ".", "a..b", ".localhost", "localhost..", "-a", "a b", "a" * 64, ".".join(["a" * 60] * 5),
]  # fmt: skip
"""Hosts that some program or other takes for the loopback, or that are no hosts at all."""


@pytest.mark.parametrize(("address", "kind"), NOT_PUBLIC.items())
def test_address_that_is_not_public_is_classified(address: str, kind: str):
    assert kind_of(ip_address(address)) == kind


@pytest.mark.parametrize("address", PUBLIC)
def test_public_address_is_accepted(address: str):
    assert Guard(resolve=lambda *_: [address]).addresses("a.example", 80) == [ip_address(address)]


@pytest.mark.parametrize("address", NOT_PUBLIC)
def test_name_with_a_forbidden_address_is_refused_even_if_others_are_public(address: str):
    guard = Guard(resolve=lambda *_: ["8.8.8.8", address, "1.1.1.1"])

    with pytest.raises(SchemaViolation, match=r"a\.example is not at a public address") as refusal:
        guard.addresses("a.example", 443)
    assert address not in refusal.value.detail, "the error must not reveal addresses of the internal network"


@pytest.mark.parametrize("address", [address for address in NOT_PUBLIC if "%" not in address])
def test_forbidden_address_in_the_url_is_refused_without_resolving_it(address: str):
    def resolve(host: str, port: int) -> list[str]:
        raise AssertionError(host)

    url = Url.parse(f"http://[{address}]/" if ":" in address else f"http://{address}/")
    with pytest.raises(SchemaViolation, match="not at a public address"):
        Guard(resolve=resolve).addresses(url.host, url.port)


@pytest.mark.parametrize("host", LOOPBACK_FORMS)
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_no_notation_of_the_loopback_address_reaches_it(fetcher_of: FetcherOf, canary: Canary, scheme: str, host: str):
    fetcher = fetcher_of(resolve=resolve_by_system, fetch_private_hosts=())

    with pytest.raises(SchemaViolation) as refusal:
        fetcher.open(f"{scheme}://{host}:{canary.port}/secret")
    assert refusal.value.members["errors"][0].field == "uri"
    assert not canary.touched()


def test_canary_detects_a_connection(canary: Canary, fetcher_of: FetcherOf):
    fetcher = fetcher_of(fetch_private_hosts=("127.0.0.1",), fetch_timeout=0.01)

    with pytest.raises(SourceFailed):
        fetcher.open(f"http://127.0.0.1:{canary.port}/")
    assert canary.touched()
    canary.listeners[0].accept()[0].close()


@NO_DEADLINE
@given(st.ip_addresses())
def test_every_address_that_the_standard_library_classifies_as_not_global_is_refused(
    address: IPv4Address | IPv6Address,
):
    carried = isinstance(address, IPv6Address) and (address.ipv4_mapped is not None or address in NAT64)
    assert address.is_global or carried or kind_of(address) is not None


@NO_DEADLINE
@given(st.ip_addresses(v=4))
def test_ipv4_address_embedded_in_ipv6_is_classified_as_the_ipv4_address(address: IPv4Address):
    for carrying in (f"::ffff:{address}", f"64:ff9b::{address}"):
        assert kind_of(IPv6Address(carrying)) == kind_of(address)


@NO_DEADLINE
@given(st.ip_addresses(v=4), st.data())
def test_ipv4_address_is_accepted_only_as_four_decimal_numbers(address: IPv4Address, data: st.DataObject):
    number, octets = int(address), address.packed
    parts = data.draw(st.integers(1, 4))
    values = [*octets[: parts - 1], number & ((1 << (8 * (5 - parts))) - 1)]
    form = ".".join(data.draw(st.sampled_from(["{}", "{:#x}", "0{:o}", "00{}"])).format(value) for value in values)

    if form == str(address):
        assert ascii_host(form) == form
    else:
        with pytest.raises(SchemaViolation, match="not written as four decimal numbers"):
            ascii_host(form)


@NO_DEADLINE
@given(st.ip_addresses(v=6))
def test_ipv6_address_is_normalised_to_one_form(address: IPv6Address):
    assert ascii_host(f"[{address.exploded.upper()}]") == ascii_host(f"[{address}]") == str(address)


@NO_DEADLINE
@given(st.text(max_size=40))
def test_host_is_refused_or_normalised_to_stable_ascii(written: str):
    try:
        host = ascii_host(written)
    except SchemaViolation:
        return
    assert host.isascii()
    assert ascii_host(f"[{host}]" if ":" in host else host) == host


@pytest.mark.parametrize(
    ("written", "host"),
    [
        ("Example.COM", "example.com"),
        ("example.com.", "example.com"),
        ("b\u00fccher.example", "xn--bcher-kva.example"),
        ("xn--bcher-kva.example", "xn--bcher-kva.example"),
        ("fa\u00df.de", "xn--fa-hia.de"),
        ("my_bucket.example", "my_bucket.example"),
        ("1.2.3.4.example", "1.2.3.4.example"),
        ("0x7f.example", "0x7f.example"),
        ("8.8.8.8.", "8.8.8.8"),
        ("[2606:4700::0:1]", "2606:4700::1"),
    ],
)
def test_host_is_normalised(written: str, host: str):
    assert ascii_host(written) == host


def test_name_without_an_address_is_a_source_failure(fetcher: Fetcher):
    with pytest.raises(SourceFailed, match=r"nowhere\.test cannot be resolved"):
        fetcher.open("http://nowhere.test/")


@pytest.mark.parametrize("answers", [[], ["nonsense"], ["8.8.8.8", ""]])
def test_invalid_response_of_the_resolver_is_refused(answers: list[str]):
    with pytest.raises(SourceFailed, match="cannot be resolved"):
        Guard(resolve=lambda *_: answers).addresses("a.example", 80)


# Hosts allowed by settings


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "10.1.2.3", "192.168.1.1", "100.64.0.1", "fd00::1", "::ffff:10.0.0.1"]
)
def test_allowed_host_may_be_in_the_internal_network(address: str):
    guard = Guard.opened_for(["Intranet.example."], lambda *_: [address])

    assert guard.addresses("intranet.example", 80) == [ip_address(address)]
    with pytest.raises(SchemaViolation):
        guard.addresses("other.example", 80)


@pytest.mark.parametrize("address", ["169.254.169.254", "fe80::1", "224.0.0.1", "0.0.0.0", "168.63.129.16"])
def test_allowed_host_is_never_a_cloud_metadata_address(address: str):
    guard = Guard.opened_for(["intranet.example"], lambda *_: ["10.0.0.1", address])

    with pytest.raises(SchemaViolation):
        guard.addresses("intranet.example", 80)


def test_allowed_network_is_reachable_under_any_name_and_no_other_is():
    guard = Guard.opened_for(["10.1.0.0/16", "fd00:1::/32", "192.168.0.7"], resolve_by_system)

    for host in ("10.1.255.255", "192.168.0.7", "fd00:1::5", "::ffff:10.1.0.1"):
        assert guard.addresses(host, 80)
    for host in ("10.2.0.0", "192.168.0.8", "fd00:2::5", "::ffff:10.2.0.1", "127.0.0.1"):
        with pytest.raises(SchemaViolation):
            guard.addresses(host, 80)


@pytest.mark.parametrize("entry", ["http://host", "10.0.0.0/33", "10.0.0.1/8", "a b", "host:80", "0x7f.1", "*.example"])
def test_entry_that_is_neither_host_nor_network_stops_the_start(fetcher_of: FetcherOf, entry: str):
    with pytest.raises(StartRefused, match=r"TARN_FETCH_PRIVATE_HOSTS: .* is no host name, address or network"):
        fetcher_of(fetch_private_hosts=(entry,))
