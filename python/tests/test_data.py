"""Tables and arrays through defuse://, on every kind of source."""

import os
import threading

import fsspec
import numpy
import pandas
import pyarrow
import pyarrow.dataset
import pyarrow.parquet
import pytest
import zarr

import defuse_fs
from conftest import VOLUMES, new_memory, python
from dictionary import DictionaryFileSystem


@pytest.fixture(params=["memory", "uhs", "shared", "passthrough", "program", *VOLUMES])
def source(request, tmp_path):
    if request.param == "gluster":
        return VOLUMES["gluster"]
    if request.param in ("uhs", "shared"):
        return request.getfixturevalue({"uhs": "image"}.get(request.param, request.param))
    if request.param == "program":
        return DictionaryFileSystem()
    return new_memory() if request.param == "memory" else f"passthrough:{tmp_path}"


@pytest.fixture
def options(source):
    """The options of a source, which is mounted once for all users of it."""
    options = {"source": source}
    fs = fsspec.filesystem("defuse", **options)
    yield options
    # zarr has instances of its own.
    for one in list(type(fs)._cache.values()):
        one.close()
    type(fs).clear_instance_cache()


@pytest.fixture
def table():
    random = numpy.random.default_rng(1)
    return pandas.DataFrame(
        {
            "number": numpy.arange(200_000),
            "value": random.random(200_000),
            "word": random.choice(["one", "two", "three"], 200_000),
        }
    )


def test_a_table_goes_through_parquet_by_pandas(options, table):
    table.to_parquet("defuse://tables/one.parquet", storage_options=options)
    back = pandas.read_parquet("defuse://tables/one.parquet", storage_options=options)
    pandas.testing.assert_frame_equal(back, table)
    some = pandas.read_parquet("defuse://tables/one.parquet", columns=["value"], storage_options=options)
    assert (some["value"] == table["value"]).all()


def test_a_table_goes_through_csv(options, table):
    table.head(1000).to_csv("defuse://table.csv.gz", index=False, storage_options=options)
    back = pandas.read_csv("defuse://table.csv.gz", storage_options=options)
    pandas.testing.assert_frame_equal(back, table.head(1000), check_dtype=False)


def test_a_partitioned_dataset_is_written_and_filtered_by_pyarrow(options, table):
    fs = fsspec.filesystem("defuse", **options)
    whole = pyarrow.Table.from_pandas(table)
    pyarrow.parquet.write_to_dataset(whole, "/words", partition_cols=["word"], filesystem=fs)
    assert sorted(fs.ls("/words", detail=False)) == ["/words/word=one", "/words/word=three", "/words/word=two"]
    found = pyarrow.dataset.dataset("/words", filesystem=fs, partitioning="hive")
    two = found.to_table(filter=pyarrow.dataset.field("word") == "two")
    assert two.num_rows == (table["word"] == "two").sum() > 0


def test_an_array_goes_through_zarr(options):
    array = numpy.arange(500 * 400, dtype="f4").reshape(500, 400)
    store = zarr.storage.FsspecStore.from_url("defuse://arrays/one.zarr", storage_options=options)
    made = zarr.create_array(store, shape=array.shape, chunks=(100, 100), dtype=array.dtype, overwrite=True)
    made[:] = array
    made.attrs["unit"] = "m"
    again = zarr.open_array("defuse://arrays/one.zarr", mode="r+", storage_options=options)
    assert (again[:] == array).all() and again.attrs["unit"] == "m"
    again[10:20, 30:40] = -1
    assert (again[5:25, 25:45] == numpy.where(again[5:25, 25:45] == -1, -1, array[5:25, 25:45])).all()
    assert (again[10:20, 30:40] == -1).all()
    group = zarr.open_group("defuse://arrays/group.zarr", mode="w", storage_options=options)
    group.create_array("a", data=array)
    assert sorted(zarr.open_group("defuse://arrays/group.zarr", mode="r", storage_options=options)) == ["a"]


def test_arrays_of_numpy_are_saved_and_loaded(options):
    array = numpy.arange(10_000)
    with fsspec.open("defuse://a.npz", "wb", **options) as file:
        numpy.savez_compressed(file, array=array)
    with fsspec.open("defuse://a.npz", "rb", **options) as file:
        assert (numpy.load(file)["array"] == array).all()


def test_threads_read_parts_of_one_file(options):
    fs = fsspec.filesystem("defuse", **options)
    data = os.urandom(1 << 20)
    fs.pipe("/data", data)
    wrong = []

    def read(start):
        with fs.open("/data") as file:
            for at in range(start, 1 << 20, 1 << 16):
                file.seek(at)
                if file.read(5000) != data[at : at + 5000] or fs.cat_file("/data", at, at + 10) != data[at : at + 10]:
                    wrong.append(at)

    threads = [threading.Thread(target=read, args=(number * 1000,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    ranges = fs.cat_ranges(["/data"] * 3, [0, 10, 20], [1, 12, 23])
    assert ranges == [data[0:1], data[10:12], data[20:23]]


def test_one_process_reads_what_another_wrote(shared, table):
    options = {"source": shared}
    table.head(100).to_parquet("defuse://table.parquet", storage_options=options)
    done = python(
        "import sys, pandas; print(len(pandas.read_parquet('defuse://table.parquet', storage_options={'source': sys.argv[1]})))",
        shared,
    )
    assert (done.stdout, done.stderr) == ("100\n", "")
    assert defuse_fs.mounts()
