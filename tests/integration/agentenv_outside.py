#!/usr/bin/python3
"""agentenv_outside.py AGENTENVD AGENTENV PROTO_DIR: snapshots as files and in stores: what comes back is what
left, and what was tampered with is refused and leaves nothing."""
import hashlib
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import unittest

import agentenv_lab as lab

FILES = r"""mkdir -p /work/a/b /work/opq; echo hello > /work/a/b/f; ln /work/a/b/f /work/a/l; ln -s ../x /work/s
rm /bin/yes; mkfifo /work/p; dd if=/dev/zero of=/work/z bs=1M count=8 2> /dev/null; echo end >> /work/z
chmod 4711 /work/a/b/f; touch "/work/n$(printf '\377')"; echo old > /work/opq/old"""
MORE = "rm -r /work/opq; mkdir /work/opq; echo second > /work/second; rm /work/a/l"
LOOK = "cd /work; find . -exec stat -c '%n %f %u %g %s %h %Y' {} \\; | sort; cat a/b/f second; readlink s; tail -c 4 z; ls /bin/yes"


def unpacked(path):
    """Members of an exported file as (TarInfo, bytes)."""
    raw = subprocess.run(["zstd", "-dc", path], capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(raw)) as t:
        return [(m, t.extractfile(m).read() if m.isreg() else None) for m in t]


def packed(members, path):
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as t:
        for m, data in members:
            m.pax_headers.pop("hdrcharset", None)
            t.addfile(m, io.BytesIO(data) if data is not None else None)
    with open(path, "wb") as f:
        f.write(subprocess.run(["zstd", "-q"], input=raw.getvalue(), capture_output=True, check=True).stdout)


def entry(name, kind=tarfile.REGTYPE, data=b"", **fields):
    m = tarfile.TarInfo(name)
    m.type, m.size = kind, len(data)
    for k, v in fields.items():
        setattr(m, k, v)
    return m, data if kind == tarfile.REGTYPE else None


