#!/usr/bin/python3
"""agentenv_rootless.py AGENTENVD AGENTENV PROTO_DIR INIT PROBE QUICKSTART_IMAGE TASK: agentenvd of an ordinary user, who is
made for the test: with a range of user ids, with none, and in a cgroup that was delegated.  Root is needed to make the
user; facility `rootless`."""
import glob
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.request

INIT, PROBE, QUICKSTART_IMAGE, TASK = sys.argv[4:8]

import agentenv_lab as lab

lab.APPLETS += ["httpd", "id", "ps", "setsid", "tar", "chown"]
WAIT_S = 60


def must_work():
    named = os.environ.get("LONGHAUL_MUST_WORK", "").split(",")
    return "rootless" in named or "1" in named


def skip(why):
    if must_work():
        sys.exit("rootless mode must work here: " + why)
    print("SKIPPED, rootless is missing:", why)
    sys.exit(77)


def until(done, what):
    deadline = time.monotonic() + WAIT_S
    while not done():
        if time.monotonic() > deadline:
            raise AssertionError("in %d s: %s" % (WAIT_S, what))
        time.sleep(0.05)


def lines_of(path):
    with open(path) as f:
        return f.readlines()


def unused_uid():
    taken = {int(line.split(":")[2]) for line in lines_of("/etc/passwd")}
    return next(u for u in range(20000 + os.getpid() % 20000, 60000) if u not in taken)


def v2_mount():
    for line in lines_of("/proc/self/mounts"):
        words = line.split()
        if words[2] == "cgroup2":
            return words[1]
    return None


class User:
    """An ordinary user with a home, and copies of the programs that such a user can reach."""

    def __init__(self, many_ids):
        self.uid = unused_uid()
        self.dir = tempfile.mkdtemp(prefix="rootless-test-")
        self.name = "rootless%d" % self.uid
        os.chmod(self.dir, 0o755)
        self.home, self.bin = self.dir + "/home", self.dir + "/bin"
        for d in self.home, self.home + "/run", self.bin:
            os.makedirs(d)
        for program in lab.AGENTENVD, lab.AGENTENV, INIT:
            shutil.copy(program, self.bin)
        shutil.copytree(lab.PROTO, self.dir + "/share/longhaul/proto")
        self.known = many_ids
        if many_ids:
            # Away from the ids of root's sandboxes, which other tests run.
            ranges = [x for kind in ("UID", "GID") for x in ("-K", "SUB_%s_MIN=10000000" % kind, "-K",
                                                             "SUB_%s_MAX=600000000" % kind)]
            subprocess.run(["useradd", "-M", "-u", str(self.uid), "-d", self.home, *ranges, self.name], check=True)
        self.give(self.home)
        self.env = {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "HOME": self.home, "XDG_RUNTIME_DIR": self.home + "/run"}
        self.env.update({k: v for k, v in os.environ.items() if k.endswith("SAN_OPTIONS")})
        self.command = ["setpriv", "--reuid=%d" % self.uid, "--regid=%d" % self.uid, "--clear-groups"]

    def give(self, path):
        subprocess.run(["chown", "-R", "-h", "%d:%d" % (self.uid, self.uid), path], check=True)

    def ids(self):
        """Ranges of ids that are this user's."""
        ranges = [(self.uid, 1)]
        for line in lines_of("/etc/subuid"):
            name, start, count = line.strip().split(":")
            if name == self.name:
                ranges.append((int(start), int(count)))
        return ranges

    def processes(self):
        """What runs under any of them; who is dead and waits for the host's init does not."""
        found = []
        for status in glob.glob("/proc/[0-9]*/status"):
            try:
                text = "".join(lines_of(status))
            except OSError:
                continue
            uid = int(re.search(r"^Uid:\t(\d+)", text, re.M).group(1))
            if not re.search(r"^State:\t[ZX]", text, re.M) and any(s <= uid < s + n for s, n in self.ids()):
                found.append(text.split("\n")[0] + " " + status)
        return found

    def remove(self):
        if self.known:
            subprocess.run(["userdel", self.name], check=True, stderr=subprocess.DEVNULL)
        shutil.rmtree(self.dir)


