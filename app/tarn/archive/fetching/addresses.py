"""Network addresses that a fetch may connect to: normalizes host names, and checks the addresses they resolve to.

An address is allowed only if it is public. One table lists what is not; in IPv6, also all that is not below 2000::/3.
An IPv6 address that embeds an IPv4 one is judged by the embedded one where this is in use (mapped addresses, NAT64),
and refused where it is obsolete (6to4, Teredo, compatible).
"""

import re
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Self

import idna

from tarn.archive.fetching.dns import Resolve
from tarn.archive.fetching.sources import refused
from tarn.errors import SourceFailed, StartRefused

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

LONGEST_NAME = 253
LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
"""With a last label of this form, many programs read the host as an IPv4 address in an old notation."""

NON_PUBLIC_NETWORKS: tuple[tuple[Network, str], ...] = tuple(
    (ip_network(network), kind)
    for network, kind in (
        ("0.0.0.0/8", "unspecified"),
        ("10.0.0.0/8", "private"),
        ("100.64.0.0/10", "shared"),
        ("127.0.0.0/8", "loopback"),
        ("168.63.129.16/32", "platform"),  # Azure's platform service, at an address that looks public
        ("169.254.0.0/16", "link-local"),
        ("172.16.0.0/12", "private"),
        ("192.0.0.0/24", "reserved"),
        ("192.0.2.0/24", "documentation"),
        ("192.88.99.0/24", "reserved"),
        ("192.168.0.0/16", "private"),
        ("198.18.0.0/15", "benchmarking"),
        ("198.51.100.0/24", "documentation"),
        ("203.0.113.0/24", "documentation"),
        ("224.0.0.0/4", "multicast"),
        ("240.0.0.0/4", "reserved"),
        ("::/128", "unspecified"),
        ("::1/128", "loopback"),
        ("2001::/23", "reserved"),  # Teredo among them
        ("2001:db8::/32", "documentation"),
        ("2002::/16", "6to4"),
        ("3fff::/20", "documentation"),
        ("fc00::/7", "private"),
        ("fe80::/10", "link-local"),
        ("fec0::/10", "private"),
        ("ff00::/8", "multicast"),
    )
)
PUBLIC_IPV6 = IPv6Network("2000::/3")
NAT64 = IPv6Network("64:ff9b::/96")

OPENED = frozenset({"private", "shared", "loopback"})
"""Kinds of addresses that an operator allows by naming a host. Never link-local addresses, where clouds serve
credentials: whoever controls the name's DNS could choose them."""


def resolve_by_system(host: str, port: int) -> Sequence[str]:
    return [str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


def ascii_host(host_text: str) -> str:
    """Return the host in the normal form that is resolved, checked and passed to TLS. Raises SchemaViolation.

    Either a host name in ASCII, or an IPv4 address of four plain numbers, or an IPv6 address without a zone.
    """
    if host_text.startswith("["):
        return str(_ipv6(host_text))
    if len(host_text) > LONGEST_NAME + 1:
        raise refused("the host is no valid name")
    try:
        mapped = host_text.lower() if host_text.isascii() else idna.encode(host_text, uts46=True).decode()
    except UnicodeError:
        raise refused("the host is no valid name") from None
    host = mapped.removesuffix(".")
    labels = host.split(".")
    if len(host) > LONGEST_NAME or not all(map(LABEL.fullmatch, labels)):
        raise refused("the host is no valid name")
    if NUMBER.fullmatch(labels[-1]):
        return str(_ipv4(host))
    return host


def _ipv6(host_text: str) -> IPv6Address:
    try:
        address = IPv6Address(host_text[1:-1])
    except ValueError:
        raise refused("the host is no valid IPv6 address") from None
    if address.scope_id is not None or not host_text.endswith("]"):
        raise refused("the host is no valid IPv6 address")
    return address


def _ipv4(host: str) -> IPv4Address:
    try:
        return IPv4Address(host)
    except ValueError:
        raise refused("the host is an IPv4 address that is not written as four decimal numbers") from None


def kind_of(address: Address) -> str | None:
    """Return the kind of a non-public address, or None if it is public."""
    inner = _carried(address)
    kind_found = next((kind for network, kind in NON_PUBLIC_NETWORKS if inner in network), None)
    if kind_found is None and isinstance(inner, IPv6Address) and inner not in PUBLIC_IPV6:
        return "reserved"
    return kind_found


def _carried(address: Address) -> Address:
    """Return the IPv4 address that an IPv6 one embeds, or the address itself."""
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped:
            return address.ipv4_mapped
        if address in NAT64:
            return IPv4Address(int(address) & 0xFFFFFFFF)
    return address


@dataclass(frozen=True)
class Guard:
    """Decides which addresses a host may be connected to."""

    names: frozenset[str] = frozenset()
    """Hosts that may have private, shared or loopback addresses."""
    networks: tuple[Network, ...] = ()
    """Networks that may be connected to, of any kind."""
    resolve: Resolve = resolve_by_system

    @classmethod
    def opened_for(cls, entries: Iterable[str], resolve: Resolve) -> Self:
        """Return a guard that allows what the setting names. Raises StartRefused."""
        names: set[str] = set()
        networks: list[Network] = []
        for entry in entries:
            try:
                networks.append(ip_network(entry))
            except ValueError:
                names.add(_named(entry))
        return cls(frozenset(names), tuple(networks), resolve)

    def addresses(self, host: str, port: int) -> list[Address]:
        """Return the host's addresses, all of them checked. The name is resolved once: connect only to these.

        Raises SchemaViolation if any of them is not allowed, SourceFailed if there are none, or none in time.
        """
        resolved = self._found(host, port)
        for address in resolved:
            kind = kind_of(address)
            if kind and not self._opens(host, address, kind):
                # Do not name the address: that would disclose what internal names resolve to.
                raise refused(f"the host {host} is not at a public address")
        return resolved

    def _found(self, host: str, port: int) -> list[Address]:
        try:
            return [ip_address(host)]
        except ValueError:
            pass
        try:
            resolved = self.resolve(host, port)
            addresses: list[Address] = [*dict.fromkeys(map(ip_address, resolved))]
        except TimeoutError:
            raise SourceFailed(f"the host {host} takes too long to be resolved") from None
        except (OSError, ValueError):
            addresses = []
        if not addresses:
            raise SourceFailed(f"the host {host} cannot be resolved")
        return addresses

    def _opens(self, host: str, address: Address, kind: str) -> bool:
        if host in self.names and kind in OPENED:
            return True
        return any(each in network for network in self.networks for each in (address, _carried(address)))


def _named(entry: str) -> str:
    host = entry.lower().removesuffix(".")
    labels = host.split(".")
    if not all(map(LABEL.fullmatch, labels)) or NUMBER.fullmatch(labels[-1]):
        raise StartRefused(f"TARN_FETCH_PRIVATE_HOSTS: {entry} is no host name, address or network")
    return host
