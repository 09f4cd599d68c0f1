"""Archives as AI Hub's tool leaves them, and broken or hostile ones."""

import errno
import io
import os
import shutil
import unicodedata
import zipfile
import zlib
from collections import namedtuple

import pytest
from conftest import logged
from local import unpack

Usage = namedtuple("Usage", "total used free")
TEXT = b"0123456789" * 50


class Named(zipfile.ZipInfo):
    """A member whose name has bytes of its own, and no flag that says which."""

    encoding = "cp949"

    def _encodeFilenameFlags(self):
        name = self.filename.encode(self.encoding)
        return name, self.flag_bits & ~unpack.UTF8_FLAG


class NamedInUtf8(Named):
    encoding = "utf-8"


def packed(members, kind=zipfile.ZipInfo, method=zipfile.ZIP_DEFLATED):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in members.items():
            archive.writestr(kind(name), data, method)
    return buffer.getvalue()


def write(path, data=b""):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def write_parts(path, data, *cuts):
    ends = [*cuts, len(data)]
    for start, end in zip([0, *cuts], ends):
        write(path.with_name(f"{path.name}.part{start}"), data[start:end])


def tree(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(autouse=True)
def warned(monkeypatch):
    return logged(monkeypatch, unpack.logger, "warning")


@pytest.fixture
def corpus(tmp_path):
    return tmp_path / "corpus"


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


@pytest.mark.parametrize("kind", [zipfile.ZipInfo, Named, NamedInUtf8])
@pytest.mark.parametrize(
    "method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA]
)
def test_names_and_tree(corpus, out, kind, method):
    members = {"D01/가나.txt": TEXT, "똠방.wav": b"", "a/b\\c.txt": b"c"}
    write(corpus / "1.Training" / "TS1.zip", packed(members, kind, method))
    assert unpack.unpack(corpus, out) == []
    assert tree(out) == {
        "1.Training/TS1/D01/가나.txt": TEXT,
        "1.Training/TS1/똠방.wav": b"",
        "1.Training/TS1/a/b/c.txt": b"c",
    }


def test_names_are_composed(corpus, out):
    name = unicodedata.normalize("NFD", "한글")
    write(corpus / f"{name}.zip", packed({f"{name}/{name}.txt": b"x"}))
    unpack.unpack(corpus, out)
    assert tree(out) == {"한글/한글/한글.txt": b"x"}


def test_only_what_is_wanted(corpus, out):
    members = {"a.WAV": b"a", "b.mp4": b"b", "c/": b"", "__MACOSX/._a.wav": b""}
    write(corpus / "x.ZIP", packed(members))
    unpack.unpack(corpus, out, {".wav"})
    assert tree(out) == {"x/a.WAV": b"a"}


@pytest.mark.parametrize("cuts", [(), (1,), (3, 90), tuple(range(7, 200, 7))])
def test_parts_are_joined_by_their_numbers(corpus, out, cuts):
    data = packed({"a.txt": os.urandom(300), "b.txt": TEXT})
    write_parts(corpus / "x.zip", data, *cuts)  # 91 comes before 105
    assert list(unpack.find(corpus)) == [corpus / "x.zip"]
    assert unpack.unpack(corpus, out) == []
    assert tree(out)["x/b.txt"] == TEXT
    assert not list(out.rglob("*.zip*"))


def test_a_seek_in_joined_parts(tmp_path):
    parts = {"1": b"ababab", "2": b"ccc", "3": b"", "4": b"dedede"}
    paths = [write(tmp_path / name, data) for name, data in parts.items()]
    with io.BufferedReader(unpack._Joined(paths), 4) as file:
        assert file.read() == b"abababcccdedede"
        file.seek(-5, os.SEEK_END)
        assert file.read(2) == b"ed" and file.tell() == 12
        file.seek(4)
        assert file.read(6) == b"abcccd"
        with pytest.raises(ValueError, match="no byte -1"):
            file.seek(-1)


@pytest.mark.parametrize(
    "lost, message",
    [
        (0, "between bytes 0 and 100 is missing"),
        (100, "between bytes 100 and 200 is missing"),
        (200, "not a zip file"),  # the last holds the list
    ],
)
def test_a_missing_part(corpus, out, warned, lost, message):
    write_parts(corpus / "x.zip", packed({"a.txt": os.urandom(300)}), 100, 200)
    (corpus / f"x.zip.part{lost}").unlink()
    write(corpus / "y.zip", packed({"b.txt": b"b"}))
    (problem,) = unpack.unpack(corpus, out)
    assert f"{corpus}/x.zip: " in problem and message in problem
    assert warned == [f"not unpacked: {problem}"]
    assert tree(out) == {"y/b.txt": b"b"}


def test_archives_that_need_no_unpacking(corpus, out):
    write_parts(corpus / "joined.zip", b"old", 1)
    write(corpus / "joined.zip", packed({"a.txt": b"a"}))
    write(corpus / "by_hand.zip", b"any")
    write(corpus / "by_hand" / "b.txt", b"b")
    assert unpack.find(corpus) == {
        corpus / "joined.zip": [corpus / "joined.zip"]
    }
    assert unpack.unpack(corpus, out) == []
    assert tree(out) == {"joined/a.txt": b"a"}


def test_a_second_start_writes_what_is_not_there(corpus, out):
    inner = packed({"가.txt": b"inner"}, Named)
    members = {"a.wav": b"aa", "b.txt": b"bb", "in/n.zip": inner}
    write(corpus / "x.zip", packed(members))
    unpack.unpack(corpus, out)
    expected = {
        "x/a.wav": b"aa",
        "x/b.txt": b"bb",
        "x/in/n/가.txt": b"inner",
        "x/in/n.unpacked": f"{len(inner)} {zlib.crc32(inner):08x}".encode(),
    }
    assert tree(out) == expected
    write(out / "x/a.wav", b"zz")  # of its size: not looked into
    write(out / "x/b.txt", b"b")  # cut short
    kept = (out / "x/in/n/가.txt").stat().st_ino
    assert unpack.unpack(corpus, out) == []
    assert tree(out) == {**expected, "x/a.wav": b"zz"}
    assert (out / "x/in/n/가.txt").stat().st_ino == kept


@pytest.mark.parametrize("name", ["a.txt", "b.JSON"])
def test_a_label_is_compared_with_its_archive(corpus, out, name):
    for said in (b"aa", b"zz"):
        inner = packed({name: said})
        write(corpus / "x.zip", packed({name: said, "n.zip": inner}))
        unpack.unpack(corpus, out)
        assert tree(out)[f"x/{name}"] == said
        assert tree(out)[f"x/n/{name}"] == said


def test_links_are_followed_but_not_back(corpus, out, tmp_path):
    write(tmp_path / "disk/x.zip", packed({"a.txt": b"a"}))
    write(corpus / ".hidden/y.zip", packed({"b.txt": b"b"}))
    (corpus / "link").symlink_to(tmp_path / "disk")
    (tmp_path / "disk/back").symlink_to(corpus)
    (tmp_path / "disk/self").symlink_to(tmp_path / "disk")
    assert list(unpack.find(corpus)) == [corpus / "link/x.zip"]
    assert unpack.unpack(corpus, out) == []
    assert tree(out) == {"link/x/a.txt": b"a"}


def test_a_damaged_member_is_left_out_and_told(corpus, out, warned):
    data = bytearray(
        packed({"a.txt": b"a" * 99, "b.txt": b"b"}, method=zipfile.ZIP_STORED)
    )
    data[60] ^= 1
    write(corpus / "x.zip", bytes(data))
    (problem,) = unpack.unpack(corpus, out)
    assert "x.zip: a.txt: Bad CRC-32" in problem and len(warned) == 1
    assert tree(out) == {"x/b.txt": b"b"}


@pytest.mark.parametrize(
    "name",
    ["../x.txt", "a/../../x.txt", "/etc/x.txt", "C:\\x.txt", "..\\x.txt"],
)
def test_no_path_leaves_the_folder(corpus, out, name):
    write(corpus / "x.zip", packed({name: b"x", "ok.txt": b"ok"}))
    (problem,) = unpack.unpack(corpus, out)
    assert "leaves the folder" in problem
    assert tree(out.parent) == {
        "corpus/x.zip": (corpus / "x.zip").read_bytes(),
        "out/x/ok.txt": b"ok",
    }


def test_names_that_no_disk_takes(corpus, out):
    members = {"가" * 90: b"", "a": b"a", "a/b.txt": b"b", "c.txt": b"c"}
    write(corpus / "x.zip", packed(members))
    problems = unpack.unpack(corpus, out)
    assert len(problems) == 2
    assert tree(out) == {"x/a": b"a", "x/c.txt": b"c"}


def test_a_damaged_nested_archive(corpus, out):
    write(corpus / "x.zip", packed({"n.zip": b"none", "a.txt": b"a"}))
    (problem,) = unpack.unpack(corpus, out)
    assert "n.zip: File is not a zip file" in problem
    assert tree(out) == {"x/a.txt": b"a"}


def test_a_password_is_told(corpus, out):
    data = bytearray(packed({"a.txt": TEXT}))
    for header, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        data[data.index(header) + flags] |= 1
    write(corpus / "x.zip", bytes(data))
    (problem,) = unpack.unpack(corpus, out)
    assert "password required" in problem


def test_room_is_asked_for_before_anything_is_written(corpus, out, monkeypatch):
    write(corpus / "x.zip", packed({"a.txt": bytes(600), "b.mp4": bytes(900)}))
    write(corpus / "y.zip", packed({"a.txt": bytes(500)}))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, 1099))
    with pytest.raises(OSError, match="0.0 GB in .*--output_fold") as error:
        unpack.unpack(corpus, out, {".txt"})
    assert error.value.errno == errno.ENOSPC
    assert tree(out) == {}
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, 1100))
    assert unpack.unpack(corpus, out, {".txt"}) == []
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, 0))
    assert unpack.unpack(corpus, out, {".txt"}) == []


def test_a_full_disk_stops(corpus, out, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    write(corpus / "x.zip", packed({"a.txt": b"a"}))
    monkeypatch.setattr(shutil, "copyfileobj", full)
    with pytest.raises(OSError, match="cannot write .*a.txt"):
        unpack.unpack(corpus, out)
    assert tree(out) == {}


@pytest.mark.parametrize("place", [".", "below/it"])
def test_nothing_is_written_into_the_corpus(corpus, place):
    write(corpus / "x.zip", packed({"a.txt": b"a"}))
    before = tree(corpus)
    with pytest.raises(ValueError, match="lies inside .*--output_folder"):
        unpack.unpack(corpus, corpus / place)
    assert tree(corpus) == before
