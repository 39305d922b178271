#!/usr/bin/python3
"""agentenv_files.py AGENTENVD AGENTENV PROTO_DIR: stat, list, watch, streams of tar, holes, and processes inside that
race against all of it."""
import hashlib
import io
import os
import queue
import stat
import subprocess
import tarfile
import tempfile
import threading
import unittest
import uuid

import grpc

import agentenv_lab as lab

pb = lab.stubs()


class FilesTest(lab.DaemonTest):
    def setUp(self):
        self.c = lab.Client(pb, self.d.socket)
        self.box = self.c.call("Create", idempotency_key=uuid.uuid4().hex, image="bb").id

    def tearDown(self):
        self.c.close()
        super().tearDown()

    def sh(self, script):
        status, out = self.c.sh(self.box, script)
        self.assertEqual(status, 0, (script, out))
        return out

    def stat(self, path, **fields):
        return self.c.call("StatFile", id=self.box, path=path, **fields)

    def refused(self, code, call):
        with self.assertRaises(grpc.RpcError) as e:
            r = call()
            if not hasattr(r, "DESCRIPTOR"):
                list(r)
        self.assertEqual(e.exception.code(), code, e.exception.details())

    def upload(self, messages):
        call = self.c.channel.stream_unary("/longhaul.sandbox.v1.Sandboxes/Upload",
                                           pb.UploadRequest.SerializeToString, pb.UploadReply.FromString)
        return call(iter(messages), timeout=60)


class See(FilesTest):
    def test_stat(self):
        self.sh("cd /work; echo hello > f; chmod 640 f; chown 1000:77 f; ln f twin; ln -s f link; mkdir d; "
                "dd if=/dev/zero of=holes bs=1 count=1 seek=10485760 2>/dev/null")
        f = self.stat("/work/f")
        self.assertEqual((stat.S_ISREG(f.mode), f.mode & 0o777, f.size, f.uid, f.gid, f.links),
                         (True, 0o640, 6, 1000, 77, 2))
        link = self.stat("/work/link")
        self.assertEqual((stat.S_ISLNK(link.mode), link.target), (True, "f"))
        self.assertEqual(self.stat("/work/link", follow=True).size, 6)
        self.assertTrue(stat.S_ISDIR(self.stat("/").mode))
        holes = self.stat("/work/holes")
        self.assertEqual(holes.size, 10485761)
        self.assertLess(holes.allocated_bytes, 1 << 20)
        self.refused(grpc.StatusCode.NOT_FOUND, lambda: self.stat("/work/none"))
        self.refused(grpc.StatusCode.INVALID_ARGUMENT, lambda: self.stat("relative"))
        self.refused(grpc.StatusCode.PERMISSION_DENIED, lambda: self.stat("/proc/1/maps", follow=True))

    def test_names_of_any_bytes(self):
        names = [b"plain", b"new\nline", b"bad\xff", b"\\x41", b"a" * 255, "\u00fc".encode()]
        for n in names:
            self.c.call("Exec", id=self.box, argv=["true"])
            with tempfile.TemporaryDirectory() as d:
                open(os.path.join(d.encode(), n), "w").close()
                r = subprocess.run([lab.AGENTENV, "--socket", self.d.socket, "cp", d + "/.", self.box + ":/work/in"],
                                   capture_output=True)
                self.assertEqual(r.returncode, 0, r.stderr)
        listed = {f.raw_name or f.name.encode() for f in self.c.call("ListFiles", id=self.box, path="/work/in").files}
        self.assertEqual(listed, set(names))
        with tempfile.TemporaryDirectory() as d:
            self.d.run("cp", self.box + ":/work/in", d)
            self.assertEqual(set(os.listdir(os.path.join(d, "in").encode())), set(names))

    def test_a_file_larger_than_any_message(self):
        size = 100 << 20
        with tempfile.TemporaryDirectory() as d:
            big = os.path.join(d, "big")
            with open(big, "wb") as f:
                f.write(os.urandom(1 << 20))
                f.seek(size - (70 << 20))
                f.write(os.urandom(66 << 20))
                f.truncate(size)
            with open(big, "rb") as f:
                digest = hashlib.md5(f.read()).hexdigest()
            self.d.run("cp", big, self.box + ":/work/big")
            self.assertEqual(self.sh("md5sum /work/big").split()[0], digest)
            self.assertLess(self.stat("/work/big").allocated_bytes, 80 << 20)
            self.d.run("cp", self.box + ":/work/big", d + "/back")
            with open(d + "/back", "rb") as f:
                self.assertEqual(hashlib.md5(f.read()).hexdigest(), digest)
            self.assertLess(os.stat(d + "/back").st_blocks * 512, 80 << 20)

    def test_a_stream_in_any_pieces(self):
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as t:
            m = tarfile.TarInfo("f")
            m.size = 100000
            t.addfile(m, io.BytesIO(b"x" * 100000))
        data = out.getvalue()
        first = [pb.UploadRequest(id=self.box, path="/work/new/dir")]
        rest = [pb.UploadRequest(tar=data[i:i + 7777]) for i in range(0, len(data), 7777)]
        self.assertEqual(self.upload(first + rest).bytes, 100000)
        self.assertEqual(self.stat("/work/new/dir/f").size, 100000)
        self.refused(grpc.StatusCode.INVALID_ARGUMENT, lambda: self.upload(first + rest[:5]))


