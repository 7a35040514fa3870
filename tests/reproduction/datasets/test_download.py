"""Downloads from a server in this process that misbehaves on request."""

import hashlib
import http.server
import io
import tarfile
import threading
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request

import pytest

from reproduction.datasets.download import _SafeRedirects, fetch, unpack

CONTENT = bytes(range(256)) * 40
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Server(http.server.ThreadingHTTPServer):
    """Serves ``content``; ``cuts`` has how many bytes to send of each answer before hanging up."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.content, self.cuts, self.ranges, self.codes = CONTENT, [], True, []
        self.announces = True  # the length
        self.redirects = []
        self.requests = []  # the Range header of each
        self.url = f"http://127.0.0.1:{self.server_port}/file.bin"

    def handle_error(self, *_):
        """Ignore that a client hangs up."""


class Handler(http.server.BaseHTTPRequestHandler):
    timeout = 10

    def do_GET(self):
        server, wanted = self.server, self.headers.get("Range")
        server.requests.append(wanted)
        if server.redirects:
            self.send_response(302)
            self.send_header("Location", server.redirects.pop(0))
            self.end_headers()
            return
        if server.codes:
            self.send_error(server.codes.pop(0))
            return
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and server.ranges else 0
        size = len(server.content)
        if start and start >= size:
            self.send_error(416)
            return
        body = server.content[start:]
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{size - 1}/{size}")
        if server.announces:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: server.cuts.pop(0)] if server.cuts else body)

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield running
        running.shutdown()
        thread.join(10)


@pytest.fixture
def get(server, tmp_path):
    def call(**options):
        defaults = {"pause": 0, "timeout": 5, "attempts": 3, "size": len(CONTENT)}
        options = {**defaults, "sha256": SHA256, **options}
        return fetch(server.url, tmp_path / "folder" / "file.bin", **options)

    return call


def left_in(tmp_path):
    return sorted(path.name for path in (tmp_path / "folder").iterdir())


def test_a_file_arrives_whole_and_leaves_nothing_else(get, server, tmp_path):
    path = get()
    assert path.read_bytes() == CONTENT
    assert left_in(tmp_path) == ["file.bin"]
    assert server.requests == [None]


def test_a_file_that_is_there_is_not_downloaded_again(get, server):
    get()
    get()
    assert len(server.requests) == 1


def test_a_file_that_is_there_but_corrupt_is_replaced(get, server, tmp_path):
    get().write_bytes(b"corrupt")
    assert get().read_bytes() == CONTENT
    assert len(server.requests) == 2


def test_a_cut_connection_is_resumed_where_it_ended(get, server):
    server.cuts = [1000, 3000]
    assert get().read_bytes() == CONTENT
    assert server.requests == [None, "bytes=1000-", "bytes=4000-"]


def test_attempts_that_get_further_are_not_counted(get, server):
    server.cuts = [1000] * 9
    assert get(attempts=1).read_bytes() == CONTENT
    assert len(server.requests) == 10


def test_a_server_that_ignores_ranges_sends_all_again(get, server):
    server.ranges, server.cuts = False, [1000]
    assert get().read_bytes() == CONTENT
    assert server.requests == [None, "bytes=1000-"]


def test_a_part_left_by_an_earlier_process_is_continued(get, server, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file.bin.part").write_bytes(CONTENT[:5000])
    assert get().read_bytes() == CONTENT
    assert server.requests == ["bytes=5000-"]


@pytest.mark.parametrize("extra", [b"", b"too much"])
def test_a_part_that_has_all_or_more_is_checked(get, server, tmp_path, extra):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file.bin.part").write_bytes(CONTENT + extra)
    assert get().read_bytes() == CONTENT
    assert left_in(tmp_path) == ["file.bin"]


def test_a_corrupt_part_is_discarded_and_all_downloaded_again(get, server, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file.bin.part").write_bytes(b"x" * 5000)
    assert get().read_bytes() == CONTENT
    assert server.requests == ["bytes=5000-", None]


def test_a_server_that_cuts_for_ever_is_given_up_and_the_part_kept(get, server, tmp_path):
    server.ranges, server.cuts = False, [1000] * 20
    with pytest.raises(ConnectionError, match=r"after 1000 bytes. .* try again .*\.part"):
        get()
    assert len(server.requests) == 4
    assert left_in(tmp_path) == ["file.bin.part"]
    server.ranges, server.cuts = True, []
    assert get().read_bytes() == CONTENT


def test_wrong_bytes_are_refused_at_once(get, server, tmp_path):
    server.content = CONTENT[::-1]
    with pytest.raises(ValueError, match=f"bytes with SHA-256 {SHA256}, got .* discarded"):
        get()
    assert left_in(tmp_path) == []
    assert len(server.requests) == 1


def test_wrong_bytes_after_a_cut_are_refused_after_one_more_try(get, server, tmp_path):
    server.content, server.cuts = CONTENT[::-1], [1000]
    with pytest.raises(ValueError, match="bytes with SHA-256"):
        get()
    assert server.requests == [None, "bytes=1000-", None]
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("announces", [True, False])
def test_an_answer_that_is_too_long_is_cut_off_and_discarded(get, server, tmp_path, announces):
    server.content, server.announces = CONTENT * 500, announces
    longest = 0
    original = Path.unlink

    def unlink(path, **options):
        nonlocal longest
        longest = max(longest, path.stat().st_size)
        original(path, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "unlink", unlink)
        with pytest.raises(ValueError, match=f"expected {len(CONTENT)} bytes .* got more bytes"):
            get()
    assert longest == len(CONTENT) + 1
    assert left_in(tmp_path) == []


def test_a_truncated_answer_without_a_length_is_discarded(get, server, tmp_path):
    server.announces, server.cuts = False, [1000]
    with pytest.raises(ValueError, match=r"bytes with SHA-256 .* got SHA-256 .* discarded"):
        get()
    assert left_in(tmp_path) == []


def test_a_redirect_is_followed_with_the_same_checks(get, server, tmp_path):
    server.redirects = [server.url]
    assert get().read_bytes() == CONTENT
    assert len(server.requests) == 2
    server.redirects, server.content = [server.url], CONTENT[::-1]
    (tmp_path / "folder" / "file.bin").unlink()
    with pytest.raises(ValueError, match="discarded"):
        get()


def test_a_redirect_to_a_local_file_is_refused(get, server, tmp_path):
    server.redirects = ["file:///etc/hostname"] * 5
    with pytest.raises(ConnectionError, match="302"):
        get()
    assert left_in(tmp_path) == []


def test_a_redirect_from_https_to_http_is_refused():
    request = Request("https://example.org/file")
    handler = _SafeRedirects()
    for address in ("http://example.org/file", "ftp://example.org/file"):
        with pytest.raises(HTTPError, match="redirected from HTTPS to an unsafe address"):
            handler.redirect_request(request, None, 302, "Found", {}, address)
    same = handler.redirect_request(request, None, 302, "Found", {}, "https://example.com/file")
    assert same.full_url == "https://example.com/file"


def test_a_folder_in_place_of_the_file_is_refused_before_the_download(get, server, tmp_path):
    (tmp_path / "folder" / "file.bin").mkdir(parents=True)
    with pytest.raises(IsADirectoryError, match="A folder is never replaced"):
        get()
    assert server.requests == []


def test_a_missing_file_is_not_asked_for_twice(get, server):
    server.codes = [404] * 9
    with pytest.raises(ConnectionError, match=r"404.*put the file at .*file\.bin yourself"):
        get()
    assert len(server.requests) == 1


def test_a_busy_server_is_asked_again(get, server):
    server.codes = [503, 429]
    assert get().read_bytes() == CONTENT


def test_a_server_that_is_not_there_is_given_up(get, server, tmp_path):
    server.url = server.url.rsplit(":", 1)[0] + ":1/file.bin"
    with pytest.raises(ConnectionError, match="Check the connection and try again"):
        get(attempts=2)


def test_a_terminal_sees_how_far_it_is(get, server, tmp_path, capsys, monkeypatch):
    get()
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    server.cuts = [1024]
    tmp_path.joinpath("folder", "file.bin").unlink()
    get()
    shown = capsys.readouterr().err
    assert "\rfile.bin: 0 MB, 10%\n" in shown
    assert shown.endswith("\rfile.bin: 0 MB, 100%\n")


def archive(path, members):
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            if isinstance(content, str):
                info.type, info.linkname = tarfile.SYMTYPE, content
                tar.addfile(info)
            else:
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return path


def test_an_archive_becomes_a_folder_of_the_files_wanted(tmp_path):
    members = {"set/a": b"1", "set/b": b"2", "set/c": b"3"}
    unpack(archive(tmp_path / "x.tar.gz", members), tmp_path / "set", ("a", "b"))

    assert {path.name: path.read_bytes() for path in (tmp_path / "set").iterdir()} == {
        "a": b"1",
        "b": b"2",
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == ["set", "x.tar.gz"]


def test_paths_that_lead_out_of_an_archive_are_not_followed(tmp_path):
    inside = tmp_path / "inside"
    inside.mkdir()
    outside = tmp_path / "outside"
    members = {
        "../outside": b"no",
        str(outside): b"no",
        "set/../../../outside": b"no",
        "set/link": str(outside),
        "set/a": b"1",
    }
    unpack(archive(inside / "x.tar.gz", members), inside / "set", ["a"])

    assert not outside.exists()
    assert [path.name for path in (inside / "set").iterdir()] == ["a"]


def test_a_link_in_place_of_a_wanted_file_is_refused(tmp_path):
    path = archive(tmp_path / "x.tar.gz", {"set/a": "/etc/hostname"})
    with pytest.raises(ValueError, match=r"does not contain set/a\. Replace it"):
        unpack(path, tmp_path / "set", ["a"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.tar.gz"]


@pytest.mark.parametrize("spoil", [lambda c: c[: len(c) // 2], lambda c: b"no archive"])
def test_a_broken_archive_leaves_nothing_behind(tmp_path, spoil):
    noise = b"".join(hashlib.md5(bytes([i])).digest() for i in range(256)) * 9
    path = archive(tmp_path / "x.tar.gz", {"set/a": noise})
    path.write_bytes(spoil(path.read_bytes()))

    with pytest.raises(ValueError, match=r"is not a complete tar.gz archive: .* Delete it"):
        unpack(path, tmp_path / "set", ["a"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.tar.gz"]


def test_a_folder_that_is_there_is_never_overwritten(tmp_path):
    (tmp_path / "set").mkdir()
    with pytest.raises(FileExistsError, match="Move it away or complete it"):
        unpack(archive(tmp_path / "x.tar.gz", {"set/a": b"1"}), tmp_path / "set", ["a"])
