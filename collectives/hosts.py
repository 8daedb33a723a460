"""Hosts: the addresses by which they reach each other, and the processors that they allow."""

from __future__ import annotations

import fcntl
import ipaddress
import math
import os
import socket
import struct
from pathlib import Path

from collectives.errors import RendezvousError

SIOCGIFADDR = 0x8915  # linux/sockios.h: the IPv4 address of an interface


def is_loopback(host: str) -> bool:
    """Whether ``host`` (a name or an address) can only be reached from this machine. Does not look names up."""
    if host == "localhost" or host.startswith("localhost."):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def resolve_host(host: str) -> str:
    """The address of ``host``. Raises ``RendezvousError`` where the name is not known here."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise RendezvousError(
            f"the host name {host!r} of rank 0 cannot be resolved on {socket.gethostname()} ({error}); "
            "set MASTER_ADDR to an address that every host can reach"
        ) from error
    addresses = [str(entry[4][0]) for entry in found]
    return next((address for address in addresses if not is_loopback(address)), addresses[0])


def routed_address(peer: str, port: int = 9) -> str:
    """This host's own address on the way to ``peer``: what the routing table says, nothing is sent."""
    family = socket.AF_INET6 if ":" in peer else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((peer, port))
        except OSError as error:
            raise RendezvousError(f"no route from {socket.gethostname()} to {peer} ({error})") from error
        return str(probe.getsockname()[0])


def own_address() -> str:
    """An address of this host that other hosts may reach: that of its name, else the one on the default route."""
    address = resolve_host(socket.gethostname())
    if not is_loopback(address):
        return address
    return routed_address("192.0.2.1")  # RFC 5737: an address of nobody, so this asks for the default route


def interface_address(name: str) -> str:
    """The IPv4 address of the interface called ``name``."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", name[:15].encode())
        try:
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)[20:24])
        except OSError as error:
            names = ", ".join(known for _, known in socket.if_nameindex())
            raise RendezvousError(f"no interface {name!r} with an IPv4 address here; there are {names}") from error


def interface_name(address: str) -> str:
    """The interface that has ``address``, or "?" where none with an IPv4 address does."""
    for _, name in socket.if_nameindex():
        try:
            if interface_address(name) == address:
                return name
        except RendezvousError:  # an interface without an IPv4 address is no candidate
            continue
    return "lo" if is_loopback(address) else "?"


def cgroup_cores(root: Path = Path("/sys/fs/cgroup")) -> float:
    """Processors that the control group's quota allows (cpu.max of cgroup v2), or infinity."""
    try:
        quota, period = (root / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return math.inf
    return math.inf if quota == "max" else max(1.0, int(quota) / int(period))


def allowed_cores() -> int:
    """Processors that this process may use: its affinity, within the control group's quota."""
    return math.ceil(min(len(os.sched_getaffinity(0)), cgroup_cores()))


def host_cores() -> int:
    """Processors of the host that a job may use, whatever this one process is bound to."""
    return math.ceil(min(os.cpu_count() or 1, cgroup_cores()))
