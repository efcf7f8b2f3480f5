"""Where a fetch may connect to: hosts as they are written, and the addresses behind them.

An address is taken only if it is public. What is not is named in one table; in IPv6, all that is not below 2000::/3.
An IPv6 address that carries an IPv4 one is as good as the one it carries where networks still use it so (mapped
addresses, NAT64), and refused where it is only history (6to4, Teredo, compatible).
"""

import re
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Self

import idna

from tarn.archive.dns import Resolve
from tarn.archive.sources import refused
from tarn.errors import SourceFailed, StartRefused

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

LONGEST_NAME = 253
LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
"""A last label of this form makes the whole an IPv4 address to many programs, in one of its old forms."""

KINDS: tuple[tuple[Network, str], ...] = tuple(
    (ip_network(network), kind)
    for network, kind in (
        ("0.0.0.0/8", "unspecified"),
        ("10.0.0.0/8", "private"),
        ("100.64.0.0/10", "shared"),
        ("127.0.0.0/8", "loopback"),
        ("168.63.129.16/32", "platform"),  # Azure's own service, at an address that looks like any other
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
"""What an operator opens by naming a host. Never link-local addresses, where clouds hand out credentials: whoever
answers for the name would choose."""


def resolve_by_system(host: str, port: int) -> Sequence[str]:
    return [str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


def ascii_host(written: str) -> str:
    """The host in the one form that is resolved, checked, and shown to TLS. Raises SchemaViolation.

    Either a host name in ASCII, or an IPv4 address of four plain numbers, or an IPv6 address without a zone.
    """
    if written.startswith("["):
        return str(_ipv6(written))
    if len(written) > LONGEST_NAME + 1:
        raise refused("the host is no valid name")
    try:
        mapped = written.lower() if written.isascii() else idna.encode(written, uts46=True).decode()
    except UnicodeError:
        raise refused("the host is no valid name") from None
    host = mapped.removesuffix(".")
    labels = host.split(".")
    if len(host) > LONGEST_NAME or not all(map(LABEL.fullmatch, labels)):
        raise refused("the host is no valid name")
    if NUMBER.fullmatch(labels[-1]):
        return str(_ipv4(host))
    return host


def _ipv6(written: str) -> IPv6Address:
    try:
        address = IPv6Address(written[1:-1])
    except ValueError:
        raise refused("the host is no valid IPv6 address") from None
    if address.scope_id is not None or not written.endswith("]"):
        raise refused("the host is no valid IPv6 address")
    return address


def _ipv4(host: str) -> IPv4Address:
    try:
        return IPv4Address(host)
    except ValueError:
        raise refused("the host is an IPv4 address that is not written as four decimal numbers") from None


def kind_of(address: Address) -> str | None:
    """What keeps an address from being public; None if it is."""
    inner = _carried(address)
    found = next((kind for network, kind in KINDS if inner in network), None)
    if found is None and isinstance(inner, IPv6Address) and inner not in PUBLIC_IPV6:
        return "reserved"
    return found


def _carried(address: Address) -> Address:
    """The IPv4 address that an IPv6 one stands for, or the address itself."""
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
    """Hosts that may be at private, shared or loopback addresses."""
    networks: tuple[Network, ...] = ()
    """Addresses that may be connected to, whatever they are."""
    resolve: Resolve = resolve_by_system

    @classmethod
    def opened_for(cls, entries: Iterable[str], resolve: Resolve) -> Self:
        """A guard that opens what the setting names. Raises StartRefused."""
        names: set[str] = set()
        networks: list[Network] = []
        for entry in entries:
            try:
                networks.append(ip_network(entry))
            except ValueError:
                names.add(_named(entry))
        return cls(frozenset(names), tuple(networks), resolve)

    def addresses(self, host: str, port: int) -> list[Address]:
        """The host's addresses, every one of them checked. The name is resolved once: connect to these and no others.

        Raises SchemaViolation if any of them may not be connected to, SourceFailed if there are none, or none in time.
        """
        found = self._found(host, port)
        for address in found:
            kind = kind_of(address)
            if kind and not self._opens(host, address, kind):
                # Not which one it is: that would tell strangers what the names in here stand for.
                raise refused(f"the host {host} is not at a public address")
        return found

    def _found(self, host: str, port: int) -> list[Address]:
        try:
            return [ip_address(host)]
        except ValueError:
            pass
        try:
            answers = self.resolve(host, port)
            found: list[Address] = [*dict.fromkeys(map(ip_address, answers))]
        except TimeoutError:
            raise SourceFailed(f"the host {host} takes too long to be resolved") from None
        except (OSError, ValueError):
            found = []
        if not found:
            raise SourceFailed(f"the host {host} cannot be resolved")
        return found

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
