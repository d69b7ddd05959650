"""The examples of the documents run as they are."""

import os
import re
import subprocess
import sys

import pytest

from conftest import ROOT, python
from test_serve import mountpoint, needs_kernel  # noqa: F401


def blocks(document, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / document).read_text(), re.M | re.S)


@pytest.mark.parametrize("document", ["docs/python.md", "python/README.md"])
def test_the_examples_in_python_run(document, tmp_path):
    found = blocks(document, "python")
    assert len(found) == 2
    for block in found:
        done = python(block, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")


@needs_kernel
def test_the_commands_for_the_example_run(mountpoint):  # noqa: F811
    (block,) = [block for block in blocks("docs/python.md", "sh") if "hello.py" in block]
    waiting = f"until mountpoint -q {mountpoint}; do sleep 0.1; done\n"
    script = "set -e\n" + block.replace("&\n", "&\n" + waiting).replace("/tmp/mnt", str(mountpoint)) + "wait\n"
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    done = subprocess.run(["sh", "-c", script], cwd=ROOT, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "Hello, world!\n", "")


def test_a_source_comes_from_the_environment(tmp_path):
    code = "import fsspec; fsspec.filesystem('defuse').pipe('/file', b'1'); print(fsspec.filesystem('defuse').source)"
    source = f"passthrough:{tmp_path}"
    done = python(code, env={**os.environ, "FSSPEC_DEFUSE": f'{{"source": "{source}"}}'})
    assert (done.stdout, done.stderr) == (source + "\n", "") and (tmp_path / "file").read_bytes() == b"1"


def test_every_name_of_the_package_has_a_description():
    import defuse_fs

    assert sorted(defuse_fs.__all__) == sorted(name for name in dir(defuse_fs) if not name.startswith("_") and name != "fsspec")
    for name in defuse_fs.__all__:
        assert getattr(defuse_fs, name).__doc__, name
    text = (ROOT / "docs/python.md").read_text()
    left_out = [name for name in defuse_fs.__all__ if f"`{name}" not in text and f".{name}" not in text and f"{name}(" not in text]
    assert set(left_out) <= {"DirEntry", "fdatasync", "islink", "kinds", "lexists", "listxattr", "mounts", "remove", "removexattr", "setxattr", "statistics", "unmount"}
