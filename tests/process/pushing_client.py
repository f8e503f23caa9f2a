"""A client process that pushes counters and says what was acknowledged; made to be killed.

Push i adds one to column i of every key. `begun i` is written before it is sent, `acked i` after the
servers acknowledged it; several are in flight at any time. With --linger it does not end by itself.
"""

import argparse
import os
import sys
from collections import deque

import numpy as np

import shoal

IN_FLIGHT = 6


def say(word: str, number: int) -> None:
    os.write(1, f"{word} {number}\n".encode())  # one write: a kill leaves whole lines


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--lane", required=True)
    parser.add_argument("--first", type=int, required=True)
    parser.add_argument("--end", type=int, required=True)
    parser.add_argument("--keys", type=int, required=True)
    parser.add_argument("--linger", action="store_true")
    options = parser.parse_args()
    with shoal.connect(options.address, name=options.name, lane=options.lane, timeout=30) as client:
        table = client.table(options.name)
        dim = table.dim
        keys = np.arange(options.keys)
        tickets: deque[tuple[int, shoal.Ticket]] = deque()
        for number in range(options.first, options.end):
            grads = np.zeros((options.keys, dim), np.float32)
            grads[:, number] = -1.0
            say("begun", number)
            tickets.append((number, table.push_async(keys, grads)))
            if len(tickets) == IN_FLIGHT:
                finish(tickets)
        if options.linger:
            sys.stdin.read()
        while tickets:
            finish(tickets)


def finish(tickets: "deque[tuple[int, shoal.Ticket]]") -> None:
    number, ticket = tickets.popleft()
    ticket.wait()
    say("acked", number)


if __name__ == "__main__":
    main()
