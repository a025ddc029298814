"""A slow cable: joins the TAP devices `near` and `far`, which it makes, with a delay and losses, as `tc netem` would,
which not every kernel has. `python relay.py MILLISECONDS LOSS`: LOSS is a share of the packets. It runs until killed.
"""

import contextlib
import fcntl
import os
import random
import selectors
import struct
import sys
import time
from collections import deque

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
"""Of linux/if_tun.h."""


def open_tap(name: str) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TAP | IFF_NO_PI))
    return device


def relay(delay: float, loss: float) -> None:
    near, far = open_tap("near"), open_tap("far")
    print("ready", flush=True)
    selector, late = selectors.DefaultSelector(), deque[tuple[float, int, bytes]]()
    for device, other in ((near, far), (far, near)):
        selector.register(device, selectors.EVENT_READ, other)
    while True:
        for key, _ in selector.select(max(0.0, late[0][0] - time.monotonic()) if late else None):
            packet = os.read(key.fd, 2**17)
            if random.random() >= loss:
                late.append((time.monotonic() + delay, key.data, packet))
        while late and late[0][0] <= time.monotonic():
            _, device, packet = late.popleft()
            with contextlib.suppress(OSError):  # not up yet
                os.write(device, packet)


if __name__ == "__main__":
    relay(float(sys.argv[1]) / 1000, float(sys.argv[2]))
