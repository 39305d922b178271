#!/usr/bin/python3
"""agentenv_hibernate.py AGENTENVD AGENTENV PROTO_DIR: sandboxes with their processes put away, copied and rolled
back; agentenv-witness says from inside whether all it holds is there (I1, I3, I7)."""
import json
import os
import random
import re
import signal
import subprocess
import threading
import time
import unittest

import agentenv_lab as lab

WITNESS = os.path.join(os.path.dirname(lab.AGENTENVD), "criu", "agentenv-witness")
ROUNDS = 100 if lab.SOAK else 10
KILLS = 200 if lab.SOAK else 8


def make_root(path):
    plain_root(path)
    subprocess.run(["cp", WITNESS, path + "/bin/witness"], check=True)


plain_root, lab.make_root = lab.make_root, make_root


class HibernateTest(lab.DaemonTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        engines = cls.d.json("engines")
        if "criu" not in [e["engine"] for e in engines]:
            named = os.environ.get("LONGHAUL_MUST_WORK", "").split(",")
            assert "criu" not in named and "1" not in named, engines
            raise unittest.SkipTest("SKIPPED, criu is missing: %s" % engines)

    def tearDown(self):
        self.d.run("rm", "--all")
        for s in self.d.json("snapshot", "ls"):
            for owner in s["owners"]:
                self.d.run("snapshot", "release", s["id"], owner)
        super().tearDown()
        self.assertEqual(os.listdir(self.d.state + "/checkpoints"), [])

    def start(self, *args):
        box = self.d.out("start", "bb", "--network", "loopback", *args)
        self.d.run("exec", box, "witness", "start", "2")
        return box

    def ask(self, box):
        answer = self.d.run("exec", box, "witness", "ask", check=False)
        self.assertEqual(answer.returncode, 0, answer.stdout + answer.stderr)
        return int(answer.stdout.split()[1])

    def state(self, box):
        return {s["id"]: s["state"] for s in self.d.json("ls", "-a")}[box]


class Lifecycle(HibernateTest):
    def test_everything_survives_again_and_again(self):
        box = self.start()
        at = 0
        for _ in range(ROUNDS):
            snapshot = self.d.out("snapshot", box, "--engine", "criu", "--retain", "t")
            at += 1
            self.assertEqual(self.ask(box), at, "goes on after a snapshot")
            self.d.run("hibernate", box)
            self.d.run("resume", box)
            self.assertEqual(self.ask(box), at + 1, "goes on after a hibernation")
            self.d.run("rollback", box, snapshot)
            self.assertEqual(self.ask(box), at, "is what it was at the snapshot")
            self.d.run("snapshot", "release", snapshot, "t")
            self.d.run("gc", "--grace", "0.001")
        self.d.sh(box, "echo written > /work/f")
        children = self.d.out("fork", box, "8").split()
        self.assertEqual(len(children), 8)
        for child in children:
            self.assertEqual(self.ask(child), at + 1)
            self.assertEqual(self.d.sh(child, "cat /work/f").stdout, "written\n")
        self.assertEqual(self.ask(box), at + 1, "the parent goes on")

    def test_a_hibernated_sandbox_has_no_processes_and_says_so(self):
        box = self.start()
        pid = self.d.json("ls")[0]["init_pid"]
        self.d.run("hibernate", box)
        self.assertFalse(os.path.exists("/proc/%d" % pid))
        self.assertEqual(self.d.cgroups(), [])
        self.assertEqual(self.state(box), "HIBERNATED")
        refused = self.d.run("exec", box, "true", check=False)
        self.assertIn("is HIBERNATED; resume it first", refused.stderr)
        self.d.run("hibernate", box)  # again is fine
        children = self.d.out("fork", box, "2").split()
        self.assertEqual([self.ask(c) for c in children], [1, 1])
        self.d.run("resume", box)
        self.assertEqual(self.ask(box), 1)

    def test_after_a_live_seal(self):
        box = self.d.out("start", "bb")  # nothing but init runs: the seal exchanges the overlay under it
        self.d.sh(box, "echo before > /dev/shm/f")
        self.d.run("snapshot", box)
        self.d.sh(box, "test -c /dev/null -a -c /dev/pts/ptmx && echo after >> /dev/shm/f")
        for _ in range(2):  # the second time init has been restored, and is not sealed live
            self.d.run("hibernate", box)
            self.d.run("resume", box)
            self.d.run("snapshot", box)
            self.assertEqual(self.d.sh(box, "cat /dev/shm/f && echo > /dev/null").stdout, "before\nafter\n")

    def test_a_frozen_sandbox_stays_frozen(self):
        box = self.start()
        self.d.run("freeze", box)
        snapshot = self.d.out("snapshot", box, "--engine", "criu", "--retain", "t")
        self.assertEqual(self.state(box), "FROZEN")
        copy = self.d.out("resume", snapshot)
        self.assertEqual(self.ask(copy), 1)
        self.d.run("hibernate", box)
        self.d.run("resume", box)
        self.assertEqual(self.ask(box), 1)

    def test_a_running_exec_sleeps_with_it(self):
        box = self.start()
        client = subprocess.Popen([lab.AGENTENV, "--socket", self.d.socket, "exec", box, "-t", "60s", "--", "sh", "-c",
                                   "for i in 1 2 3 4 5 6 7 8; do echo $i; sleep 0.2; done; exit 5"],
                                  stdout=subprocess.PIPE, text=True)
        time.sleep(0.6)
        self.d.run("hibernate", box)
        time.sleep(0.5)
        self.assertIsNone(client.poll())
        self.d.run("resume", box)
        out, _ = client.communicate(timeout=30)
        self.assertEqual((out.split(), client.returncode), ([str(i) for i in range(1, 9)], 5))

    def test_what_rollback_needs(self):
        box = self.start()
        self.assertIn("has no checkpoint", self.d.run("rollback", box, check=False).stderr)
        files = self.d.out("snapshot", box, "--retain", "t")
        self.d.sh(box, "echo later > /work/g")
        self.d.run("rollback", box, files)  # files alone: init starts anew
        self.assertNotEqual(self.d.sh(box, "cat /work/g", check=False).returncode, 0)
        self.assertNotEqual(self.d.run("exec", box, "witness", "ask", check=False).returncode, 0)

    def test_a_dead_sandbox_is_rolled_back_to_its_checkpoint(self):
        box = self.start()
        self.d.run("hibernate", box)
        self.d.run("resume", box)
        self.assertEqual(self.ask(box), 1)
        os.kill(self.d.json("ls")[0]["init_pid"], 9)
        deadline = time.monotonic() + 10
        while self.state(box) != "DEAD" and time.monotonic() < deadline:
            time.sleep(0.05)
        self.d.run("rollback", box)
        self.assertEqual(self.ask(box), 1)

    def images(self, snapshot):
        """Bytes on disk of a snapshot's processes that are nobody else's, and of all."""
        own = everything = 0
        for base, _, files in os.walk(self.d.state + "/checkpoints/" + snapshot):
            for f in files:
                st = os.stat(os.path.join(base, f))
                everything += st.st_blocks * 512
                own += st.st_blocks * 512 if st.st_nlink == 1 else 0
        return own, everything

    def test_memory_is_kept_once(self):
        size = 1000 if lab.SOAK else 200
        box = self.d.out("start", "bb", "--network", "loopback", "--memory", "%dM" % (2 * size))
        self.d.run("exec", "-t", "120s", box, "witness", "start", str(size))
        first = self.d.out("snapshot", box, "--engine", "criu", "--retain", "t")
        self.assertEqual(self.ask(box), 1)  # touches one page in 128
        second = self.d.out("snapshot", box, "--engine", "criu", "--retain", "t")
        whole = self.images(first)[1]
        self.assertGreater(whole, size << 20)
        self.assertGreater(self.d.json("gc")[0]["bytes"], whole * 9 // 10)
        self.assertLess(self.images(second)[0], whole // 20, "5 % of the first at most")
        self.assertEqual(self.d.audit(), [])
        self.d.run("rm", box)
        for snapshot, count in ((first, 1), (second, 2)):
            child = self.d.out("resume", snapshot)
            self.assertEqual(self.ask(child), count)
            self.d.run("rm", child)
        self.d.run("snapshot", "release", first, "t")
        self.d.run("gc", "--grace", "0")
        self.assertEqual([s["id"] for s in self.d.json("snapshot", "ls")], [second])
        child = self.d.out("resume", second)
        self.assertEqual(self.ask(child), 2, "stands on pages whose snapshot is gone")
        self.d.run("hibernate", child)
        self.d.run("gc")
        self.d.run("resume", child)
        self.assertEqual(self.ask(child), 3, "comes back from a stack of three")

    def test_sharing_is_cut_off_anywhere(self):
        box = self.d.out("start", "bb", "--network", "loopback")
        self.d.run("exec", box, "witness", "start", "40")
        snapshots = []
        for i in range(6):
            snapshots.append(self.d.out("snapshot", box, "--engine", "criu", "--retain", "t"))
            self.ask(box)
        self.d.run("rm", box)
        for delay in (0.01, 0.03, 0.06, 0.1):
            gc = subprocess.Popen([lab.AGENTENV, "--socket", self.d.socket, "gc"], stdout=subprocess.DEVNULL,
                                  stderr=subprocess.DEVNULL)
            time.sleep(delay)
            self.d.kill()
            gc.wait()
            os.makedirs(self.d.state + "/sharing/" + box, exist_ok=True)  # as if a power cut took its row
            self.d.start()
            self.assertEqual(self.d.audit(), [])
            self.assertEqual(os.listdir(self.d.state + "/sharing"), [])
        self.d.run("gc")
        for i, snapshot in enumerate(snapshots):
            child = self.d.out("resume", snapshot)
            self.assertEqual(self.ask(child), i + 1)
            self.d.run("rm", child)

    def test_an_image_starts_from_its_zygote(self):
        root = os.path.join(self.d.dir, "root")

        def starts(result):
            return int(re.search('warm_starts_total{result="%s"} (\\d+)' % result, self.d.out("metrics"))[1])

        def warm(name="warm"):
            box = self.d.out("start", name, "--network", "loopback")
            self.assertEqual(self.ask(box), 1)
            return box

        self.d.run("image", "import", "warm", root, "--warm-up", "witness start 2")
        self.assertEqual({i["name"]: i["warm_up"] for i in self.d.json("image", "ls")},
                         {"bb": "", "warm": "witness start 2"})
        zygote = self.d.json("snapshot", "ls")[0]["id"]
        boxes = [warm(), warm()]
        self.assertEqual({b["snapshot"] for b in self.d.json("ls")}, {zygote})
        self.assertEqual(starts("restored"), 2)
        self.d.run("rm", "--all")
        self.d.kill()
        self.d.start()
        self.d.run("engines")
        warm()
        self.assertEqual([s["id"] for s in self.d.json("snapshot", "ls")], [zygote], "is kept")
        # One that cannot be restored: the command is run instead.
        for name in os.listdir("%s/checkpoints/%s" % (self.d.state, zygote)):
            if name.startswith("core-"):
                os.remove("%s/checkpoints/%s/%s" % (self.d.state, zygote, name))
        warm()
        self.assertEqual([starts("restored"), starts("cold_restore_failed")], [1, 1])
        # Another command under the same name, and the same tree: the first start makes another zygote.
        self.d.run("image", "import", "warm", root, "--warm-up", "witness start 1")
        self.assertNotEqual([s["id"] for s in self.d.json("snapshot", "ls")], [zygote])
        warm()
        self.assertEqual(starts("restored"), 2)
        r = self.d.run("image", "import", "warm", root, "--warm-up", "echo no such; exit 3", check=False)
        self.assertIn("its warm-up fails", r.stderr)
        self.assertIn("ends with 3: no such", r.stderr)
        self.assertEqual(self.d.json("snapshot", "ls"), [], "what another command made goes with it")
        r = self.d.run("start", "warm", check=False)
        self.assertIn("ends with 3: no such", r.stderr)
        self.d.run("rm", "--all")
        self.d.run("image", "build", "built", "--from", "bb", "--warm-up", "witness start 1", "touch /built")
        self.d.sh(warm("built"), "test -e /built")
        self.d.run("rm", "--all")
        self.d.run("image", "rm", "warm")
        self.d.run("image", "rm", "built")
        self.assertEqual(self.d.json("snapshot", "ls"), [])

    def test_watch_sees_every_transition(self):
        watch = subprocess.Popen([lab.AGENTENV, "--socket", self.d.socket, "watch"], stdout=subprocess.PIPE, text=True)
        time.sleep(0.5)
        box = self.start()
        self.d.run("hibernate", box)
        self.d.run("resume", box)
        self.d.run("rm", box)
        seen = []
        while not seen or seen[-1] != "DELETED":
            event = json.loads(watch.stdout.readline())
            seen += [event["to"]] if event["sandbox"] == box else []
        watch.kill()
        watch.communicate()
        self.assertEqual(seen, ["RUNNING", "SNAPSHOTTING", "HIBERNATED", "RESUMING", "RUNNING", "DELETED"])

    def test_hibernated_sandboxes_outlive_the_daemon(self):
        boxes = [self.start() for _ in range(3)]
        for box in boxes:
            self.d.run("hibernate", box)
        self.d.kill()
        self.d.start()
        self.assertEqual([self.state(b) for b in boxes], ["HIBERNATED"] * 3)
        for box in boxes:
            self.d.run("resume", box)
            self.assertEqual(self.ask(box), 1)


class Clock(HibernateTest):
    """What the daemon does by itself."""

    def wait_for(self, box, state, seconds=15):
        deadline = time.monotonic() + seconds
        while self.state(box) != state and time.monotonic() < deadline:
            time.sleep(0.05)
        self.assertEqual(self.state(box), state)

    def test_idle_freezes_then_hibernates_and_a_command_wakes(self):
        box = self.start("--idle-freeze", "0.3s", "--idle-hibernate", "2s")
        self.wait_for(box, "FROZEN")
        self.assertEqual(self.ask(box), 1)
        self.wait_for(box, "HIBERNATED")
        self.d.kill()
        self.d.start()
        self.assertEqual(self.ask(box), 2, "woken after a restart, too")
        self.wait_for(box, "HIBERNATED")

    def test_the_second_step_does_not_wait_for_the_first(self):
        """What freezing an idle sandbox took nothing away from the time until it is hibernated."""
        watch = subprocess.Popen([lab.AGENTENV, "--socket", self.d.socket, "watch"], stdout=subprocess.PIPE, text=True)
        self.addCleanup(watch.stdout.close)
        self.addCleanup(watch.wait)
        self.addCleanup(watch.kill)
        time.sleep(0.5)
        box = self.start("--idle-freeze", "0.2s", "--idle-hibernate", "0.4s")
        at = {}
        while "HIBERNATED" not in at:
            event = json.loads(watch.stdout.readline())
            if event["sandbox"] == box:
                at.setdefault(event["to"], event["at_ms"])
        self.assertLess(at["SNAPSHOTTING"] - at["FROZEN"], 4000)
        for _ in range(3):  # and again after a command, which may come in the very moment
            self.ask(box)
            self.wait_for(box, "HIBERNATED", 30)

    def test_the_end_of_its_time_can_be_hibernation(self):
        boxes = [self.start("--ttl", "2s", "--ttl-hibernate") for _ in range(3)]
        for box in boxes:
            self.wait_for(box, "HIBERNATED")
        self.d.run("resume", boxes[0])
        self.assertEqual(self.ask(boxes[0]), 1)

    def test_a_pinned_one_stays(self):
        pinned = self.start("--ttl", "0.2s", "--pin", "--idle-hibernate", "0.2s")
        away = self.start("--idle-hibernate", "0.1s")
        self.wait_for(away, "HIBERNATED", 30)
        self.d.run("policy", away, "--ttl", "0.1s")
        deadline = time.monotonic() + 30
        while len(self.d.json("ls", "-a")) > 1 and time.monotonic() < deadline:
            time.sleep(0.05)
        self.assertEqual([(s["id"], s["state"]) for s in self.d.json("ls", "-a")], [(pinned, "RUNNING")])


class Kills(HibernateTest):
    """Whatever is killed in the middle: the sandbox runs on, or its last checkpoint is whole."""

    @staticmethod
    def read(path):
        try:
            with open(path) as f:
                return f.read()
        except OSError:
            return ""

    def children(self, pid):
        return [int(p) for p in self.read("/proc/%d/task/%d/children" % (pid, pid)).split()]

    def criu_pids(self):
        return [p for spawner in self.helpers for p in self.children(spawner)
                if self.read("/proc/%d/cmdline" % p).startswith("criu")]

    def operate(self, box):
        """One operation, which may fail because of the kill."""
        name = random.choice(["hibernate", "resume", "snapshot", "rollback"])
        args = [name, box] + (["--engine", "criu"] if name == "snapshot" else [])
        subprocess.run([lab.AGENTENV, "--socket", self.d.socket, *args], capture_output=True)

    def settle(self, box):
        """It can be asked again, after a resume or, when processes were lost, a rollback."""
        state = self.state(box)
        self.assertIn(state, ("RUNNING", "FROZEN", "HIBERNATED", "DEAD"))
        if state == "HIBERNATED":
            self.d.run("resume", box)
        answer = self.d.run("exec", box, "witness", "ask", check=False)
        if answer.returncode != 0:
            self.d.run("rollback", box)
            self.ask(box)
            return 1
        return 0

    def kill_rounds(self, kill):
        random.seed(int(os.environ.get("LONGHAUL_SEED", "1")))
        box = self.start()
        self.d.run("hibernate", box)
        self.d.run("resume", box)
        lost = 0
        for _ in range(KILLS):
            worker = threading.Thread(target=self.operate, args=(box,))
            worker.start()
            kill()
            worker.join()
            lost += self.settle(box)
            self.assertEqual(self.d.audit(), [])
        return lost

    def test_kill_9_of_the_daemon(self):
        def kill():
            time.sleep(random.uniform(0, 0.6))
            self.d.kill()
            self.d.start()
        self.assertEqual(self.kill_rounds(kill), 0, "a killed daemon costs no process")

    def test_kill_9_of_criu(self):
        self.helpers = [p for t in os.listdir("/proc/%d/task" % self.d.process.pid)
                        for p in map(int, self.read("/proc/%d/task/%s/children" % (self.d.process.pid, t)).split())]
        killed = []

        def kill():
            deadline = time.monotonic() + 0.7
            while not self.criu_pids() and time.monotonic() < deadline:
                time.sleep(0.001)
            time.sleep(random.uniform(0, 0.05))
            for pid in self.criu_pids():
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
        lost = self.kill_rounds(kill)
        self.assertTrue(killed, "no kill met a criu")
        print("criu killed %d times, processes lost %d times" % (len(killed), lost), end=" ... ")


if __name__ == "__main__":
    lab.main()