class Outside(lab.DaemonTest):
    def setUp(self):
        self.dir = tempfile.mkdtemp(prefix="outside-", dir=self.d.dir)
        self.addCleanup(shutil.rmtree, self.dir)

    def look(self, box):
        return self.d.sh(box, LOOK, check=False, binary=True).stdout

    def snapshot(self):
        """Of two layers; its id and what a sandbox sees in it."""
        box = self.d.out("start", "bb")
        self.d.sh(box, FILES)
        self.d.run("snapshot", box)
        self.d.sh(box, MORE)
        snap = self.d.out("snapshot", box, "--retain", "t")
        seen = self.look(box)
        self.d.run("rm", box)
        return snap, seen

    def forget(self, *snaps):
        for s in snaps:
            self.d.run("snapshot", "release", s, "t")
        self.d.run("gc", "--grace", "0.001")
        self.assertEqual(os.listdir(self.d.state + "/layers"), [])

    def check_in(self, location, *digest):
        snap = self.d.out("snapshot", "import", location, *digest, "--retain", "t")
        box = self.d.out("start", snap)
        seen = self.look(box)
        self.d.run("rm", box)
        self.assertEqual(self.d.json("audit", "--content")[0]["problems"], [])
        return snap, seen

    def refused(self, why, *args):
        r = self.d.run("snapshot", "import", *args, check=False)
        self.assertEqual(r.returncode, 1, r.stdout)
        self.assertIn(why, r.stderr)
        self.assertEqual(os.listdir(self.d.state + "/layers"), [])
        self.assertEqual(self.d.json("snapshot", "ls"), [])
        self.assertEqual(self.d.audit(), [])

    def test_a_file_brings_back_what_left(self):
        path = self.dir + "/x.tar.zst"
        snap, seen = self.snapshot()
        digest = self.d.json("snapshot", "export", snap, path)[0]["digest"]
        again = self.d.out("snapshot", "import", path, "--retain", "t")
        a, b = (next(s for s in self.d.json("snapshot", "ls") if s["id"] == i) for i in (snap, again))
        self.assertEqual(a["layers"], b["layers"], "layers that are here are shared")
        self.forget(snap, again)
        got, now = self.check_in(path, digest)
        self.assertEqual(now, seen)
        self.assertIn(b"hello", seen)
        # and the copy has the same name by content
        self.assertEqual(self.d.json("snapshot", "export", got, self.dir + "/y.tar.zst")[0]["digest"], digest)
        self.assertEqual(sorted(os.listdir(self.dir)), ["x.tar.zst", "y.tar.zst"])
        self.forget(got)

    def test_a_tampered_file_is_refused_and_leaves_nothing(self):
        path, bad = self.dir + "/x.tar.zst", self.dir + "/bad.tar.zst"
        snap, _ = self.snapshot()
        digest = self.d.json("snapshot", "export", snap, path)[0]["digest"]
        self.forget(snap)
        self.refused("not the one that was asked for", path, "0" * 64)

        def tampered(change, why, *more):
            members = change(unpacked(path))
            packed(members, bad)
            self.refused(why, bad, *more)

        def last(members, name):
            return [entry("layers/%s/%s" % (members[-1][0].name.split("/")[1], name))]

        def change_byte(members):
            return [(m, data.replace(b"hello", b"hallo") if data else data) for m, data in members]

        def change_mode(members):
            for m, _ in members:
                if m.name.endswith("/work/second"):
                    m.mode = 0o777
            return members

        def change_owner(members):
            for m, _ in members:
                if m.name.endswith("/work/second"):
                    m.uid = 7
            return members

        def change_manifest(members):
            data = members[0][1].replace(b'"pids": 128', b'"pids": 999')
            return [(members[0][0], data)] + members[1:]

        def sealed_again(members):
            members = change_manifest(members)
            seal = hashlib.blake2b(members[0][1], digest_size=32).hexdigest().encode()
            return [members[0], (members[1][0], seal)] + members[2:]

        def without_last(members):
            gone = members[-1][0].name.split("/")[1]
            return [(m, d) for m, d in members if not m.name.startswith("layers/" + gone)]

        tampered(change_byte, "holds something else than its address says")
        tampered(change_mode, "holds something else than its address says")
        tampered(change_owner, "holds something else than its address says")
        tampered(lambda ms: ms[:-1], "holds something else than its address says")
        tampered(change_manifest, "not the one that was asked for")
        tampered(sealed_again, "not the one that was asked for", digest)
        tampered(without_last, "is missing")
        tampered(lambda ms: ms[1:], "manifest.json is missing")
        tampered(lambda ms: ms + [entry("etc/passwd")], "belongs to no layer")
        tampered(lambda ms: ms + last(ms, "../../x"), "is refused")
        tampered(lambda ms: ms + last(ms, "work/s/x"), "is refused")
        tampered(lambda ms: ms + [entry(ms[2][0].name + "/x")], "comes twice")
        with open(path, "rb") as f, open(bad, "wb") as g:
            g.write(f.read()[:-40])
        self.refused("import from", bad)
        self.refused("", self.dir)

    def hostile(self, members, why):
        """A file with a layer of these entries, all else as it should be."""
        bad = self.dir + "/bad.tar.zst"
        address = "a" * 64
        manifest = json.dumps({"format": 1, "engine": "fsonly", "image": "bb", "limits": {}, "layers": [address],
                               "imageDigest": self.d.json("image", "ls")[0]["digest"]}).encode()
        seal = hashlib.blake2b(manifest, digest_size=32).hexdigest().encode()
        prefix = "layers/%s/" % address
        for m, _ in members:
            m.name = prefix + m.name
            if m.linkname and m.type == tarfile.LNKTYPE:
                m.linkname = prefix + m.linkname
        packed([entry("manifest.json", data=manifest), entry("manifest.blake2b", data=seal),
                entry(prefix, tarfile.DIRTYPE, mode=0o755)] + members, bad)
        self.refused(why, bad)

    def test_hostile_archives(self):
        d = entry("d", tarfile.DIRTYPE, mode=0o755)
        self.hostile([entry("../x")], "not the name of something in a layer")
        self.hostile([entry("/etc/x")], "not the name of something in a layer")
        self.hostile([entry("d/x")], "below what is no directory")
        self.hostile([entry("l", tarfile.SYMTYPE, linkname="/tmp"), entry("l/x")], "below what is no directory")
        self.hostile([entry("f"), entry("f")], "making f")
        self.hostile([entry("n", tarfile.CHRTYPE, devmajor=1, devminor=3)], "a device")
        self.hostile([entry("n", tarfile.BLKTYPE, devmajor=8, devminor=0)], "a device")
        self.hostile([entry("h", tarfile.LNKTYPE, linkname="../../../registry.db")], "is refused")
        self.hostile([entry("h", tarfile.LNKTYPE, linkname="nothing")], "not in the layer")
        self.hostile([d, entry("h", tarfile.LNKTYPE, linkname="d")], "not in the layer")
        self.hostile([entry("f", uid=70000)], "no user of a sandbox")
        self.hostile([entry("f", gid=2 ** 31)], "no user of a sandbox")
        for key, value in (("security.capability", "x"), ("trusted.overlay.redirect", "/etc"),
                           ("trusted.overlay.metacopy", ""), ("trusted.overlay.opaque", "x")):
            self.hostile([entry("d", tarfile.DIRTYPE, pax_headers={"SCHILY.xattr." + key: value})],
                         "attribute that a layer may not have")
        self.hostile([entry("/".join("d" for _ in range(300)))], "is refused")
        self.hostile([entry("f", data=b"fine")], "holds something else")

    def test_a_directory_gets_only_what_it_lacks(self):
        store = "file://" + self.dir + "/store"
        snap, seen = self.snapshot()
        first = self.d.json("snapshot", "export", snap, store)[0]
        self.assertEqual(first["layers"], 2)
        box = self.d.out("start", snap)
        self.d.sh(box, "echo third > /work/third")
        third = self.d.out("snapshot", box, "--retain", "t")
        self.d.run("rm", box)
        second = self.d.json("snapshot", "export", third, store)[0]
        self.assertEqual(second["layers"], 1, "two were there")
        self.forget(snap, third)
        got, now = self.check_in(store, first["digest"])
        self.assertEqual(now, seen)
        other, _ = self.check_in(store, second["digest"])
        self.assertEqual(len(os.listdir(self.d.state + "/layers")), 3, "shared layers came once")
        self.forget(got, other)
        self.assertEqual([n for n in os.listdir(self.dir + "/store") if n.startswith(".")], [])
        self.refused("not the digest", store, "../../../etc/passwd")
        self.refused("store", store, "0" * 64)
        name = sorted(os.listdir(self.dir + "/store/layers"))[0]
        with open(self.dir + "/store/layers/" + name, "r+b") as f:
            f.seek(60)
            f.write(b"\0\0\0\0")
        self.refused("import from", store, second["digest"])

    def test_an_image_must_be_there(self):
        path = self.dir + "/x.tar.zst"
        snap, _ = self.snapshot()
        self.d.run("snapshot", "export", snap, path)
        self.forget(snap)
        members = unpacked(path)
        manifest = json.loads(members[0][1])
        manifest["imageDigest"] = "f" * 64
        data = json.dumps(manifest).encode()
        seal = hashlib.blake2b(data, digest_size=32).hexdigest().encode()
        members[0][0].size = len(data)
        packed([(members[0][0], data), (members[1][0], seal)] + members[2:], path)
        self.refused("import the same image first", path)


