#!/usr/bin/python3
"""agentenv_crash.py AGENTENVD AGENTENV PROTO_DIR: kill -9 of the daemon, and a full disk (I1, I7)."""
import os
import random
import subprocess
import tempfile
import threading
import time
import unittest

import grpc

import agentenv_lab as lab

pb = lab.stubs()


class Adoption(lab.DaemonTest):
    def test_sandboxes_outlive_the_daemon(self):
        run = self.d.out("start", "bb", "--name", "run")
        cold = self.d.out("start", "bb")
        self.d.sh(cold, "echo kept > /work/f")
        snap = self.d.out("snapshot", cold, "--retain", "t")
        self.d.sh(cold, "echo later > /work/g")
        self.d.run("freeze", cold)
        client = subprocess.Popen([lab.AGENTENV, "--socket", self.d.socket, "exec", "run", "sh", "-c",
                                   "i=0; while [ $i -lt 40 ]; do i=$((i+1)); echo $i >> /work/out; "
                                   "sleep 0.05; done; echo end >> /work/out"],
                                  stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(0.5)
        self.d.kill()
        self.assertEqual(client.wait(), 75, "try again")
        pids = {s: None for s in (run, cold)}
        self.d.start()
        after = {s["id"]: s for s in self.d.json("ls")}
        self.assertEqual(set(after), set(pids))
        self.assertEqual((after[run]["state"], after[cold]["state"]), ("RUNNING", "FROZEN"))
        deadline = time.monotonic() + 15
        while "end" not in self.d.sh("run", "cat /work/out").stdout and time.monotonic() < deadline:
            time.sleep(0.1)
        self.assertEqual(self.d.sh("run", "cat /work/out").stdout.split(),
                         [str(i) for i in range(1, 41)] + ["end"])
        self.d.run("thaw", cold)
        self.assertEqual(self.d.sh(cold, "cat /work/f /work/g").stdout, "kept\nlater\n")
        self.d.sh(cold, "echo third > /work/h")
        second = self.d.out("snapshot", cold)
        copy = self.d.out("resume", second)
        self.assertEqual(self.d.sh(copy, "cat /work/f /work/g /work/h").stdout, "kept\nlater\nthird\n")
        self.d.run("snapshot", "release", snap, "t")

    def test_a_sandbox_that_died_meanwhile_is_dead(self):
        box = self.d.out("start", "bb")
        pid = self.d.json("ls")[0]["init_pid"]
        self.d.kill()
        os.kill(pid, 9)
        self.d.start()
        self.assertEqual([(s["id"], s["state"], s["cause"]) for s in self.d.json("ls", "-a")],
                         [(box, "DEAD", "KILLED")])

    def test_files_of_a_dead_sandbox_can_be_read_and_kept(self):
        box = self.d.out("start", "bb")
        self.d.sh(box, "mkdir /work/d; echo kept > /work/d/f; ln -s /etc/shadow /work/d/l")
        self.d.run("snapshot", box)
        self.d.sh(box, "echo later > /work/d/g; rm /work/d/f")
        os.kill(self.d.json("ls")[0]["init_pid"], 9)
        deadline = time.monotonic() + 5
        while self.d.json("ls", "-a")[0]["state"] != "DEAD" and time.monotonic() < deadline:
            time.sleep(0.02)
        for died in ("under this daemon", "under the one before"):
            with self.subTest(died):
                names = [f["name"] for f in self.d.json("ls", box + ":/work/d")]
                self.assertEqual(names, ["g", "l"], "what it removed is gone, and what it wrote is there")
                to = os.path.join(self.d.dir, died)
                self.d.run("cp", box + ":/work/d", to)
                with open(os.path.join(to, "g")) as f:
                    self.assertEqual(f.read(), "later\n")
                r = self.d.run("cp", os.path.join(to, "g"), box + ":/work/x", check=False)
                self.assertIn("DEAD", r.stderr)
                copy = self.d.out("resume", self.d.out("snapshot", box))
                self.assertEqual(self.d.sh(copy, "ls /work/d; cat /work/d/g").stdout, "g\nl\nlater\n")
                self.d.run("rm", copy)
            self.d.kill()
            self.d.start()
        self.assertEqual(self.d.audit(), [])
        self.d.run("rm", box)

    def test_sigterm_leaves_them_running(self):
        box = self.d.out("start", "bb")
        self.assertEqual(self.d.stop(), 0)
        self.d.start()
        self.assertEqual(self.d.sh(box, "echo alive").stdout, "alive\n")

    def test_orphans_are_reaped(self):
        for kind in ("boxes", "layers"):
            os.makedirs(os.path.join(self.d.state, kind, "01ARZ3NDEKTSV4RRFFQ69G5FAV", "x"))
        self.assertEqual(len(self.d.audit()), 2)
        self.d.kill()
        self.d.start()
        self.assertEqual(self.d.audit(), [])

    def test_two_daemons_do_not_share_a_state(self):
        r = subprocess.run([lab.AGENTENVD, "--state", self.d.state, "--socket", self.d.dir + "/other",
                            "--cgroup", self.d.cgroup + "-x"], capture_output=True, text=True, timeout=20)
        self.assertEqual(r.returncode, 75)
        self.assertIn("another agentenvd", r.stderr)


class Load(threading.Thread):
    """Creates, runs, snapshots, forks, hibernates, resumes and removes until its daemon is gone; remembers what was
    acknowledged."""

    def __init__(self, socket, seed, criu):
        super().__init__()
        self.c, self.seed, self.criu = lab.Client(pb, socket), seed, criu
        self.boxes = {}      # id: [state or None while that may change, what /work/f says, whether a process runs]
        self.snapshots = {}  # id: what /work/f says
        self.error = None

    def run(self):
        try:
            for i in range(10 ** 6):
                self.turn("%s-%d" % (self.seed, i))
        except grpc.RpcError as e:
            # the daemon was killed; anything else is a failure
            if e.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
                self.error = e
        except Exception as e:  # a thread's failure is its test's
            self.error = e

    def change(self, box, state, method, **fields):
        """A call after which the sandbox is in another state; until it is answered it may be in either."""
        self.boxes[box][0] = None
        reply = self.c.call(method, id=box, **fields)
        self.boxes[box][0] = state
        return reply

    def create(self, key):
        box = self.c.call("Create", idempotency_key=key, image="bb").id
        self.boxes[box] = [None, "", False]
        self.run_in(box, "echo %s > /work/f" % key)
        self.boxes[box][:2] = [pb.STATE_RUNNING, key]
        return box

    def run_in(self, box, script):
        status, out = self.c.sh(box, script)
        assert status == 0, (script, status, out)
        return out.strip()

    def remove(self, box):
        self.boxes[box][0] = None
        self.c.call("Remove", id=box)
        del self.boxes[box]

    def turn(self, key):
        box = self.create(key)
        s = self.change(box, pb.STATE_RUNNING, "TakeSnapshot", idempotency_key=key + "/s", retain_owner="load")
        self.snapshots[s.id] = key
        children = self.change(box, pb.STATE_RUNNING, "Fork", idempotency_key=key + "/f", count=2).children
        for child in children:
            self.boxes[child.id] = [pb.STATE_RUNNING, key, False]
        self.remove(children[0].id)
        if self.criu:
            self.run_in(box, "sleep 9876 > /dev/null 2>&1 & echo $! > /work/pid")
            self.boxes[box][2] = True
            self.change(box, pb.STATE_HIBERNATED, "Hibernate")
            self.change(box, pb.STATE_RUNNING, "Resume")
        assert self.run_in(box, "cat /work/f") == key
        self.remove(box)
        self.remove(children[1].id)


class Crash(lab.DaemonTest):
    def test_kill_at_random_moments(self):
        rounds = 200 if lab.SOAK else 20
        seed = int(os.environ.get("LONGHAUL_SEED", random.randrange(10 ** 6) if lab.SOAK else 1))
        rng = random.Random(seed)
        self.criu = "criu" in [e["engine"] for e in self.d.json("engines")]
        self.lived, self.dead, snapshots = 0, 0, {}
        moment = 1.5 * self.one_turn()
        for i in range(rounds):
            loads = self.loads("%d-%d" % (seed, i))
            for l in loads:
                l.start()
            time.sleep(0.02 + rng.random() * moment)
            self.d.kill()
            for l in loads:
                l.join()
                l.c.close()
                self.assertIsNone(l.error)
            self.d.start()
            self.check(loads, snapshots)
        print("seed %d, %d rounds, %d sandboxes and %d snapshots lived on, %d cut off in a seal"
              % (seed, rounds, self.lived, len(snapshots), self.dead), end=" ... ")
        self.assertGreater(self.lived, 0)
        self.assertGreater(len(snapshots), 0)
        self.what_the_snapshots_hold(rng.sample(sorted(snapshots), min(10, len(snapshots))), snapshots)

    def loads(self, seed):
        return [Load(self.d.socket, "%s-%d" % (seed, j), self.criu) for j in range(3)]

    def one_turn(self):
        """Seconds, of three loads beside each other; machines differ."""
        loads = self.loads("warm")
        threads = [threading.Thread(target=l.turn, args=(l.seed,)) for l in loads]
        started = time.monotonic()
        [t.start() for t in threads]
        [t.join() for t in threads]
        [l.c.close() for l in loads]
        return time.monotonic() - started

    def what_the_snapshots_hold(self, some, snapshots):
        c = lab.Client(pb, self.d.socket)
        self.addCleanup(c.close)
        for s in some:
            box = c.call("Create", idempotency_key="check" + s, snapshot=s).id
            self.assertEqual(c.sh(box, "cat /work/f")[1].strip(), snapshots[s])
        for s in c.call("ListSnapshots").snapshots:
            for owner in s.owners:
                c.call("Release", snapshot=s.id, owner=owner)

    def check(self, loads, snapshots):
        self.assertEqual(self.d.audit(), [])
        c = lab.Client(pb, self.d.socket)
        there = {s.id: s for s in c.call("List", all=True).sandboxes}
        for l in loads:
            for box, (state, text, process) in l.boxes.items():
                if state is not None:
                    self.lives(c, there, box, state, text, process)
            snapshots.update(l.snapshots)
        listed = {s.id for s in c.call("ListSnapshots", owner_prefix="load").snapshots}
        self.assertLessEqual(set(snapshots), listed, "an acknowledged snapshot is lost")
        self.dead += sum(s.state == pb.STATE_DEAD for s in there.values())
        for box in there:
            c.call("Remove", id=box)
        c.call("Gc", grace_ms=1)  # what nobody had been told of yet
        c.close()
        self.assertEqual(self.d.leftovers(), [])
        self.assertEqual(os.listdir(self.d.state + "/checkpoints"), [])
        self.assertEqual(self.d.audit(), [])

    def lives(self, c, there, box, state, text, process):
        """As it was acknowledged: its state, its files, its process."""
        self.assertIn(box, there, "an acknowledged sandbox is lost")
        self.assertEqual(there[box].state, state)
        if state == pb.STATE_HIBERNATED:
            c.call("Resume", id=box)
        script = "cat /work/f" + (" && kill -0 $(cat /work/pid)" if process else "")
        self.assertEqual(c.sh(box, script), (0, text + "\n"))
        self.lived += 1


class FullDisk(unittest.TestCase):
    def setUp(self):
        self.mount = tempfile.mkdtemp(prefix="agentenvd-full-")
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", self.mount], check=True)
        self.d = lab.Daemon(state=self.mount + "/state")

    def tearDown(self):
        if os.path.exists(self.d.dir):  # a test that failed
            self.room(-1)
            self.d.close()
        subprocess.run(["umount", "-l", self.mount])
        os.rmdir(self.mount)

    def room(self, kib):
        """So much beyond what is used now; -1: plenty."""
        v = os.statvfs(self.mount)
        used = (v.f_blocks - v.f_bfree) * v.f_frsize >> 10
        size = 48 << 10 if kib < 0 else used + kib
        subprocess.run(["mount", "-o", "remount,size=%dk" % size, self.mount], check=True)

    def whole_life(self):
        """Every operation that writes, each done or refused; what was said of those."""
        steps = [("start", "bb", "--name", "x"), ("exec", "x", "sh", "-c", "sleep 99 >/dev/null 2>&1 & echo x >/work/x"),
                 ("snapshot", "x"), ("fork", "x", "2"), ("policy", "x", "--ttl", "1h"), ("freeze", "x"), ("thaw", "x"),
                 ("snapshot", "x", "--retain", "full")]
        if self.criu:
            steps[4:4] = [("hibernate", "x"), ("resume", "x"), ("snapshot", "x", "--engine", "criu"), ("rollback", "x")]
        refused = []
        for step in steps:
            r = self.d.run(*step, check=False)
            self.assertIn(r.returncode, (0, 1, 125), (step, r.stderr))
            self.assertTrue(r.returncode == 0 or r.stderr, step)
            refused += [r.stderr] if r.returncode else []
        self.assertIsNone(self.d.process.poll(), "the daemon lives")
        return refused

    def test_each_write_may_be_the_one_that_does_not_fit(self):
        """Room that grows by steps: so the disk is full at one write after the other."""
        self.d.import_image()
        self.criu = "criu" in [e["engine"] for e in self.d.json("engines")]
        kept = self.d.out("start", "bb")
        self.d.sh(kept, "echo before > /work/f")
        snap = self.d.out("snapshot", kept, "--retain", "t")
        refused = []
        for kib in [*range(0, 2048, 16), 16384] if lab.SOAK else (0, 16, 48, 96, 192, 384, 768, 1536, 16384):
            self.room(kib)
            refused.append(self.whole_life())
            self.room(-1)
            boxes = [s["id"] for s in self.d.json("ls", "-a") if s["id"] != kept]
            if boxes:
                self.d.run("rm", *boxes)
            for s in self.d.json("snapshot", "ls", "--owner", "full"):
                self.d.run("snapshot", "release", s["id"], "full")
            self.d.run("gc", "--grace", "0.001")
            self.assertEqual(self.d.audit(), [], "with room for %d KiB" % kib)
            self.assertEqual(self.d.sh(kept, "cat /work/f").stdout, "before\n")
        print("refused:", *map(len, refused), end=" ... ")
        self.assertEqual(refused[-1], [], "the steps reach from nothing to enough")
        self.assertGreater(len(refused[0]), 5)
        self.d.kill()
        self.d.start()
        self.assertEqual(self.d.audit(), [])
        self.assertEqual(self.d.sh(self.d.out("resume", snap), "cat /work/f").stdout, "before\n")
        self.d.run("snapshot", "release", snap, "t")
        self.assertEqual(self.d.close(), [])

    def test_a_full_state_directory_refuses_and_recovers(self):
        d = self.d
        d.import_image()
        box = d.out("start", "bb")
        d.sh(box, "echo before > /work/f")
        snap = d.out("snapshot", box, "--retain", "t")
        d.sh(box, "dd if=/dev/zero of=/work/fill bs=64k 2>/dev/null", check=False)
        for args in (("snapshot", box), ("start", "bb"), ("snapshot", box, "--retain", "t2")):
            r = d.run(*args, check=False)
            self.assertIn(r.returncode, (0, 1), r.stderr)
            if r.returncode:
                self.assertTrue(r.stderr)
        d.sh(box, "rm /work/fill", check=False)
        d.run("rm", "--all")
        d.run("gc", "--grace", "0.001")
        self.assertEqual(d.audit(), [])
        again = d.out("resume", snap)
        self.assertEqual(d.sh(again, "cat /work/f").stdout, "before\n")
        self.assertEqual(d.close(), [])


if __name__ == "__main__":
    lab.main()
