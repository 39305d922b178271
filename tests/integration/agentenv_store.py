#!/usr/bin/python3
"""agentenv_store.py AGENTENVD AGENTENV PROTO_DIR: a store with a limit refuses what would go beyond it, after it has
tried to make room, and nothing of what was refused is left."""
import re
import sqlite3

import agentenv_lab as lab


class Limited(lab.DaemonTest):
    @classmethod
    def setUpClass(cls):
        lab.Daemon.args = ("--store-limit", "20M")
        super().setUpClass()

    def write(self, box, name):
        self.d.sh(box, "dd if=/dev/urandom of=/work/%s bs=1M count=12 2> /dev/null" % name)

    def snapshot(self, box, *args, check=True):
        return self.d.run("snapshot", box, *args, check=check)

    def metric(self, name):
        return int(re.search("^%s ([0-9]+)$" % name, self.d.out("metrics"), re.M)[1])

    def test_a_full_store_refuses_and_says_what_to_do(self):
        self.assertEqual(self.metric("agentenv_store_limit_bytes"), 20 << 20)
        box = self.d.out("start", "bb")
        self.write(box, "a")
        first = self.snapshot(box, "--retain", "t").stdout.strip()
        self.assertGreaterEqual(self.metric("agentenv_store_bytes"), 12 << 20)
        self.write(box, "b")
        second = self.snapshot(box, "--retain", "t").stdout.strip()
        refused = self.snapshot(box, "--retain", "t", check=False)
        self.assertEqual(refused.returncode, 1)
        self.assertIn("its limit is 20: release snapshots", refused.stderr)
        self.assertEqual(self.d.audit(), [])
        self.assertEqual({s["id"] for s in self.d.json("snapshot", "ls")}, {first, second})
        self.d.sh(box, "test -s /work/b && touch /work/c")
        path = self.d.dir + "/out.tar.zst"
        self.d.run("snapshot", "export", first, path)
        refused = self.d.run("snapshot", "import", path, check=False)
        self.assertIn("its limit is 20", refused.stderr)
        for s in (first, second):
            self.d.run("snapshot", "release", s, "t")
        self.d.run("rm", box)
        self.d.run("gc", "--grace", "0")
        box = self.d.out("start", "bb")
        self.snapshot(box)

    def test_room_is_made_first(self):
        box = self.d.out("start", "bb")
        for name in "ab":
            self.write(box, name)
            self.snapshot(box)
        self.d.run("rm", box)
        box = self.d.out("start", "bb")
        self.assertIn("its limit is 20", self.snapshot(box, check=False).stderr, "young ones may yet be retained")
        with sqlite3.connect(self.d.state + "/registry.db", timeout=30) as db:
            db.execute("UPDATE snapshots SET unowned_ms=0")
        self.snapshot(box)
        self.assertEqual(len(self.d.json("snapshot", "ls")), 1)


if __name__ == "__main__":
    lab.main()
