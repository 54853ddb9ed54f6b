"""Which firewall this machine says that it has, so that a person is told what to type where one is in the way."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, get_args

Firewall = Literal["unknown", "ufw", "firewalld", "nftables", "iptables", "NetworkPolicy"]
FIREWALLS: tuple[Firewall, ...] = get_args(Firewall)


def own_firewall(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> Firewall:
    """The firewall by the traces that anybody may read; "unknown" where there are none, which does not mean that there
    is no firewall."""
    if "KUBERNETES_SERVICE_HOST" in environment:
        return "NetworkPolicy"
    if "ENABLED=yes" in _text(root / "etc/ufw/ufw.conf"):
        return "ufw"
    if (root / "run/firewalld").is_dir() or (root / "run/firewalld.pid").is_file():
        return "firewalld"
    if (
        "hook input" in _text(root / "etc/nftables.conf")
        and (root / "etc/systemd/system/sysinit.target.wants/nftables.service").is_symlink()
    ):
        return "nftables"
    return "iptables" if "filter" in _text(root / "proc/net/ip_tables_names") else "unknown"


def opening_advice(firewall: Firewall, source: str) -> str:
    """What to type where the firewall is, so that it takes what comes from an address."""
    family = "ip6" if ":" in source else "ip"
    tables = "ip6tables" if ":" in source else "iptables"
    match firewall:
        case "ufw":
            return f"ufw allow from {source}"
        case "firewalld":
            return f"firewall-cmd --zone=trusted --add-source={source}"
        case "nftables":
            return f"nft insert rule inet filter input {family} saddr {source} accept"
        case "iptables":
            return f"{tables} --insert INPUT --source {source} --jump ACCEPT"
        case "NetworkPolicy":
            return "a NetworkPolicy of the namespace that lets the run's pods talk to each other, as plait submit makes"
        case "unknown":
            return f"for example: ufw allow from {source}"


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""