class S3(Outside):
    """A real S3-compatible server: s3rver, which knows its users but does not compute their signatures."""

    @classmethod
    def setUpClass(cls):
        cls.server = None
        why = cls.start_server()
        if why and os.environ.get("LONGHAUL_MUST_WORK", "").find("s3") >= 0:
            raise AssertionError(why)
        if why:
            raise unittest.SkipTest("SKIPPED, s3 is missing: " + why)
        for name, value in cls.variables.items():
            os.environ[name] = value
        super().setUpClass()

    @classmethod
    def start_server(cls):
        cls.tools = os.environ.get("LONGHAUL_S3RVER") or tempfile.mkdtemp(prefix="s3rver-")
        program = cls.tools + "/node_modules/.bin/s3rver"
        if not os.path.exists(program):
            if not shutil.which("npm"):
                return "no npm to install s3rver with; or set LONGHAUL_S3RVER to where it is"
            r = subprocess.run(["npm", "install", "--no-audit", "--no-fund", "--silent", "--prefix", cls.tools,
                                "s3rver@3.7.1"], capture_output=True, text=True, timeout=240)
            if r.returncode:
                return r.stderr[-300:]
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        cls.data = tempfile.mkdtemp(prefix="s3rver-data-")
        cls.server = subprocess.Popen([program, "-d", cls.data, "-a", "127.0.0.1", "-p", str(port), "--silent",
                                       "--configure-bucket", "longhaul"])
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            with socket.socket() as s:
                if s.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        else:
            return "s3rver does not listen"
        cls.variables = {"AWS_ENDPOINT_URL": "http://127.0.0.1:%d" % port, "AWS_REGION": "us-east-1",
                         "AWS_ACCESS_KEY_ID": "S3RVER", "AWS_SECRET_ACCESS_KEY": "S3RVER"}
        return None

    @classmethod
    def tearDownClass(cls):
        super().tearDownClass()
        cls.server.terminate()
        cls.server.wait()
        shutil.rmtree(cls.data)
        for name in cls.variables:
            del os.environ[name]
        if not os.environ.get("LONGHAUL_S3RVER"):
            shutil.rmtree(cls.tools)

    def test_there_and_back(self):
        store = "s3://longhaul/some/prefix"
        snap, seen = self.snapshot()
        first = self.d.json("snapshot", "export", snap, store)[0]
        self.assertEqual(first["layers"], 2)
        self.assertEqual(self.d.json("snapshot", "export", snap, store)[0]["layers"], 0)
        self.forget(snap)
        got, now = self.check_in(store, first["digest"])
        self.assertEqual(now, seen)
        self.forget(got)
        self.refused("is not there", store, "0" * 64)
        self.refused("is not there", "s3://nowhere", first["digest"])
        self.refused("BUCKET/PREFIX", "s3://longhaul/../other", first["digest"])

    def test_an_unknown_user_is_told(self):
        snap, _ = self.snapshot()
        self.d.stop()
        os.environ["AWS_ACCESS_KEY_ID"] = "NOBODY"
        self.d.start()
        r = self.d.run("snapshot", "export", snap, "s3://longhaul/x", check=False)
        self.assertIn("check the AWS_ variables", r.stderr)
        self.d.stop()
        os.environ["AWS_ACCESS_KEY_ID"] = "S3RVER"
        self.d.start()
        self.forget(snap)

    def test_a_server_that_is_gone_is_told(self):
        snap, _ = self.snapshot()
        self.server.send_signal(signal.SIGSTOP)
        self.d.stop()
        os.environ["AWS_ENDPOINT_URL"] = "http://127.0.0.1:1"
        self.d.start()
        r = self.d.run("snapshot", "export", snap, "s3://longhaul/x", check=False)
        self.assertEqual(r.returncode, 75, r.stderr)
        self.d.stop()
        os.environ["AWS_ENDPOINT_URL"] = self.variables["AWS_ENDPOINT_URL"]
        self.server.send_signal(signal.SIGCONT)
        self.d.start()
        self.forget(snap)


# What the base class tests needs no second run.
for name in [n for n in dir(Outside) if n.startswith("test_")]:
    setattr(S3, name, None)

if __name__ == "__main__":
    if shutil.which("zstd") is None:
        sys.exit("zstd is missing; apt-get install zstd")
    lab.main()
