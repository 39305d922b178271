#!/usr/bin/python3
"""agentenv_crowd.py AGENTENVD AGENTENV PROTO_DIR: 64 clients at a time, who think between their requests as agents do.
Only refusals that the documentation names, and nothing left over: descriptors, memory, mounts, threads (I7, I9).
Prints the times of exec; their limit is judged in a soak only, on a machine that does nothing else."""
import collections
import os
import random
import threading
import time
import uuid

import grpc

import agentenv_lab as lab

pb = lab.stubs()
CLIENTS = 64
SECONDS = 120 if lab.SOAK else 10
P99_MS = 20
SHARED = "everybodys"
# Of a sandbox that many use at once (docs/SANDBOXES.md, "One sandbox, many callers"): frozen by another.
DOCUMENTED = {grpc.StatusCode.FAILED_PRECONDITION}


class ClientOfMany(threading.Thread):
    """Has a sandbox of its own, looks at everything, and disturbs the one that all share."""

    def __init__(self, socket, number, until):
        super().__init__()
        self.c, self.rng, self.until = lab.Client(pb, socket), random.Random(number), until
        self.exec_ms, self.refused, self.error = [], collections.Counter(), None
        self.made = 0

    def run(self):
        try:
            while time.monotonic() < self.until:
                self.life(uuid.uuid4().hex)
                self.made += 1
        except Exception as e:  # a thread's failure is its test's
            self.error = e
        self.c.close()

    def life(self, key):
        box = self.c.call("Create", idempotency_key=key, image="bb", owner="crowd", timeout=60).id
        deeds = [self.work, self.work, self.work, self.look, self.snapshot, self.share]
        for _ in range(self.rng.randrange(2, 8)):
            if time.monotonic() >= self.until:
                break
            self.rng.choice(deeds)(box)
            time.sleep(self.rng.uniform(0.2, 1.0))
        self.c.call("Remove", id=box, timeout=60)

    def work(self, box):
        began = time.monotonic()
        status, out = self.c.sh(box, "echo $((6*7))", timeout=60)
        self.exec_ms.append((time.monotonic() - began) * 1000)
        assert (status, out) == (0, "42\n"), (status, out)

    def look(self, box):
        assert box in [s.id for s in self.c.call("List", owner_prefix="crowd", timeout=60).sandboxes]
        self.c.call("ListFiles", id=box, path="/etc", timeout=60)

    def snapshot(self, box):
        self.c.call("TakeSnapshot", id=box, idempotency_key="%s-%d" % (box, self.rng.getrandbits(60)), timeout=60)

    def share(self, box):
        deed = self.rng.choice(["Freeze", "Thaw", "Thaw", "Exec", "Exec"])
        try:
            if deed == "Exec":
                self.c.sh(SHARED, "true", timeout=60)
            else:
                self.c.call(deed, id=SHARED, attempt=0, timeout=60)
        except grpc.RpcError as e:
            if e.code() not in DOCUMENTED:
                raise
            self.refused[e.code().name] += 1


class Crowd(lab.DaemonTest):
    def test_many_clients(self):
        self.crowd(8, 2)  # what is allocated once
        self.clean()
        before = self.counts()
        clients = self.crowd(CLIENTS, SECONDS)
        self.clean()
        after = self.counts()
        times = sorted(ms for c in clients for ms in c.exec_ms)
        refused = sum((c.refused for c in clients), collections.Counter())
        p50, p99 = times[len(times) // 2], times[len(times) * 99 // 100]
        print("%d clients, %d s: %d sandboxes, %d execs, p50 %.1f ms, p99 %.1f ms, refused %s, memory %d -> %d KiB"
              % (CLIENTS, SECONDS, sum(c.made for c in clients), len(times), p50, p99, dict(refused),
                 before["memory"], after["memory"]), end=" ... ")
        self.assertGreater(len(times), CLIENTS)
        for what in ("descriptors", "mounts", "cgroups"):
            self.assertLessEqual(after[what], before[what] + 8, what)
        self.assertLess(after["memory"], before["memory"] + (64 << 10))
        if lab.SOAK and os.getloadavg()[0] < 2:
            self.assertLessEqual(p99, P99_MS)

    def crowd(self, n, seconds):
        shared = self.d.out("start", "bb", "--name", SHARED)
        until = time.monotonic() + seconds
        clients = [ClientOfMany(self.d.socket, i, until) for i in range(n)]
        [c.start() for c in clients]
        [c.join() for c in clients]
        for c in clients:
            self.assertIsNone(c.error)
        self.d.run("rm", shared)
        return clients

    def clean(self):
        self.d.run("rm", "--all")
        self.d.run("gc", "--grace", "0.001")
        self.assertEqual(self.d.audit(), [])

    def counts(self):
        pid = self.d.process.pid
        with open("/proc/%d/status" % pid) as f:
            memory = int(next(line for line in f if line.startswith("VmRSS:")).split()[1])
        with open("/proc/%d/mountinfo" % pid) as f:
            mounts = len(f.readlines())
        return {"descriptors": len(os.listdir("/proc/%d/fd" % pid)), "mounts": mounts,
                "cgroups": len(self.d.cgroups()), "memory": memory}


if __name__ == "__main__":
    lab.main()
