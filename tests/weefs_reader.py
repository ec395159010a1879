"""A process that reads a tree in random order and compares every byte, attribute and listing with what they must be, until its stdin
ends: `weefs_reader.py ROOT EXPECTED SEED`. Prints what it counted as JSON.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import random
import select
import sys
import time

PIECE = 65536


def read_direct(path: str, direct: mmap.mmap) -> bytes:
    """Past the page cache."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        data, offset = b"", 0
        while n := os.preadv(fd, [direct], offset):
            data += direct[:n]
            offset += n
        return data
    finally:
        os.close(fd)


def read_cold(path: str) -> bytes:
    """Through the page cache, which is emptied of it before."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        data = b""
        while piece := os.read(fd, PIECE):
            data += piece
        return data
    finally:
        os.close(fd)


def read_mapped(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as mapped:
            return mapped[:]
    finally:
        os.close(fd)


class Reader:
    """Holds its root, a directory and a file open all the time."""

    def __init__(self, root: str, expected: dict, seed: int) -> None:
        self.root = root
        self.expected = expected
        self.random = random.Random(seed)
        self.names = sorted(expected["sha256"])
        self.directories = sorted(expected["directories"])
        self.direct = mmap.mmap(-1, PIECE)
        os.chdir(root)
        self.held_directory = self.directories[seed % len(self.directories)]
        self.directory_fd = os.open(self.held_directory, os.O_RDONLY)
        self.held_name = self.names[seed % len(self.names)]
        self.file_fd = os.open(self.held_name, os.O_RDONLY)
        self.counted = {"operations": 0, "bytes": 0, "errors": [], "longest_s": 0.0}

    def check_contents(self, name: str, data: bytes) -> None:
        self.counted["bytes"] += len(data)
        found = hashlib.sha256(data).hexdigest()
        if found != self.expected["sha256"][name]:
            raise ValueError(f"{name}: {len(data)} bytes with SHA-256 {found}")

    def check_attributes(self, name: str, status: os.stat_result) -> None:
        found = [status.st_mode, status.st_uid, status.st_gid, status.st_mtime_ns, status.st_size, status.st_nlink]
        if found != self.expected["attributes"][name]:
            raise ValueError(f"{name}: {found}")

    def check_listing(self, name: str, found: list[str]) -> None:
        if sorted(found) != self.expected["directories"][name]:
            raise ValueError(f"{name}: {len(found)} names")

    def step(self) -> None:
        name, what = self.random.choice(self.names), self.random.randrange(9)
        if what <= 2:
            self.check_contents(name, read_direct(name, self.direct))
        elif what == 3:
            self.check_contents(name, read_cold(os.path.join(self.root, name)))
        elif what == 4:
            self.check_contents(name, read_mapped(name))
        elif what == 5:
            self.check_attributes(name, os.lstat(os.path.join(self.root, name)))
        elif what == 6:
            directory = self.random.choice(self.directories)
            self.check_listing(directory, os.listdir(directory))
        elif what == 7:
            self.check_listing(self.held_directory, os.listdir(self.directory_fd))
            base = self.random.choice(self.expected["directories"][self.held_directory])
            self.check_attributes(f"{self.held_directory}/{base}", os.stat(base, dir_fd=self.directory_fd))
        else:
            os.posix_fadvise(self.file_fd, 0, 0, os.POSIX_FADV_DONTNEED)
            size = self.expected["attributes"][self.held_name][4]
            self.check_contents(self.held_name, os.pread(self.file_fd, size, 0))

    def run(self) -> None:
        while not select.select([sys.stdin], [], [], 0)[0]:
            begin = time.monotonic()
            try:
                self.step()
            except (OSError, ValueError) as error:
                self.counted["errors"].append(f"{type(error).__name__}: {error}")
            self.counted["operations"] += 1
            self.counted["longest_s"] = max(self.counted["longest_s"], time.monotonic() - begin)
        print(json.dumps(self.counted))


if __name__ == "__main__":
    with open(sys.argv[2]) as file:
        Reader(sys.argv[1], json.load(file), int(sys.argv[3])).run()
