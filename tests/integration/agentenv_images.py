#!/usr/bin/python3
"""agentenv_images.py AGENTENVD AGENTENV PROTO_DIR: images of every form become the same tree, hostile ones are
refused, and builds make images from commands and Dockerfiles."""
import gzip
import hashlib
import io
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
import unittest

import agentenv_lab as lab

INDEX = "application/vnd.oci.image.index.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar"


def layer(*members):
    """A tar of (name, content) for files, (name, None) for directories, or TarInfos."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as t:
        for m in members:
            if isinstance(m, tarfile.TarInfo):
                t.addfile(m)
                continue
            name, content = m
            info = tarfile.TarInfo(name)
            info.mode = 0o755
            if content is None:
                info.type = tarfile.DIRTYPE
            else:
                info.size = len(content)
            t.addfile(info, io.BytesIO(content) if content is not None else None)
    return raw.getvalue()


def special(name, kind, **fields):
    info = tarfile.TarInfo(name)
    info.type = kind
    for k, v in fields.items():
        setattr(info, k, v)
    return info


class Layout:
    """An OCI image layout, written file by file."""

    def __init__(self, path):
        self.path = path
        os.makedirs(path + "/blobs/sha256")
        self.write("oci-layout", b'{"imageLayoutVersion": "1.0.0"}')

    def write(self, name, data):
        with open(self.path + "/" + name, "wb") as f:
            f.write(data)

    def blob(self, data, kind):
        digest = hashlib.sha256(data).hexdigest()
        self.write("blobs/sha256/" + digest, data)
        return {"mediaType": kind, "digest": "sha256:" + digest, "size": len(data)}

    def image(self, layers, config=None, **extra):
        """Layers as tars; compressed where they are pairs (tar, media type)."""
        listed = [self.blob(*x) if isinstance(x, tuple) else self.blob(x, LAYER) for x in layers]
        config = self.blob(json.dumps({"config": config or {}}).encode(), "application/vnd.oci.image.config.v1+json")
        manifest = {"schemaVersion": 2, "config": config, "layers": listed, **extra}
        return self.blob(json.dumps(manifest).encode(), MANIFEST)

    def index(self, *manifests):
        self.write("index.json", json.dumps({"schemaVersion": 2, "manifests": manifests}).encode())


class Images(lab.DaemonTest):
    def setUp(self):
        self.dir = tempfile.mkdtemp(prefix="images-", dir=self.d.dir)
        self.addCleanup(shutil.rmtree, self.dir)
        self.known = {i["name"] for i in self.d.json("image", "ls")}
        self.base = self.d.dir + "/root"

    def tearDown(self):
        self.d.run("rm", "--all")
        for i in self.d.json("image", "ls"):
            if i["name"] not in self.known:
                self.d.run("image", "rm", i["name"])
        super().tearDown()
        self.assertEqual(len(os.listdir(self.d.state + "/images")), len(self.known))

    def imported(self, name, path):
        return self.d.out("image", "import", name, path).split()[1]

    def refused(self, why, *args):
        before = os.listdir(self.d.state + "/images")
        r = self.d.run(*args, check=False)
        self.assertEqual(r.returncode, 1, r.stdout)
        self.assertIn(why, r.stderr)
        self.assertEqual(os.listdir(self.d.state + "/images"), before)

    def see(self, image, script):
        box = self.d.out("start", image)
        return self.d.sh(box, script).stdout

    def rootfs(self):
        """The base as a layer."""
        raw = io.BytesIO()
        with tarfile.open(fileobj=raw, mode="w") as t:
            t.add(self.base, arcname=".")
        return raw.getvalue()

    @unittest.skipUnless(shutil.which("umoci") and shutil.which("skopeo"), "umoci and skopeo are missing")
    def test_what_umoci_and_skopeo_make(self):
        def umoci(*args):
            subprocess.run(["umoci", *args], check=True, cwd=self.dir, capture_output=True)

        umoci("init", "--layout", "oci")
        umoci("new", "--image", "oci:t")
        def first(root):
            shutil.copytree(self.base, root, symlinks=True, dirs_exist_ok=True)
            os.makedirs(root + "/opt/gone")
            os.mkdir(root + "/again")
            open(root + "/again/old", "w").close()
            os.symlink("again", root + "/link")

        def second(root):
            shutil.rmtree(root + "/opt")
            shutil.rmtree(root + "/again")
            os.mkdir(root + "/again")
            open(root + "/again/new", "w").close()
            os.unlink(root + "/link")
            os.mkdir(root + "/link")
            open(root + "/link/inside", "w").close()

        for change in (first, second):
            shutil.rmtree(self.dir + "/bundle", ignore_errors=True)
            umoci("unpack", "--image", "oci:t", "bundle")
            change(self.dir + "/bundle/rootfs")
            umoci("repack", "--image", "oci:t", "bundle")
        subprocess.run(["skopeo", "copy", "-q", "oci:oci:t", "docker-archive:docker.tar:a:t"], check=True, cwd=self.dir)
        subprocess.run(["tar", "-C", "oci", "-czf", "oci.tar.gz", "."], check=True, cwd=self.dir)
        digest = self.imported("plain", self.dir + "/bundle/rootfs")
        for name, path in (("oci", "/oci"), ("ocitar", "/oci.tar.gz"), ("docker", "/docker.tar")):
            self.assertEqual(self.imported(name, self.dir + path), digest, name)
        self.assertEqual(self.see("oci", "ls /again /link; ls -d /opt || true").split(),
                         ["/again:", "new", "/link:", "inside"])

    def test_layers_are_applied_in_order_whatever_theirs(self):
        o = Layout(self.dir + "/o")
        second = layer(("d", None), ("d/-new", b"2"), ("d/.wh..wh..opq", b""), ("gone", None), ("gone/.wh.x", b""),
                       ("file", None), ("file/inside", b"3"), ("dir", b"now a file"))
        first = layer(("d", None), ("d/-old", b"1"), ("d/old", b"1"), ("gone", None), ("gone/x", None),
                      ("gone/x/y", b"1"), ("file", b"1"), ("dir", None), ("dir/inside", b"1"))
        o.index(o.image([self.rootfs(), (gzip.compress(first), LAYER + "+gzip"), second],
                        config={"Env": ["A=b c", "PATH=/bin"], "WorkingDir": "/d", "User": "1000"}))
        self.imported("o", self.dir + "/o")
        self.assertEqual(self.see("o", "cd /; ls -A d gone; cat file/inside dir").split(),
                         ["d:", "-new", "gone:", "3now", "a", "file"])
        # what the image says holds for its builds
        self.d.run("image", "build", "o2", "--from", "o", 'test "$A" = "b c" && test "$PWD" = /d && test $(id -u) = 1000'
                   if os.path.exists(self.base + "/bin/id") else 'test "$A" = "b c" && test "$PWD" = /d')

    def test_an_index_of_many_machines(self):
        o = Layout(self.dir + "/o")
        machine = {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine]
        ours, other = o.image([self.rootfs()]), o.image([layer(("wrong", b""))])
        ours["platform"] = {"os": "linux", "architecture": machine}
        other["platform"] = {"os": "linux", "architecture": "s390x"}
        inner = o.blob(json.dumps({"schemaVersion": 2, "manifests": [other, ours]}).encode(), INDEX)
        o.index(inner)
        self.imported("o", self.dir + "/o")
        self.assertEqual(self.see("o", "test ! -e /wrong && echo right"), "right\n")
        o.index(other, other)
        self.refused("the index has 0 images for linux/", "image", "import", "p", self.dir + "/o")

    def test_hostile_images(self):
        def hostile(why, *layers, **change):
            path = tempfile.mkdtemp(dir=self.dir) + "/o"
            o = Layout(path)
            o.index(o.image([self.rootfs(), *layers], **change))
            self.refused(why, "image", "import", "bad", path)

        hostile("leaves the tree", layer(("../x", b"")))
        hostile("leaves the tree", layer(("/etc/x", b"")))
        hostile("leaves the tree", layer(("../.wh.x", b"")))
        hostile("removes nothing", layer(("etc/.wh...", b"")))
        hostile("bad", layer(special("l", tarfile.SYMTYPE, linkname="/tmp"), ("l/x", b"")))
        hostile("outside", layer(special("h", tarfile.LNKTYPE, linkname="../../registry.db")))
        hostile("bad", layer(special("l", tarfile.SYMTYPE, linkname="/etc")), layer(("l/.wh.passwd", b"")))
        self.assertTrue(os.path.exists("/etc/passwd"))
        hostile("cannot be read", (layer(("x", b"")), "application/vnd.oci.image.layer.v1.tar+encrypted"))
        hostile("bad", (b"no tar at all", LAYER))
        hostile("NAME=value", config={"Env": ["novalue"]})
        o = Layout(self.dir + "/o")
        m = o.image([self.rootfs()])
        o.index(m)
        blob = max(os.listdir(o.path + "/blobs/sha256"), key=lambda n: os.path.getsize(o.path + "/blobs/sha256/" + n))
        with open(o.path + "/blobs/sha256/" + blob, "ab") as f:
            f.write(b"\0" * 512)
        self.refused("not what its digest says", "image", "import", "bad", o.path)
        os.unlink(o.path + "/blobs/sha256/" + blob)
        self.refused("No such file", "image", "import", "bad", o.path)
        for text, why in ((b"{", "index.json, line 1"), (b"{}", "0 images"), (b'{"manifests": [{"digest": 5}]}', "no SHA-256"),
                          (b'{"manifests": [{"digest": "sha256:../../etc/passwd"}]}', "no SHA-256")):
            o.write("index.json", text)
            self.refused(why, "image", "import", "bad", o.path)
        for text, why in ((b"[]", "0 images"), (b'[{"Config": "../x", "Layers": ["a"]}]', "no name of a layer"),
                          (b'[{"Config": "c.json", "Layers": []}]', "0 layers"),
                          (b'[{"Config": "c.json", "Layers": ["nothing"]}]', "has no c.json")):
            with open(self.dir + "/docker.tar", "wb") as f:
                f.write(layer(("manifest.json", text)))
            self.refused(why, "image", "import", "bad", self.dir + "/docker.tar")

    def context(self, text, **files):
        c = tempfile.mkdtemp(dir=self.dir)
        for name, content in {"Dockerfile": text, **files}.items():
            path = c + "/" + name.replace("__", "/")
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "w") as f:
                f.write(content)
        return c

    def test_builds_from_a_dockerfile(self):
        c = self.context("# comment\nFROM bb AS only\nWORKDIR /app\nENV A=\"1 2\" B=3\nENV C the rest\n"
                         "COPY one sub ./\nCOPY [\"one\", \"/x/renamed\"]\nRUN cat one \\\n# between\n  && echo \"$A$B$C\" > made\n"
                         "RUN [\"/bin/sh\", \"-c\", \"echo $0 > zero\", \"it's\"]\nUSER 1000\nRUN echo mine > /tmp/mine\n",
                         one="1\n", sub__deep__two="2\n")
        self.d.run("image", "build", "built", c)
        self.assertEqual(self.see("built", "cd /app; cat one deep/two /x/renamed made zero; stat -c %u /tmp/mine made"),
                         "1\n2\n1\n1 23the rest\nit's\n1000\n0\n")
        first = self.d.json("image", "ls")
        self.d.run("image", "build", "built", c)
        self.assertEqual(self.d.json("image", "ls"), first, "the same again is not built again")
        self.assertEqual(self.d.out("image", "build", "other", c).split()[1],
                         next(i["digest"] for i in first if i["name"] == "built"))
        with open(c + "/one", "w") as f:
            f.write("changed\n")
        self.d.run("image", "build", "built", c)
        self.assertEqual(self.see("built", "cat /app/one"), "changed\n")

    def test_a_build_that_fails_says_where_and_leaves_nothing(self):
        def failing(why, text, **files):
            self.refused(why, "image", "build", "bad", self.context(text, **files))
            self.assertEqual(self.d.json("ls", "--all"), [])

        failing("Dockerfile:3: RUN echo oops; false: exit status 1, output: oops", "FROM bb\n\nRUN echo oops; false\n")
        failing("no image nowhere-1.0", "FROM nowhere:1.0\n")
        failing("processes running", "FROM bb\nRUN (sleep 60 &)\n")
        failing("Dockerfile:2: ", "FROM bb\nCOPY absent /x\n")
        for line, why in (("ADD a b", "ADD is not supported"), ("COPY --from=x a b", "flags are not supported"),
                          ("RUN --mount=type=cache x", "flags"), ("RUN cat <<EOF", "here-documents"),
                          ("COPY ../x /y", "outside the directory"), ("COPY *.c /y", "patterns"), ("ENV A=$B", "variables"),
                          ("FROM bb", "only one stage"), ("COPY x", "sources and a destination"), ("USER", "nothing follows"),
                          ("ENV =x", "NAME=value"), ("ENV A=\"x", "quote is not closed"), ("WORKDIR rel", "absolute"),
                          ("HEALTHCHECK NONE", "HEALTHCHECK is not supported"), ("nonsense", "nonsense is not supported")):
            failing("Dockerfile:4: ", "FROM bb\n# here\n\n%s\n" % line)
            failing(why, "FROM bb\n# here\n\n%s\n" % line)
        failing("the first instruction must be FROM", "RUN true\n")
        failing("FROM is missing", "\n")
        c = self.context("FROM bb\nCOPY d /d\n", d__f="x")
        os.symlink("/etc/passwd", c + "/d/l")
        self.refused("symbolic link", "image", "build", "bad", c)

    def test_a_build_is_confined(self):
        r = self.d.run("image", "build", "x", "--from", "bb", "test ! -e /sys/class/net/eth0 && ls /proc | head -1")
        self.assertEqual(r.returncode, 0)
        self.refused("exit status", "image", "build", "y", "--from", "bb", "mkdir /proc/sys/x")


if __name__ == "__main__":
    lab.main()
