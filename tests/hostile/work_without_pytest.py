"""What ranks run in pods and containers without pytest."""

import time


def waits_and_says(seconds):
    print("is there", flush=True)
    time.sleep(seconds)
    return 7


def says_where_it_listens(seconds):
    """Print the addresses and ports that processes of its container listen at, once the ranks have exchanged something."""
    import json
    import pathlib
    import socket

    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(1))
    found = []
    for version, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in pathlib.Path("/proc/net", version).read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            address, port = local.split(":")
            # The words of an address are in the processor's order, and LISTEN is 0A.
            packed = b"".join(bytes.fromhex(address[at : at + 8])[::-1] for at in range(0, len(address), 8))
            if state == "0A":
                found.append((socket.inet_ntop(family, packed), int(port, 16)))
    print("listening:", json.dumps(found), flush=True)
    time.sleep(seconds)
