#!/usr/bin/python3
"""agentenv_processes.py AGENTENVD AGENTENV PROTO_DIR: what runs in a snapshot leaves its store and comes back; what was
changed on the way, comes from elsewhere or was put away on another machine is refused by name and leaves nothing."""
import hashlib
import hmac
import json
import os
import re
import shutil
import tempfile

import agentenv_lab as lab
from agentenv_hibernate import HibernateTest
from agentenv_outside import packed, unpacked


def sealed(members, text):
    """The members with another manifest, and its digest."""
    data = text.encode()
    seal = hashlib.blake2b(data, digest_size=32).hexdigest().encode()
    members[0][0].size = len(data)
    return [(members[0][0], data), (members[1][0], seal)] + members[2:]


def signed(text, key):
    """The manifest's text with the code that its key gives it, as processes.h says."""
    bare = re.sub(r',\n *"mac": "[0-9a-f]*"', "", text)
    code = hmac.new(key, bare.encode(), hashlib.sha512).digest()[:32].hex()
    return re.sub(r'"mac": "[0-9a-f]*"', '"mac": "%s"' % code, text)


class Processes(HibernateTest):
    def setUp(self):
        self.dir = tempfile.mkdtemp(prefix="processes-", dir=self.d.dir)
        self.addCleanup(shutil.rmtree, self.dir)
        self.key = self.d.state + "/process.key"

    def exported(self, where):
        """A snapshot that shares pages with another goes out, and both are forgotten."""
        box = self.start()
        snaps = [self.d.out("snapshot", box, "--engine", "criu", "--retain", "t")]
        self.assertEqual(self.ask(box), 1)
        self.d.sh(box, "echo here > /work/f")
        snaps.append(self.d.out("snapshot", box, "--engine", "criu", "--retain", "t"))
        self.d.run("rm", box)
        self.d.run("gc")
        self.assertTrue(os.path.isdir("%s/checkpoints/%s/parent" % (self.d.state, snaps[1])))
        digest = self.d.json("snapshot", "export", snaps[1], where)[0]["digest"]
        for s in snaps:
            self.d.run("snapshot", "release", s, "t")
        self.d.run("gc", "--grace", "0")
        return digest

    def goes_on(self, *where):
        snap = self.d.out("snapshot", "import", *where, "--retain", "t")
        self.assertEqual(self.d.audit(), [])
        for _ in range(2):
            box = self.d.out("resume", snap)
            self.assertEqual(self.ask(box), 2)
            self.assertEqual(self.d.sh(box, "cat /work/f").stdout, "here\n")
            self.d.run("rm", box)
        self.d.run("snapshot", "release", snap, "t")
        self.d.run("gc", "--grace", "0")

    def refused(self, why, *args):
        r = self.d.run("snapshot", "import", *args, check=False)
        self.assertEqual(r.returncode, 1, r.stdout + r.stderr)
        self.assertIn(why, r.stderr)
        self.left_nothing()

    def left_nothing(self):
        self.assertEqual(os.listdir(self.d.state + "/checkpoints"), [])
        self.assertEqual(os.listdir(self.d.state + "/layers"), [])
        self.assertEqual(self.d.json("snapshot", "ls"), [])

    def test_a_file_and_a_directory_bring_back_what_ran(self):
        path, store = self.dir + "/x.tar.zst", "file://" + self.dir + "/store"
        self.exported(path)
        self.assertEqual(os.stat(self.key).st_mode & 0o777, 0o600)
        self.goes_on(path)
        digest = self.exported(store)
        self.goes_on(store, digest)
        name = os.listdir(self.dir + "/store/processes")[0]
        with open(self.dir + "/store/processes/" + name, "r+b") as f:
            f.seek(100)
            f.write(b"\0\0\0\0")
        self.refused("import from", store, digest)

    def test_a_byte_changed_anywhere_is_refused(self):
        path, bad = self.dir + "/x.tar.zst", self.dir + "/bad.tar.zst"
        self.exported(path)
        members = unpacked(path)
        images = [m.name for m, _ in members if m.name.startswith("processes/")]
        self.assertIn("processes/parent/pages-1.img", [re.sub(r"pages-\d+", "pages-1", n) for n in images])
        for i, (m, data) in enumerate(members):
            if not data:
                continue
            at = len(data) // 2
            changed = data[:at] + bytes([data[at] ^ 1]) + data[at + 1:]
            packed(members[:i] + [(m, changed)] + members[i + 1:], bad)
            r = self.d.run("snapshot", "import", bad, check=False)
            self.assertEqual(r.returncode, 1, m.name)
            self.assertIn("process image %s holds something else" % m.name[len("processes/"):]
                          if m.name in images else "import from", r.stderr)
        self.left_nothing()
        last = max(i for i, (m, _) in enumerate(members) if m.name in images)
        packed(members[:last] + members[last + 1:], bad)
        self.refused("process image %s is missing" % members[last][0].name[len("processes/"):], bad)
        packed(members + [members[last]], bad)
        self.refused("or comes twice", bad)
        m, data = members[last]
        m.name = "processes/../../../x"
        packed(members[:last] + [(m, data)] + members[last + 1:], bad)
        self.refused("is no process image", bad)
        self.goes_on(path)

    def test_a_manifest_without_our_code_is_refused(self):
        path, bad = self.dir + "/x.tar.zst", self.dir + "/bad.tar.zst"
        self.exported(path)
        members = unpacked(path)
        text = members[0][1].decode()
        for change in ((b'"pids": 128', b'"pids": 129'), (b'"mac": "', b'"mac": "0'), (b"parent/pages", b"parent/pagez")):
            self.assertIn(change[0].decode(), text)
            packed(sealed(members, text.replace(change[0].decode(), change[1].decode(), 1)), bad)
            self.refused("are not believed", bad)
        packed(sealed(members, text.replace('"name": "parent/', '"name": "../', 1)), bad)
        self.refused("is no process image", bad)
        with open(self.key) as f:
            key = f.read()
        os.remove(self.key)
        self.refused("are not believed", path)
        with open(os.open(self.key, os.O_WRONLY | os.O_CREAT, 0o600), "w") as f:
            f.write("0" * 64 + "\n")
        self.refused("copy %s from where it was exported" % self.key, path)
        snap = self.d.out("snapshot", "import", path, "--files-only", "--retain", "t")
        box = self.d.out("start", snap)
        self.assertEqual(self.d.sh(box, "cat /work/f").stdout, "here\n")
        self.d.run("rm", box)
        self.d.run("snapshot", "release", snap, "t")
        self.d.run("gc", "--grace", "0")
        with open(self.key, "w") as f:
            f.write(key)
        os.chmod(self.key, 0o644)
        self.refused("chmod 600", path)
        os.chmod(self.key, 0o600)
        self.goes_on(path)

    def test_another_machine_is_told_what_differs(self):
        path, bad = self.dir + "/x.tar.zst", self.dir + "/bad.tar.zst"
        self.exported(path)
        members = unpacked(path)
        text = members[0][1].decode()
        with open(self.key) as f:
            key = bytes.fromhex(f.read().strip())
        self.assertEqual(signed(text, key), text, "the code is what the header says it is")
        manifest = json.loads(text)["processes"]
        packed(sealed(members, signed(text.replace(manifest["kernel"], "5.10.0-1-amd64"), key)), bad)
        self.refused("its processes ran on kernel 5.10.0-1-amd64", bad)
        packed(sealed(members, signed(text.replace(manifest["cpu"], manifest["cpu"] + " avx9000"), key)), bad)
        self.refused("a processor with avx9000, which this one lacks", bad)


if __name__ == "__main__":
    lab.main()