class RootlessDaemon(lab.Daemon):
    """Started without options: state and socket are where the XDG specification has them."""

    def __init__(self, user, cgroup_dir=None):
        self.user, self.cgroup_dir = user, cgroup_dir
        self.dir = user.dir
        self.state = user.home + "/.local/share/agentenv"
        self.socket = user.home + "/run/agentenv.sock"
        self.cgroup = "none"
        self.log = open(self.dir + "/log", "ab")
        self.process = None
        self.start()

    def enter_cgroup(self):
        if self.cgroup_dir:
            with open(self.cgroup_dir + "/cgroup.procs", "w") as f:
                f.write(str(os.getpid()))

    def start(self):
        self.process = subprocess.Popen([*self.user.command, self.user.bin + "/agentenvd"], stderr=self.log,
                                        env=self.user.env, preexec_fn=self.enter_cgroup, cwd="/")

        def ready():
            if self.process.poll() is not None:
                raise RuntimeError("agentenvd does not start:\n" + self.log_text())
            return self.run("ls", check=False).returncode == 0
        until(ready, "agentenvd is ready")

    def run(self, *args, check=True, binary=False, **kw):
        r = subprocess.run([*self.user.command, self.user.bin + "/agentenv", *args], capture_output=True,
                           text=not binary, env=self.user.env, cwd="/", **kw)
        if check and r.returncode != 0:
            raise AssertionError("agentenv %s: %d\n%s\n%s" % (args, r.returncode, r.stderr, self.log_text()[-2000:]))
        return r

    def close(self):
        """Everything goes; returns what was left."""
        self.run("rm", "--all")
        left = self.leftovers()
        status = self.stop()
        until(lambda: not self.user.processes(), "no process of the user: %s" % self.user.processes())
        self.log.close()
        return left + ([] if status == 0 else ["exit status %d" % status])


