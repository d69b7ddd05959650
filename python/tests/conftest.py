"""Mounts for tests. Each test has names of its own."""

import itertools
import os
import pathlib
import socket
import subprocess
import sys
import time

import pytest

import defuse_fs

ROOT = pathlib.Path(__file__).resolve().parents[2]
# A volume of GlusterFS, in a run that has one.
VOLUMES = {"gluster": os.environ["DEFUSE_VOLUME"]} if "DEFUSE_VOLUME" in os.environ else {}
_numbers = itertools.count(1)


def unique():
    return f"test-{next(_numbers)}:"


def new_memory():
    """A source of files in memory that no other test has."""
    return f"memory:,size={next(_numbers) + 1024}M"


@pytest.fixture
def mem():
    """A new mount of files in memory: its target."""
    target = unique()
    defuse_fs.mount(target, "memory:")
    yield target
    defuse_fs.unmount(target, lazy=True)


@pytest.fixture
def defuse():
    """The program of the project."""
    program = os.environ.get("DEFUSE_PROGRAM")
    if program is None:
        pytest.skip("skipped: DEFUSE_PROGRAM names no program")
    return program


@pytest.fixture
def image(defuse, tmp_path):
    """A new image of uhs: its source."""
    path = tmp_path / "image"
    subprocess.run([defuse, "mkfs", "uhs", "--size", "64M", path], check=True, stdout=subprocess.DEVNULL)
    yield f"uhs:{path}"
    # pytest keeps the directories of several runs.
    path.unlink()


@pytest.fixture
def shared(defuse, tmp_path):
    """A server of files in memory by shared memory: its source."""
    path = tmp_path / "shared"
    server = subprocess.Popen([defuse, "serve", "--foreground", "--shared", "memory:", path], stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: answers(path))
        yield f"shared:{path}"
    finally:
        server.terminate()
        server.wait()


def answers(path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        return client.connect_ex(str(path)) == 0


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def python(code, *arguments, **more):
    """Run code in another interpreter and return its completed process."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **more)
