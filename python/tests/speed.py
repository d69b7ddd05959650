"""Reads of parquet and zarr from memory: through defuse://, beside the same files on tmpfs: `python speed.py [ROUNDS]`.

Both sides take turns, and the ratio is taken in each round: other load meets both. `local` is the way of people who have a path,
`file://` the one of fsspec for the same file. A ratio above 1 says that defuse:// was faster.
"""

import os
import shutil
import statistics
import sys
import tempfile
import time

import fsspec
import numpy
import pandas
import pyarrow.parquet
import zarr

import defuse_fs

OPTIONS = {"source": "memory:,size=4G"}


def tables(here):
    random = numpy.random.default_rng(1)
    count = 2_000_000
    table = pandas.DataFrame({f"c{number}": random.random(count) for number in range(8)})
    path = f"{here}/table.parquet"
    table.to_parquet(path, compression=None)
    fs = fsspec.filesystem("defuse", **OPTIONS)
    fs.put_file(path, "/table.parquet")
    yield "parquet, pandas", {
        "defuse": lambda: pandas.read_parquet("defuse://table.parquet", storage_options=OPTIONS),
        "local": lambda: pandas.read_parquet(path),
        "file://": lambda: pandas.read_parquet(f"file://{path}"),
    }
    yield "parquet, pyarrow, one column", {
        "defuse": lambda: pyarrow.parquet.read_table("/table.parquet", columns=["c3"], filesystem=fs),
        "local": lambda: pyarrow.parquet.read_table(path, columns=["c3"]),
        "file://": lambda: pyarrow.parquet.read_table(path, columns=["c3"], filesystem=fsspec.filesystem("file")),
    }


def arrays(here):
    for name, shape, chunks in (("1 MiB", (64, 512, 512), (1, 512, 512)), ("64 KiB", (256, 128, 128), (1, 128, 128))):
        array = numpy.random.default_rng(2).random(shape, dtype="f4")
        path = f"{here}/array-{shape[0]}.zarr"
        local = zarr.create_array(path, shape=shape, chunks=chunks, dtype="f4", compressors=None)
        local[:] = array
        fsspec.filesystem("defuse", **OPTIONS).put(path, f"/array-{shape[0]}.zarr", recursive=True)
        ours = zarr.open_array(f"defuse://array-{shape[0]}.zarr", mode="r", storage_options=OPTIONS)
        by_file = zarr.open_array(
            zarr.storage.FsspecStore.from_url(f"file://{path}", storage_options={"auto_mkdir": True}, read_only=True), mode="r"
        )
        assert (ours[:] == array).all()
        yield f"zarr, chunks of {name}", {
            "defuse": lambda ours=ours: ours[:],
            "local": lambda local=local: local[:],
            "file://": lambda by_file=by_file: by_file[:],
        }


def files(here):
    data = os.urandom(64 << 20)
    path = f"{here}/file"
    with open(path, "wb") as file:
        file.write(data)
    fs = fsspec.filesystem("defuse", **OPTIONS)
    fs.pipe("/file", data)

    def read(opened, size):
        room = memoryview(bytearray(size))
        with opened as file:
            while file.readinto(room):
                pass

    for size in (4 << 10, 64 << 10, 1 << 20):
        yield f"readinto of {size >> 10} KiB, unbuffered", {
            "defuse": lambda size=size: read(defuse_fs.open(fs._target + "/file", "rb", buffering=0), size),
            "local": lambda size=size: read(open(path, "rb", buffering=0), size),
        }
    yield "read of all", {"defuse": lambda: fs.cat_file("/file"), "local": lambda: open(path, "rb").read()}


def measure(name, targets, rounds):
    times = {target: [] for target in targets}
    for number in range(rounds + 1):
        order = list(targets) if number % 2 else list(reversed(targets))
        for target in order:
            begin = time.perf_counter()
            targets[target]()
            if number:
                times[target].append(time.perf_counter() - begin)
    shown = []
    for target in targets:
        if target != "defuse":
            ratios = [theirs / ours for theirs, ours in zip(times[target], times["defuse"])]
            low, middle, high = statistics.quantiles(ratios, n=4)
            shown.append(f"{target} / defuse {middle:.2f} ({low:.2f} to {high:.2f})")
    print(f"{name:<34} {1e3 * statistics.median(times['defuse']):8.1f} ms   {'   '.join(shown)}", flush=True)


def main():
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    here = tempfile.mkdtemp(dir="/dev/shm")
    try:
        for part in (files, tables, arrays):
            for name, targets in part(here):
                measure(name, targets, rounds)
    finally:
        shutil.rmtree(here)


if __name__ == "__main__":
    main()