class Rootless:
    """The tests, for each of the three classes below."""

    many_ids, delegated = True, False

    @classmethod
    def setUpClass(cls):
        cls.user = User(cls.many_ids)
        cls.cgroup_dir = None
        cls.addClassCleanup(cls.clean)
        if cls.delegated:
            cls.cgroup_dir = "%s/rootless-test-%d" % (v2_mount(), os.getpid())
            os.mkdir(cls.cgroup_dir)
            for path in "", "/cgroup.procs", "/cgroup.subtree_control":
                os.chown(cls.cgroup_dir + path, cls.user.uid, cls.user.uid)
        cls.d = RootlessDaemon(cls.user, cls.cgroup_dir)
        cls.root = cls.user.home + "/root"
        lab.make_root(cls.root)
        shutil.copy(PROBE, cls.root + "/bin/probe")
        cls.user.give(cls.root)
        cls.d.run("image", "import", "bb", cls.root)

    @classmethod
    def clean(cls):
        if cls.cgroup_dir:
            until(lambda: "populated 0\n" in lines_of(cls.cgroup_dir + "/cgroup.events"), "an empty cgroup")
            for base, _, _ in os.walk(cls.cgroup_dir, topdown=False):
                os.rmdir(base)
        cls.user.remove()

    @classmethod
    def tearDownClass(cls):
        left = cls.d.close()
        assert not left, left

    def tearDown(self):
        self.d.run("rm", "--all")
        self.d.run("gc", "--grace", "0")
        self.assertEqual(self.d.leftovers(), [])
        self.assertEqual(self.d.audit(), [])
        self.assertEqual(os.listdir(self.d.state + "/layers"), [])
        held = os.listdir(self.d.state + "/processes") if not self.delegated else []
        self.assertEqual([os.listdir(self.d.state + "/processes/" + h) for h in held], [[]] * len(held))

    def refused(self, text, *args):
        r = self.d.run(*args, check=False)
        self.assertNotEqual(r.returncode, 0, args)
        self.assertIn(text, r.stderr)

    def inside(self, box):
        """Commands that run in a sandbox besides init and what looks."""
        out = self.d.sh(box, "for p in /proc/[0-9]*; do read c < $p/comm && echo $c; done; true").stdout.split()
        return sorted(c for c in out if c not in ("agentenv-init", "agentenv-lead", "sh"))

    def test_lifecycle(self):
        d = self.d
        box = d.out("start", "bb")
        self.assertEqual(d.sh(box, "id -u; echo $HOME; cat").stdout, "0\n/root\n")
        d.sh(box, "mkdir -p /work/d/e; echo one > /work/d/f; rm /etc/passwd; rm -r /root; mkdir /root; echo x > /root/y")
        with open(self.user.home + "/up", "w") as f:
            f.write("up\n")
        self.user.give(self.user.home + "/up")
        d.run("cp", self.user.home + "/up", box + ":/work/up")
        d.run("cp", box + ":/work/d", self.user.home + "/down")
        self.assertEqual(lines_of(self.user.home + "/down/f"), ["one\n"])
        self.assertIn("up", d.run("ls", box + ":/work").stdout)
        snap = d.out("snapshot", box, "--retain", "t")
        d.sh(box, "cat /work/d/f /work/up && echo two > /work/d/f")
        for b in [d.out("start", snap), *d.out("fork", snap, "2").split()]:
            self.assertEqual(d.sh(b, "cat /work/d/f; ls -A /root; ls /etc").stdout, "one\ny\n")
        (child,) = d.out("fork", box, "1").split()
        self.assertEqual(d.sh(child, "cat /work/d/f").stdout, "two\n")
        d.run("rollback", box, snap)
        self.assertEqual(d.sh(box, "cat /work/d/f").stdout, "one\n")
        self.assertEqual(d.audit(), [])
        d.run("snapshot", "release", snap, "t")

    def test_what_needs_root_is_refused_by_name(self):
        box = self.d.out("start", "bb")
        self.refused("it needs root: run agentenvd as root", "hibernate", box)
        self.refused("it needs root: run agentenvd as root", "snapshot", box, "--engine", "criu")
        engines = self.d.run("engines").stdout
        self.assertIn("fsonly", engines)
        self.assertIn("it needs root", engines)

    def test_users(self):
        box = self.d.out("start", "bb")
        if not self.many_ids:
            self.refused("sandbox with one user id", "exec", box, "--user", "user", "--", "id")
            return
        self.assertEqual(self.d.run("exec", box, "--user", "user", "--", "id", "-u").stdout, "1000\n")
        self.d.sh(box, "echo mine > /work/mine; chown 1000:1000 /work/mine /work")
        self.assertEqual(self.d.run("exec", box, "--user", "user", "--", "sh", "-c",
                                    "echo yours >> /work/mine; mkdir /work/d; chmod 700 /work/d; cat /work/mine").stdout,
                         "mine\nyours\n")

    def test_images(self):
        """Owners that exist are kept; other users' files and ids that nobody granted are refused, by name."""
        d, path = self.d, self.user.home + "/image"
        shutil.copytree(self.root, path, symlinks=True)
        with open(path + "/work/theirs", "w") as f:
            f.write("x")
        os.chown(path + "/work/theirs", 1000, 1000)
        os.chmod(path + "/work/theirs", 0o644)
        tar = self.user.home + "/image.tar"
        subprocess.run(["tar", "-C", path, "--numeric-owner", "--owner=+0", "--group=+0", "--exclude=./work/theirs", "-cf",
                        tar, "."], check=True)
        subprocess.run(["tar", "-C", path, "--numeric-owner", "-rf", tar, "./work/theirs"], check=True)
        self.user.give(tar)
        if self.many_ids:
            d.run("image", "import", "other", tar)
            box = d.out("start", "other")
            self.assertEqual(d.sh(box, "stat -c %u:%g /work/theirs /work /bin/busybox /dev/null").stdout.split()[:3],
                             ["1000:1000", "0:0", "0:0"])
            d.run("rm", "--all")
            d.run("image", "rm", "other")
        else:
            self.refused("work/theirs belongs to 1000:1000, and only 1 ids exist", "image", "import", "other", tar)
        self.user.give(path)
        os.chown(path + "/work/theirs", 0, 0)
        self.refused("belongs to another user of this host", "image", "import", "other", path)
        shutil.rmtree(path)
        os.unlink(tar)

    def test_freeze(self):
        box = self.d.out("start", "bb")
        self.d.sh(box, "sleep 1000 > /dev/null 2>&1 &")
        if not self.delegated:
            self.refused("no cgroup was delegated to this user", "freeze", box)
            self.refused("a command runs, or something that one has left", "snapshot", box)
            return
        self.d.run("freeze", box)
        self.assertEqual(self.d.json("ls")[0]["state"], "FROZEN")
        self.d.run("thaw", box)
        snap = self.d.out("snapshot", box, "--retain", "t")
        self.assertEqual(self.inside(box), ["sleep"])
        self.d.run("snapshot", "release", snap, "t")

    def test_a_timeout_ends_the_tree(self):
        box = self.d.out("start", "bb")
        r = self.d.run("exec", box, "-t", "1s", "--", "sh", "-c",
                       "setsid sleep 77 & (setsid sh -c 'sleep 78 & sleep 79' &) & sleep 100", check=False)
        self.assertEqual(r.returncode, 124)
        until(lambda: self.inside(box) == [], "the tree has ended")

    def test_memory_is_bounded(self):
        box = self.d.out("start", "bb", "--memory", "64M")
        r = self.d.sh(box, "dd if=/dev/zero of=/dev/null bs=200M count=1", check=False)
        if not self.delegated:
            self.assertNotEqual(r.returncode, 0)
        self.assertEqual(self.d.sh(box, "dd if=/dev/zero of=/dev/null bs=10M count=1").returncode, 0)

    def test_a_leader_that_is_killed_takes_its_tree_along(self):
        box = self.d.out("start", "bb")
        r = self.d.sh(box, "read p < /proc/$PPID/comm; setsid sleep 77 & sleep 78 & echo $p; kill -9 $PPID; sleep 79",
                      check=False, timeout=WAIT_S)
        if self.delegated:  # there is no leader; PID 1 does not hear
            self.assertIn("agentenv-init", r.stdout)
            return
        self.assertEqual((r.stdout, r.returncode), ("agentenv-lead\n", 137))
        until(lambda: self.inside(box) == [], "the tree has ended")

    def test_probes_find_no_hole(self):
        host = socket.create_server(("127.0.0.1", 0))
        name = "rootless-%d" % os.getpid()
        with socket.socket(socket.AF_UNIX) as abstract:
            abstract.bind("\0" + name)
            abstract.listen()
            for network, user in (("none", "root"), ("loopback", "root"), ("none", "user")):
                if user == "user" and not self.many_ids:
                    continue
                box = self.d.out("start", "bb", "--network", network)
                r = self.d.run("exec", box, "--user", user, "--", "probe", "--inside-sandbox", name,
                               str(host.getsockname()[1]), check=False)
                found = [line for line in r.stdout.splitlines() if not line.startswith("probes ")]
                self.assertEqual(found, [] if self.many_ids else [
                    "UNCLEAR take init's id by a set-uid program: Invalid argument"], r.stdout)  # there is no such id
                self.assertRegex(r.stdout, r"probes [1-9]\d\d?, holes 0")
        host.close()

    def test_kill_9_of_the_daemon(self):
        d = self.d
        box = d.out("start", "bb")
        d.sh(box, "echo kept > /work/f")
        waiting = subprocess.Popen([*self.user.command, self.user.bin + "/agentenv", "exec", box, "--name", "long", "-t", "120s",
                                    "--", "sh", "-c", "echo a; while ! test -e /work/go; do sleep 0.1; done; echo b"],
                                   stdout=subprocess.PIPE, env=self.user.env, text=True)
        self.assertEqual(waiting.stdout.readline(), "a\n")
        half = [subprocess.Popen([*self.user.command, self.user.bin + "/agentenv", "start", "bb"], env=self.user.env,
                                 stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for _ in range(4)]
        d.kill()
        for p in half:
            p.kill()
            p.wait()
        d.start()
        self.assertEqual(d.sh(box, "cat /work/f; touch /work/go").stdout, "kept\n")
        out, _ = waiting.communicate(timeout=WAIT_S)
        self.assertEqual((out, waiting.returncode), ("b\n", 0))
        snap = d.out("snapshot", box, "--retain", "t")  # in the namespaces that the first daemon made
        d.run("snapshot", "release", snap, "t")
        running = len(d.json("ls"))
        until(lambda: sum("agentenv-init" in p for p in self.user.processes()) == running, "one init for each sandbox")
        self.assertEqual(d.audit(), [])

    def test_doctor_says_what_is_missing(self):
        rows = {r["what"]: r for r in self.d.json("doctor")}
        self.assertEqual(rows["sandboxes"]["state"], "offered")
        self.assertEqual(rows["root"]["state"], "missing")
        self.assertEqual(rows["user ids"]["state"], "offered" if self.many_ids else "missing")
        self.assertIn("rlimits", rows["cgroup limits"]["text"])


class More:
    """What needs to be seen once."""

    def test_export_and_import(self):
        d = self.d
        box = d.out("start", "bb")
        d.sh(box, "rm -r /root /bin/tar; mkdir /root; echo x > /root/y; ln -s y /root/z")
        snap = d.out("snapshot", box, "--retain", "t")
        file = self.user.home + "/out.tar.zst"
        d.run("snapshot", "export", snap, file)
        d.run("rm", "--all")
        d.run("snapshot", "release", snap, "t")
        d.run("gc", "--grace", "0")
        snap = d.out("snapshot", "import", file, "--retain", "t").split()[0]
        box = d.out("start", snap)
        self.assertEqual(d.sh(box, "cat /root/z; test -e /bin/tar || echo gone; ls -A /root").stdout, "x\ngone\ny\nz\n")
        d.run("snapshot", "release", snap, "t")
        os.unlink(file)

    def test_a_port_is_published(self):
        box = self.d.out("start", "bb", "-p", "8080")
        self.d.sh(box, "echo hello > /work/index.html; httpd -p 8080 -h /work")
        port = self.d.json("ls")[0]["ports"][0]["host_port"]
        with urllib.request.urlopen("http://127.0.0.1:%d/index.html" % port, timeout=WAIT_S) as r:
            self.assertEqual(r.read(), b"hello\n")

    def test_a_task_has_its_verdict(self):
        image = self.user.dir + "/quickstart"
        subprocess.run([QUICKSTART_IMAGE, image], check=True)
        self.user.give(image)
        self.d.run("image", "import", "quickstart", image)
        shutil.copy(TASK, self.user.home + "/task.textproto")
        self.user.give(self.user.home + "/task.textproto")
        out = self.d.run("task", "register", self.user.home + "/task.textproto")
        self.assertIn("1 registered", out.stdout + out.stderr)  # the oracle scored 1, doing nothing 0
        self.d.run("task", "rm", "examples/hello")
        self.d.run("image", "rm", "quickstart")
        shutil.rmtree(image)

    def test_processes_are_bounded(self):
        box = self.d.out("start", "bb", "--pids", "24")
        r = self.d.sh(box, "i=0; while [ $i -lt 60 ]; do sleep 100 & i=$((i + 1)); done; wait", check=False)
        self.assertNotEqual(r.returncode, 0)
        self.assertIn("fork", r.stderr)
        self.assertLess(self.d.json("ls")[0]["processes"], 30)


    def test_what_runs_without_a_cgroup_is_not_lost_in_one(self):
        mount = v2_mount()
        if not mount:
            return
        self.d.run("start", "bb")
        self.d.stop()
        other = "%s/rootless-other-%d" % (mount, os.getpid())
        os.mkdir(other)
        try:
            for path in "", "/cgroup.procs", "/cgroup.subtree_control":
                os.chown(other + path, self.user.uid, self.user.uid)
            self.d.cgroup_dir = other
            with self.assertRaisesRegex(RuntimeError, "runs without a cgroup: start agentenvd outside"):
                self.d.start()
        finally:
            self.d.cgroup_dir = None
            self.d.start()
            until(lambda: "populated 0\n" in lines_of(other + "/cgroup.events"), "an empty cgroup")
            for base, _, _ in os.walk(other, topdown=False):
                os.rmdir(base)
        self.assertEqual(len(self.d.json("ls")), 1)


class WithARange(Rootless, More, unittest.TestCase):
    pass


class WithOneId(Rootless, unittest.TestCase):
    many_ids = False


class Delegated(Rootless, unittest.TestCase):
    delegated = True


if __name__ == "__main__":
    if os.geteuid() != 0:
        skip("a user is made for the test, which needs root")
    if not shutil.which("newuidmap") or not shutil.which("useradd"):
        skip("newuidmap or useradd: apt-get install uidmap passwd")
    if subprocess.run(["setpriv", "--reuid=65533", "--regid=65533", "--clear-groups", "unshare", "-Ur", "true"]).returncode:
        skip("this host gives ordinary users no user namespaces")
    if not v2_mount():
        del Delegated
    unittest.main(argv=sys.argv[:1], verbosity=2)
