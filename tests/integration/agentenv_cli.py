#!/usr/bin/python3
"""agentenv_cli.py AGENTENVD AGENTENV PROTO_DIR: the command from end to end, as a script would use it."""
import json
import os
import socket
import subprocess
import threading
import time
import unittest

import agentenv_lab as lab


class Verbs(lab.DaemonTest):
    def test_exec_streams_and_passes_the_status_on(self):
        box = self.d.out("start", "bb")
        r = self.d.sh(box, "echo out; echo err >&2; exit 7", check=False)
        self.assertEqual((r.returncode, r.stdout, r.stderr), (7, "out\n", "err\n"))
        self.assertEqual(self.d.sh(box, "kill -9 $$", check=False).returncode, 137)
        r = self.d.run("exec", box, "nothing-here", check=False)
        self.assertEqual(r.returncode, 125)
        self.assertIn("nothing-here", r.stderr)
        r = self.d.run("exec", "-i", "-C", "/tmp", "-e", "A=b c", box, "sh", "-c", "pwd; echo $A; cat",
                       input="given\n")
        self.assertEqual(r.stdout, "/tmp\nb c\ngiven\n")
        self.assertEqual(self.d.run("exec", "-u", "user", box, "sh", "-c", "echo $USER").stdout, "user\n")
        # options behind the command are the command's
        self.assertEqual(self.d.out("exec", box, "echo", "-t", "--help"), "-t --help")

    def test_timeout_kills_the_tree_and_keeps_output(self):
        box = self.d.out("start", "bb")
        started = time.monotonic()
        r = self.d.run("exec", "-t", "500ms", box, "sh", "-c", "echo before; sleep 77 & sleep 77",
                       check=False)
        self.assertEqual((r.returncode, r.stdout), (124, "before\n"))
        self.assertLess(time.monotonic() - started, 5)
        self.assertEqual(self.d.json("ls")[0]["processes"], 1, "only init is left")

    def test_copies_keep_modes_links_and_bytes(self):
        box = self.d.out("start", "bb")
        src = os.path.join(self.d.dir, "src")
        subprocess.run(["rm", "-rf", src, src + "-back"], check=True)
        os.makedirs(src + "/deep/er")
        with open(src + "/deep/er/blob", "wb") as f:
            f.write(os.urandom(3 << 20))
        os.chmod(src + "/deep/er/blob", 0o741)
        os.symlink("er/blob", src + "/deep/link")
        os.link(src + "/deep/er/blob", src + "/deep/second-name")
        os.symlink("/etc/passwd", src + "/away")
        open(os.fsencode(src) + b"/\xff-not-utf8", "w").close()
        self.d.run("cp", src, box + ":/work/copy")
        self.assertEqual(self.d.sh(box, "stat -c '%a %u' /work/copy/deep/er/blob").stdout, "741 0\n")
        self.assertEqual(self.d.sh(box, "readlink /work/copy/away").stdout, "/etc/passwd\n")
        self.d.run("cp", box + ":/work/copy", src + "-back")
        subprocess.run(["diff", "-r", "--no-dereference", src, src + "-back"], check=True)
        self.assertEqual(os.stat(src + "-back/deep/er/blob").st_mode & 0o7777, 0o741)
        # into a directory that exists; a file under another name
        self.d.run("cp", src, box + ":/work")
        self.d.run("cp", src + "/deep/er/blob", box + ":/work/renamed")
        names = [f["name"] for f in self.d.json("ls", box + ":/work")]
        self.assertEqual(names, ["copy", "renamed", "src"])
        self.assertIn("\\xFF-not-utf8", [f["name"] for f in self.d.json("ls", box + ":/work/src")])
        subprocess.run(["rm", "-rf", src, src + "-back"], check=True)

    def test_copy_refuses_what_leaves_or_acts(self):
        box = self.d.out("start", "bb")
        self.d.sh(box, "ln -s / /work/up; ln -s /proc/self/root/etc /work/magic; mkfifo /work/fifo")
        for path in ("/work/fifo", "/dev/null", "/proc/version", "/work/none"):
            r = self.d.run("cp", box + ":" + path, self.d.dir + "/got", check=False)
            self.assertEqual(r.returncode, 1, path)
            self.assertFalse(os.path.exists(self.d.dir + "/got"))
        with open(self.d.dir + "/evil", "w") as f:
            f.write("evil")
        # "/" of the sandbox is as far up as any link leads
        self.d.run("cp", self.d.dir + "/evil", box + ":/work/up/../../../../etc/evil")
        self.assertFalse(os.path.exists("/etc/evil"))
        self.assertEqual(self.d.sh(box, "cat /etc/evil").stdout, "evil")
        r = self.d.run("cp", self.d.dir + "/evil", box + ":/proc/sys/kernel/core_pattern", check=False)
        self.assertEqual(r.returncode, 1)
        r = self.d.run("cp", self.d.dir + "/evil", box + ":/work/magic/evil", check=False)
        self.assertEqual(r.returncode, 1)
        self.assertFalse(os.path.exists("/etc/evil"))

    def test_freeze_and_thaw(self):
        box = self.d.out("start", "bb")
        self.d.sh(box, "(i=0; while :; do i=$((i+1)); echo $i > /work/next; mv /work/next /work/tick; "
                       "sleep 0.02; done) > /dev/null 2>&1 &")
        time.sleep(0.2)
        self.d.run("freeze", box)
        tick = self.read(box, "/work/tick")
        time.sleep(0.3)
        self.assertEqual(self.read(box, "/work/tick"), tick)
        r = self.d.run("exec", box, "true", check=False)
        self.assertEqual(r.returncode, 125)
        self.assertIn("FROZEN", r.stderr)
        self.d.run("freeze", box)
        self.d.run("thaw", box)
        time.sleep(0.3)
        self.assertNotEqual(self.read(box, "/work/tick"), tick)

    def read(self, box, path):
        out = os.path.join(self.d.dir, "read")
        self.d.run("cp", box + ":" + path, out)
        with open(out) as f:
            text = f.read()
        os.unlink(out)
        return text

    def test_snapshot_resume_fork(self):
        box = self.d.out("start", "bb", "--name", "parent")
        self.d.sh(box, "echo 1 > /work/one; rm /bin/yes; mkdir /work/d; echo x > /work/d/x")
        first = self.d.out("snapshot", "parent", "--retain", "test")
        self.d.sh(box, "echo 2 > /work/two; rm -r /work/d; mkdir /work/d")
        second = self.d.out("snapshot", "parent", "--retain", "test", "--key", "k2")
        self.assertEqual(self.d.out("snapshot", "parent", "--key", "k2"), second)
        a, b = self.d.out("resume", first), self.d.out("start", second)
        self.assertEqual(self.d.sh(a, "ls /work /work/d").stdout.split(),
                         ["/work:", "d", "one", "/work/d:", "x"])
        self.assertEqual(self.d.sh(b, "ls /work /work/d").stdout.split(),
                         ["/work:", "d", "one", "two", "/work/d:"])
        self.assertEqual(self.d.sh(b, "test -e /bin/yes", check=False).returncode, 1)
        self.d.sh(b, "echo 3 > /work/three")
        third = self.d.out("resume", self.d.out("snapshot", b))
        self.assertEqual(self.d.sh(third, "cat /work/one /work/two /work/three").stdout, "1\n2\n3\n")
        children = self.d.out("fork", "parent", "3").split()
        self.assertEqual(len(children), 3)
        for i, c in enumerate(children):
            self.d.sh(c, "echo %d > /work/mine" % i)
        for i, c in enumerate(children):
            self.assertEqual(self.d.sh(c, "cat /work/mine").stdout, "%d\n" % i)
        self.assertEqual(self.d.sh(box, "ls /work").stdout.split(), ["d", "one", "two"])
        self.d.run("rm", "--all")
        c = self.d.out("resume", second)
        self.assertEqual(self.d.sh(c, "cat /work/two").stdout, "2\n", "it outlives its sandbox")
        self.d.run("snapshot", "release", first, "test")
        self.d.run("snapshot", "release", second, "test")
        self.d.run("rm", c)
        done = self.d.json("gc", "--grace", "0.001")[0]
        self.assertEqual(done["snapshots"], 3)

    def test_a_busy_sandbox_is_snapshot_too(self):
        box = self.d.out("start", "bb")
        self.d.sh(box, "echo base > /work/f; (exec 9>/work/log; while :; do echo x >&9; sleep 0.01; done) "
                       ">/dev/null 2>&1 &")
        snap = self.d.out("snapshot", box)
        copy = self.d.out("resume", snap)
        self.assertEqual(self.d.sh(copy, "cat /work/f").stdout, "base\n")
        size = int(self.d.sh(box, "wc -c < /work/log").stdout)
        time.sleep(0.2)
        self.assertGreater(int(self.d.sh(box, "wc -c < /work/log").stdout), size, "the parent goes on")

    def test_many_snapshots_make_a_long_chain_that_is_merged(self):
        box = self.d.out("start", "bb")
        turns = 70
        self.d.sh(box, "mkdir /work/tree /work/tree/old; echo x > /work/tree/old/x; rm /bin/yes")
        for i in range(turns):
            self.d.sh(box, "cd /work; echo %d > f%d; echo %d > last; rm -f f%d; echo %d >> grows; "
                           "rm -r tree; mkdir tree; echo %d > tree/t%d; ln -sf f%d link; "
                           "chmod 7%d%d tree" % (i, i, i, i - 5, i, i, i, i, i % 8, i % 8))
            snap = self.d.out("snapshot", box)
            if i == 40:
                middle = snap
        chains = [len(s["layers"]) for s in self.d.json("snapshot", "ls")]
        self.assertLessEqual(max(chains), 33)
        self.assertLess(chains[-1], turns // 2)
        state = ("cd /work; ls; cat last; wc -l < grows; ls tree; readlink link; stat -c %a tree; "
                 "test -e /bin/yes; echo $?; cat f*")
        expected = self.d.sh(box, state).stdout
        self.assertIn("t%d" % (turns - 1), expected)
        self.assertNotIn("t%d\n" % (turns - 2), expected)
        self.assertEqual(self.d.sh(self.d.out("resume", snap), state).stdout, expected)
        old = self.d.sh(self.d.out("resume", middle), "cd /work; ls tree f*; cat last").stdout.split()
        self.assertEqual(old, ["f36", "f37", "f38", "f39", "f40", "tree:", "t40", "40"])
        self.d.kill()
        self.d.start()
        self.assertEqual(self.d.sh(box, state).stdout, expected)
        self.assertEqual(self.d.sh(self.d.out("resume", self.d.out("snapshot", box)), state).stdout,
                         expected)

    def test_ls_rm_names(self):
        box = self.d.out("start", "bb", "--name", "n1", "--owner", "job/1", "-m", "64M", "--cpu", "0.5",
                         "--pids", "20")
        r = self.d.run("start", "bb", "--name", "n1", check=False)
        self.assertEqual(r.returncode, 1)
        self.assertIn("n1", r.stderr)
        self.d.run("start", "bb", "--owner", "job/2")
        self.assertEqual([s["name"] for s in self.d.json("ls", "--owner", "job/1")], ["n1"])
        listed = self.d.run("ls", "-o", "table").stdout.splitlines()
        self.assertTrue(listed[0].startswith("ID"))
        self.assertEqual(len(listed), 3)
        self.assertEqual(len(json.loads(self.d.run("ls").stdout)), 2, "JSON in a pipe")
        self.assertEqual(self.d.json("rm", "--owner", "job/2")[0]["removed"], 1)
        self.d.run("rm", "n1")
        r = self.d.run("rm", box, check=False)
        self.assertEqual(r.returncode, 1)
        self.d.run("start", "bb", "--name", "n1")

    def test_exit_codes_of_bad_use(self):
        for args in ("nonsense", "start", "start bb --memory lots", "start bb --memory -1", "start bb --network all",
                     "start bb --cpu 0", "start bb --pids many", "start bb --ttl soon", "start bb --idle-freeze 1y",
                     "start bb -p 80:90:100", "exec only-id", "exec x -t never true", "exec x -k much true",
                     "ls -o xml", "ls x", "stat", "stat x", "watch x", "rm", "cp a b", "cp a:/b c:/d", "cp a:/b",
                     "fork x 0", "fork x many", "fork x 65", "kill x y -s NO", "gc --grace x", "top -n 0", "top -d x",
                     "policy", "policy x --ttl 0", "policy x --idle-hibernate x", "token create t -s all",
                     "token create t --max 0", "token create t --ttl x", "task register f -p 0", "resume"):
            r = self.d.run(*args.split(), check=False)
            self.assertEqual(r.returncode, 2, (args, r.stderr))
            self.assertTrue(r.stderr, args)
        for args in ("start no-such-image", "snapshot nobody", "resume x", "policy nobody", "stat nobody:/x"):
            r = self.d.run(*args.split(), check=False)
            self.assertEqual(r.returncode, 1, (args, r.stderr))
            self.assertTrue(r.stderr, args)
        r = subprocess.run([lab.AGENTENV, "--socket", "/nowhere", "ls"], capture_output=True)
        self.assertEqual(r.returncode, 75)
        env = {k: v for k, v in os.environ.items() if k != "AGENTENV_SOCKET"}
        r = subprocess.run([lab.AGENTENV, "ls"], capture_output=True, env=env)
        self.assertEqual(r.returncode, 1)

    def test_help_fits_a_terminal(self):
        lines = self.d.out("--help").splitlines()
        verbs = lines[lines.index("Verbs (agentenv VERB --help says more):") + 1:]
        self.assertGreater(len(verbs), 40)
        for line in verbs:
            self.assertLess(len(line), 80, line)
            self.assertRegex(line, "^  [a-z]", "a line is a verb, and none is broken")

    def test_a_state_directory_that_cannot_be(self):
        r = subprocess.run([lab.AGENTENVD, "--state", "/proc/nowhere/state", "--socket", self.d.socket + ".x"],
                           capture_output=True, text=True, timeout=30)
        self.assertEqual(r.returncode, 1)
        self.assertIn("--state: mkdir /proc/nowhere", r.stderr)

    def test_stat(self):
        box = self.d.out("start", "bb")
        self.d.sh(box, "echo hello > /work/f; chmod 4711 /work/f; ln /work/f /work/g; ln -s f /work/l; "
                       "truncate -s 1M /work/holes || dd if=/dev/zero of=/work/holes bs=1 count=0 seek=1M")
        f, = self.d.json("stat", box + ":/work/f")
        self.assertEqual((f["mode"], f["size"], f["links"], f["uid"]), ("-rws--x--x", 6, 2, 0))
        link, = self.d.json("stat", box + ":/work/l")
        self.assertEqual((link["mode"][0], link["target"]), ("l", "f"))
        self.assertEqual(self.d.json("stat", "--follow", box + ":/work/l")[0]["size"], 6)
        holes, = self.d.json("stat", box + ":/work/holes")
        self.assertEqual((holes["size"], holes["allocated_bytes"]), (1 << 20, 0))
        r = self.d.run("stat", box + ":/work/none", check=False)
        self.assertEqual(r.returncode, 1)
        self.assertIn("/work/none", r.stderr)

    def test_watch_of_files(self):
        box = self.d.out("start", "bb")
        self.d.sh(box, "mkdir /work/d")
        watch = subprocess.Popen([lab.AGENTENV, "--socket", self.d.socket, "watch", "-r", box + ":/work"],
                                 stdout=subprocess.PIPE, text=True)
        self.addCleanup(watch.stdout.close)
        self.addCleanup(watch.wait)
        self.addCleanup(watch.kill)
        self.assertEqual(json.loads(watch.stdout.readline())["change"], "RESCAN")
        self.d.sh(box, "echo x > /work/d/f; rm /work/d/f")
        seen = [json.loads(watch.stdout.readline()) for _ in range(3)]
        self.assertEqual([(e["change"], e["path"], e["directory"]) for e in seen],
                         [("CREATED", "d/f", False), ("WRITTEN", "d/f", False), ("DELETED", "d/f", False)])

    def test_policy(self):
        box = self.d.out("start", "bb", "--ttl", "1h", "--idle-freeze", "1000")

        def shown():
            return self.d.json("policy", box)[0]
        now = shown()
        self.assertEqual((now["at_ttl"], now["idle_freeze_ms"], now["idle_hibernate_ms"], now["pinned"]),
                         ("remove", 1000000, 0, False))
        self.assertTrue(3500000 < now["ttl_left_ms"] <= 3600000, now)
        self.d.run("policy", box, "--idle-freeze", "0", "--ttl-hibernate", "--pin")
        now = shown()
        self.assertEqual((now["at_ttl"], now["idle_freeze_ms"], now["pinned"]), ("hibernate", 0, True))
        self.assertLess(now["ttl_left_ms"], 3600000, "what is not named stays")
        self.d.run("policy", box, "--unpin", "--ttl", "2h")
        self.d.kill()
        self.d.start()
        now = shown()
        self.assertEqual((now["at_ttl"], now["pinned"]), ("hibernate", False))
        self.assertGreater(now["ttl_left_ms"], 3600000)
        other = self.d.out("start", "bb")
        self.d.run("policy", other, "--ttl", "100ms")
        self.until(lambda: other not in [s["id"] for s in self.d.json("ls", "-a")])

    def until(self, there, seconds=30):
        deadline = time.monotonic() + seconds
        while not there():
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.05)

    def test_sockets_of_nobody(self):
        path = self.d.socket + ".dead"
        with socket.socket(socket.AF_UNIX) as s:
            s.bind(path)  # what a killed daemon leaves behind
        for where, status in ((path, 75), ("/etc/passwd", 1)):
            r = subprocess.run([lab.AGENTENV, "--socket", where, "ls"], capture_output=True, text=True, timeout=30)
            self.assertEqual(r.returncode, status, r.stderr)
        os.unlink(path)

    def test_group_of_verbs(self):
        r = self.d.run("token", check=False)
        self.assertEqual((r.returncode, r.stderr), (2, "agentenv: which one? token create, token ls, token rm\n"))

    def test_gc_without_grace(self):
        box = self.d.out("start", "bb")
        self.d.run("snapshot", box)
        self.assertEqual(self.d.json("gc", "--grace", "0")[0]["snapshots"], 1)
        self.d.run("rm", box)

    def test_ttl(self):
        box = self.d.out("start", "bb", "--ttl", "600ms")
        self.assertEqual([s["id"] for s in self.d.json("ls")], [box])
        deadline = time.monotonic() + 5
        while self.d.json("ls", "-a") and time.monotonic() < deadline:
            time.sleep(0.1)
        self.assertEqual(self.d.json("ls", "-a"), [])

    def test_death_is_noticed_and_says_why(self):
        seen = []
        watch = subprocess.Popen([lab.AGENTENV, "--socket", self.d.socket, "watch"],
                                 stdout=subprocess.PIPE, text=True)
        reader = threading.Thread(target=lambda: seen.extend(json.loads(l) for l in watch.stdout))
        reader.start()
        time.sleep(0.5)
        box = self.d.out("start", "bb")
        os.kill(self.d.json("ls")[0]["init_pid"], 9)
        deadline = time.monotonic() + 5
        while not any(e["to"] == "DEAD" for e in seen) and time.monotonic() < deadline:
            time.sleep(0.02)
        dead = self.d.json("ls", "-a")[0]
        self.assertEqual((dead["state"], dead["cause"]), ("DEAD", "KILLED"))
        r = self.d.run("exec", box, "true", check=False)
        self.assertIn("DEAD", r.stderr)
        self.d.run("rm", box)
        time.sleep(0.3)
        watch.kill()
        watch.wait()
        reader.join()
        watch.stdout.close()
        self.assertEqual([(e["from"], e["to"]) for e in seen if e["sandbox"] == box],
                         [("CREATING", "RUNNING"), ("RUNNING", "DEAD"), ("DEAD", "DELETED")])

    def test_memory_bomb_stays_inside(self):
        box, other = self.d.out("start", "bb", "-m", "32M"), self.d.out("start", "bb")
        r = self.d.sh(box, "head -c 200m /dev/zero | tail -c 150m > /dev/null", check=False)
        self.assertNotEqual(r.returncode, 0)
        self.assertEqual(self.d.sh(other, "echo fine").stdout, "fine\n")
        self.assertEqual(self.d.sh(box, "echo lives").stdout, "lives\n")

    def test_full_disk_of_a_sandbox(self):
        box = self.d.out("start", "bb")
        r = self.d.sh(box, "dd if=/dev/zero of=/work/big bs=1M count=2000", check=False)
        self.assertNotEqual(r.returncode, 0)
        self.assertEqual(self.d.sh(box, "rm /work/big; echo fine").stdout, "fine\n")


class Many(lab.DaemonTest):
    def test_created_used_removed_leave_nothing(self):
        rounds = 1000 if lab.SOAK else 100
        before = self.counts()
        for i in range(0, rounds, 4):
            boxes = [self.d.out("start", "bb") for _ in range(4)]
            for b in boxes:
                self.d.sh(b, "echo x > /work/x")
            self.d.run("rm", *boxes)
        after = self.counts()
        for what, n in after.items():
            self.assertLessEqual(n, before[what] + 2, what)

    def counts(self):
        pid = self.d.process.pid
        with open("/proc/%d/mountinfo" % pid) as f:
            mounts = len(f.readlines())
        return {"descriptors of the daemon": len(os.listdir("/proc/%d/fd" % pid)),
                "cgroups": len(self.d.cgroups()),
                "boxes": len(os.listdir(self.d.state + "/boxes")),
                "layers": len(os.listdir(self.d.state + "/layers")),
                "mounts of the daemon": mounts,
                "children": len(subprocess.run(["pgrep", "-P", str(pid)],
                                               capture_output=True).stdout.split())}


if __name__ == "__main__":
    lab.main()
