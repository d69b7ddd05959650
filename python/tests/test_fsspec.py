"""defuse:// for fsspec: its own abstract tests, and what they leave out."""

import errno
import pickle

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.tests import abstract

import defuse_fs
from conftest import new_memory
from test_process import in_child


class Fixtures(abstract.AbstractFixtures):
    @pytest.fixture(params=["memory:", "uhs:"])
    def fs(self, request):
        source = new_memory() if request.param == "memory:" else request.getfixturevalue("image")
        fs = fsspec.filesystem("defuse", source=source, skip_instance_cache=True)
        yield fs
        fs.close()

    @pytest.fixture
    def fs_path(self):
        return "/"


class TestCopy(abstract.AbstractCopyTests, Fixtures):
    pass


class TestGet(abstract.AbstractGetTests, Fixtures):
    pass


class TestPut(abstract.AbstractPutTests, Fixtures):
    pass


class TestPipe(abstract.AbstractPipeTests, Fixtures):
    pass


class TestOpen(abstract.AbstractOpenTests, Fixtures):
    pass


@pytest.fixture
def fs():
    fs = fsspec.filesystem("defuse", source=new_memory(), skip_instance_cache=True)
    yield fs
    fs.close()


def test_the_protocol_is_known_by_its_entry_point():
    assert fsspec.get_filesystem_class("defuse") is fsspec.get_filesystem_class("defuse")
    assert fsspec.get_filesystem_class("defuse").__module__ == "defuse_fs.fsspec"
    with fsspec.open("defuse://a/b", "w", source="memory:,size=64M") as file:
        file.write("text")
    with fsspec.open("defuse:///a/b", source="memory:,size=64M") as file:
        assert file.read() == b"text"
    one = fsspec.filesystem("defuse", source="memory:,size=64M")
    assert one is fsspec.filesystem("defuse", source="memory:,size=64M")
    assert one is not fsspec.filesystem("defuse", source="memory:,size=65M")
    with pytest.raises(ValueError, match="option source"):
        fsspec.filesystem("defuse")


def test_a_mount_of_the_process_is_used(mem):
    fs = fsspec.filesystem("defuse", mount=mem)
    fs.pipe("/d/file", b"12345")
    assert defuse_fs.read_file(mem + "/d/file") == b"12345"
    assert fs.cat_file("d/file", 1, -1) == b"234" and fs.cat_file("d/file", -2) == b"45"


def test_listings_have_sizes_and_types(fs):
    fs.pipe({"/d/a": b"1", "/d/b": b"22", "/d/e/f": b"333"})
    fs.symlink("/d/b", "/d/l")
    found = {about["name"]: (about["type"], about["size"], about["islink"]) for about in fs.ls("/d")}
    assert found == {
        "/d/a": ("file", 1, False),
        "/d/b": ("file", 2, False),
        "/d/e": ("directory", 0, False),
        "/d/l": ("file", 2, True),
    }
    assert fs.info("defuse://d/l")["destination"] == "b"
    assert fs.find("/") == ["/d/a", "/d/b", "/d/e/f", "/d/l"]
    assert sorted(fs.glob("/d/*")) == ["/d/a", "/d/b", "/d/e", "/d/l"] and fs.du("/d/e") == 3
    assert fs.ls("/d/a", detail=False) == ["/d/a"]
    with pytest.raises(FileNotFoundError):
        fs.ls("/none")
    fs.mv("/d/e", "/moved")
    fs.mv("/d/a", "/moved")
    assert fs.find("/moved") == ["/moved/a", "/moved/f"]
    fs.rm("/d", recursive=True)
    assert fs.ls("/", detail=False) == ["/moved"]
    assert fs.modified("/moved/f").tzinfo is not None and fs.created("/moved/f").year > 2000
    assert fs.unstrip_protocol("/moved/f") == "defuse://moved/f"


def test_files_are_read_and_written_in_every_mode(fs):
    with fs.open("/new/file", "wb") as file:
        file.write(b"0123456789" * 100_000)
    with fs.open("/new/file", "rb") as file:
        assert file.size == 1_000_000 and file.seek(-3, 2) == 999_997 and file.read() == b"789"
        assert file.fs is fs and file.path == "/new/file"
    with fs.open("/new/file", "r+b") as file:
        file.write(b"ab")
    with fs.open("/new/file", "ab") as file:
        file.write(b"end")
    assert fs.cat_file("/new/file", 0, 3) == b"ab2" and fs.size("/new/file") == 1_000_003
    with fs.open("/text.gz", "wt", compression="infer") as file:
        file.write("compressed")
    with fs.open("/text.gz", "rt", compression="infer") as file:
        assert file.read() == "compressed"
    with pytest.raises(FileNotFoundError):
        fsspec.filesystem("defuse", mount=fs._target, auto_mkdir=False).open("/no/file", "wb")


def test_a_transaction_shows_its_files_together_or_not_at_all(fs):
    with fs.transaction:
        fs.pipe("/a", b"1")
        with fs.open("/b", "wb") as file:
            file.write(b"2")
        assert not fs.exists("/a") and not fs.exists("/b")
    assert fs.cat(["/a", "/b"]) == {"/a": b"1", "/b": b"2"}
    with pytest.raises(RuntimeError):
        with fs.transaction:
            fs.pipe("/a", b"changed")
            raise RuntimeError
    assert fs.cat_file("/a") == b"1" and fs.ls("/", detail=False) == ["/a", "/b"]


def test_files_move_between_this_and_the_local_file_system(fs, tmp_path):
    (tmp_path / "local").write_bytes(bytes(range(256)) * 10_000)
    called = []

    class Callback(fsspec.Callback):
        def relative_update(self, inc=1):
            called.append(inc)

    fs.put_file(str(tmp_path / "local"), "/d/here", callback=Callback())
    assert sum(called) == 2_560_000
    fs.get_file("/d/here", str(tmp_path / "back"))
    assert (tmp_path / "back").read_bytes() == (tmp_path / "local").read_bytes()
    local = LocalFileSystem()
    assert local.cat_file(str(tmp_path / "back"), 0, 2) == b"\0\1"


def test_an_instance_goes_to_other_processes_by_its_parameters(tmp_path):
    fs = fsspec.filesystem("defuse", source=f"passthrough:{tmp_path}", options="ro")
    (tmp_path / "file").write_bytes(b"1")
    again = pickle.loads(pickle.dumps(fs))
    assert again.cat_file("/file") == b"1"
    with pytest.raises(OSError) as raised:
        again.pipe("/other", b"")
    assert raised.value.errno == errno.EROFS


def test_a_child_of_fork_has_a_connection_of_its_own(shared):
    fs = fsspec.filesystem("defuse", source=shared)
    fs.pipe("/file", b"of the parent")
    child = in_child(lambda: (fs.cat_file("/file"), fs.pipe_file("/child", b"of the child")))
    assert child == "(b'of the parent', None)"
    assert fs.cat_file("/child") == b"of the child"


def test_an_instance_that_is_gone_leaves_no_mount():
    before = defuse_fs.mounts()
    fs = fsspec.filesystem("defuse", source=new_memory(), skip_instance_cache=True)
    file = fs.open("/file", "wb")
    assert len(defuse_fs.mounts()) == len(before) + 1
    fs.close()
    assert defuse_fs.mounts() == before
    file.write(b"still open")
    file.close()
    fs.close()