class Watch(FilesTest):
    def watch(self, path, **fields):
        call = self.c.call("WatchFiles", id=self.box, path=path, timeout=60, **fields)
        self.addCleanup(call.cancel)
        events = queue.Queue()

        def read():
            try:
                for e in call:
                    events.put((e.change, e.path, e.directory))
            except grpc.RpcError as e:
                events.put(e.code())
        threading.Thread(target=read, daemon=True).start()
        self.expect(events, (pb.FILE_RESCAN, "", False))
        return events

    def expect(self, events, *wanted):
        """In this order; others may come between."""
        for w in wanted:
            seen = []
            while not seen or seen[-1] != w:
                try:
                    seen.append(events.get(timeout=20))
                except queue.Empty:
                    self.fail("no %s among %s" % (w, seen))

    def test_changes_inside_are_seen(self):
        events = self.watch("/work")
        self.sh("cd /work; echo x > f; chmod 600 f; mv f g; rm g; mkdir d; echo y > d/deep; ln -s /etc l")
        self.expect(events, (pb.FILE_CREATED, "f", False), (pb.FILE_WRITTEN, "f", False),
                    (pb.FILE_ATTRIBUTES, "f", False), (pb.FILE_DELETED, "f", False),
                    (pb.FILE_CREATED, "g", False), (pb.FILE_DELETED, "g", False),
                    (pb.FILE_CREATED, "d", True), (pb.FILE_CREATED, "l", False))
        self.assertTrue(events.empty())

    def test_trees_and_what_joins_them(self):
        self.sh("mkdir -p /work/a/b; ln -s /etc /work/a/etc")
        events = self.watch("/work", recursive=True)
        self.sh("echo x > /work/a/b/f; mkdir /work/n; sleep 0.3; echo x > /work/n/g; mv /work/n /work/m; "
                "sleep 0.3; echo x > /work/m/h; touch /etc/unseen")
        self.expect(events, (pb.FILE_WRITTEN, "a/b/f", False), (pb.FILE_CREATED, "n", True),
                    (pb.FILE_WRITTEN, "n/g", False), (pb.FILE_CREATED, "m", True), (pb.FILE_WRITTEN, "m/h", False))
        self.sh("rm -r /work/a")
        self.expect(events, (pb.FILE_DELETED, "a", True))
        self.assertNotIn("unseen", str(list(events.queue)))

    def test_snapshots_and_ends(self):
        events = self.watch("/work")
        snap = self.c.call("TakeSnapshot", id=self.box, idempotency_key=uuid.uuid4().hex)
        self.expect(events, (pb.FILE_RESCAN, "", False))
        self.sh("echo x > /work/after")
        self.expect(events, (pb.FILE_WRITTEN, "after", False))
        self.sh("rmdir /work/none 2>/dev/null; mv /work /gone")
        self.expect(events, grpc.StatusCode.NOT_FOUND)
        events = self.watch("/gone")
        self.c.call("Remove", id=self.box)
        self.expect(events, grpc.StatusCode.NOT_FOUND)
        self.assertTrue(snap.id)

    def test_too_many_directories_are_refused(self):
        self.sh("mkdir /work/many; cd /work/many; mkdir $(seq 4200)")
        self.refused(grpc.StatusCode.RESOURCE_EXHAUSTED,
                     lambda: self.c.call("WatchFiles", id=self.box, path="/work/many", recursive=True))


class Race(FilesTest):
    """A process inside exchanges a directory for a link to the root of everything, all the time."""

    def setUp(self):
        super().setUp()
        self.secret = "agentenvd-secret-%d" % os.getpid()
        with open("/etc/" + self.secret, "w") as f:
            f.write("of the host")
        self.addCleanup(os.remove, "/etc/" + self.secret)
        self.sh("mkdir -p /work/a/sub; echo inside > /work/a/sub/f; ln -s /etc /work/link; "
                "(while :; do mv -T /work/a /work/t; mv -T /work/link /work/a; mv -T /work/a /work/link; "
                "mv -T /work/t /work/a; done) >/dev/null 2>&1 &")

    def test_nothing_of_the_host_is_seen(self):
        calls = [
            lambda: self.stat("/work/a/" + self.secret, follow=True),
            lambda: self.c.call("Download", id=self.box, path="/work/a/" + self.secret),
            lambda: self.c.call("ListFiles", id=self.box, path="/work/a"),
            lambda: self.c.call("Download", id=self.box, path="/work/a"),
        ]
        seen = 0
        for i in range(100):
            try:
                r = calls[i % len(calls)]()
                text = str(r) if hasattr(r, "DESCRIPTOR") else str([c.tar for c in r])
                self.assertNotIn("secret", text)
                self.assertNotIn("of the host", text)
                seen += 1
            except grpc.RpcError as e:
                self.assertIn(e.code(), (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNAVAILABLE,
                                         grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT),
                              e.details())
        self.assertGreater(seen, 10)

    def test_no_directory_of_the_host_is_watched(self):
        call = self.c.call("WatchFiles", id=self.box, path="/work", recursive=True, timeout=3)
        paths = []
        with self.assertRaises(grpc.RpcError):
            for e in call:
                paths.append(e.path)
                if len(paths) == 50:
                    open("/etc/" + self.secret, "a").close()
        self.assertGreater(len(paths), 50)
        self.assertFalse([p for p in paths if "secret" in p])


if __name__ == "__main__":
    lab.main()
