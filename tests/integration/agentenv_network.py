#!/usr/bin/python3
"""agentenv_network.py AGENTENVD AGENTENV PROTO_DIR: what sandboxes reach and what they do not.  A network namespace of
the test's, behind a veth pair, plays the world outside."""
import os
import socket
import subprocess
import sys
import time
import unittest
import urllib.request
import uuid

import grpc

import agentenv_lab as lab

pb = lab.stubs()
lab.APPLETS += ["nc", "httpd"]
PREFIX = "10.%d.%d" % (200 + os.getpid() % 50, os.getpid() // 50 % 250)
WORLD, HERE = PREFIX + ".2", PREFIX + ".1"
SERVER = r'''
import socket, sys, threading
def serve(s, port):
    while True:
        c, peer = s.accept()
        threading.Thread(target=talk, args=(c, peer, port), daemon=True).start()
def talk(c, peer, port):
    data = b""
    while True:
        piece = c.recv(65536)
        if not piece:
            break
        data += piece
    c.sendall(b"%d %d from %s\n" % (port, len(data), peer[0].encode()))
    c.close()
one, two = [socket.create_server((sys.argv[1], port)) for port in (7001, 7002)]
print("ready", flush=True)
threading.Thread(target=serve, args=(one, 7001), daemon=True).start()
serve(two, 7002)
'''


def ip(*args):
    subprocess.run(["ip", *args], check=True)


class World:
    """A namespace with a server on ports 7001 and 7002."""

    def __init__(self):
        self.name = "aenv%d" % (os.getpid() % 100000)
        ip("netns", "add", self.name)
        ip("link", "add", self.name, "type", "veth", "peer", "name", "out", "netns", self.name)
        ip("addr", "add", HERE + "/24", "dev", self.name)
        ip("link", "set", self.name, "up")
        ip("-n", self.name, "addr", "add", WORLD + "/24", "dev", "out")
        ip("-n", self.name, "link", "set", "out", "up")
        self.server = subprocess.Popen(["ip", "netns", "exec", self.name, sys.executable, "-c", SERVER, WORLD],
                                       stdout=subprocess.PIPE, text=True)
        assert self.server.stdout.readline() == "ready\n"

    def close(self):
        self.server.kill()
        self.server.wait()
        self.server.stdout.close()
        ip("link", "del", self.name)
        ip("netns", "del", self.name)


class NamedDaemon(lab.Daemon):
    """Its /etc/hosts knows the world by name."""

    def start(self):
        hosts = os.path.join(self.dir, "hosts")
        with open(hosts, "w") as f:
            f.write("127.0.0.1 localhost evil.test\n%s world.test\n%s here.test\n" % (WORLD, HERE))
        command = "mount --bind %s /etc/hosts && exec %s --state %s --socket %s --cgroup %s" % (
            hosts, lab.AGENTENVD, self.state, self.socket, self.cgroup)
        self.process = subprocess.Popen(["unshare", "-m", "sh", "-c", command], stderr=self.log)
        deadline = time.monotonic() + 30
        while self.run("ls", check=False).returncode != 0:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("agentenvd does not start:\n" + self.log_text())
            time.sleep(0.05)


class Network(lab.DaemonTest):
    @classmethod
    def setUpClass(cls):
        cls.world = World()
        cls.addClassCleanup(cls.world.close)
        cls.d = NamedDaemon()
        cls.d.import_image()

    def setUp(self):
        self.c = lab.Client(pb, self.d.socket)

    def tearDown(self):
        self.c.close()
        super().tearDown()

    def create(self, egress=(), ports=(), **fields):
        return self.c.call("Create", idempotency_key=uuid.uuid4().hex, image="bb",
                           rules={"egress": egress, "ports": ports}, **fields)

    def ask(self, box, host, port, data="hello"):
        """What the server says, or \"\" when there is none."""
        return self.c.sh(box, "printf '%s' | nc -w 5 %s %d 2>/dev/null" % (data, host, port))[1]

    def test_only_what_is_allowed(self):
        box = self.create(["%s:7001" % WORLD, "world.test:7002"]).id
        self.assertEqual(self.ask(box, WORLD, 7001), "7001 5 from %s\n" % HERE)
        self.assertEqual(self.ask(box, "world.test", 7002), "7002 5 from %s\n" % HERE)
        self.assertEqual(self.ask(box, WORLD, 7002), "")
        self.assertEqual(self.ask(box, "world.test", 7001), "")
        self.assertEqual(self.ask(box, PREFIX + ".3", 7001), "")
        none = self.c.call("Create", idempotency_key=uuid.uuid4().hex, image="bb").id
        self.assertEqual(self.ask(none, WORLD, 7001), "")

    def test_a_network(self):
        box = self.create(["%s.0/30:7001,7002" % PREFIX]).id
        self.assertEqual(self.ask(box, WORLD, 7001), "7001 5 from %s\n" % HERE)
        self.assertEqual(self.ask(box, WORLD, 7002), "7002 5 from %s\n" % HERE)
        self.assertEqual(self.ask(box, PREFIX + ".9", 7001), "")

    def test_nothing_of_this_machine(self):
        with socket.create_server(("", 7001)) as s:
            s.settimeout(0.2)
            box = self.create(["127.0.0.1:7001", "%s:7001" % HERE, "localhost:7001", "here.test:7001",
                               "evil.test:7001", "169.254.169.254:80", "0.0.0.0:7001"]).id
            for host in ("127.0.0.1", HERE, "localhost", "here.test", "evil.test", "0.0.0.0", "127.64.0.1"):
                self.assertEqual(self.ask(box, host, 7001), "", host)
            with self.assertRaises(TimeoutError):
                s.accept()

    def test_a_published_port(self):
        box = self.create(ports=[{"port": 8080}])
        port = box.ports[0].host_port
        self.assertEqual(box.ports[0].port, 8080)
        self.c.sh(box.id, "echo page > /work/index.html; httpd -p 127.0.0.1:8080 -h /work")

        def fetch():
            try:
                with urllib.request.urlopen("http://127.0.0.1:%d/" % port, timeout=5) as page:
                    return page.read()
            except OSError:
                return None
        self.assertEqual(fetch(), b"page\n")
        self.d.kill()
        self.assertIsNone(fetch())
        self.d.start()
        self.c.close()
        self.c = lab.Client(pb, self.d.socket)
        self.assertEqual(self.c.call("Show", id=box.id).ports[0].host_port, port)
        self.assertEqual(fetch(), b"page\n", "the next daemon opens it again")
        fork = self.c.call("Fork", id=box.id, idempotency_key=uuid.uuid4().hex, count=1).children[0]
        self.assertNotIn(fork.ports[0].host_port, (0, port))
        with self.assertRaises(grpc.RpcError) as e:
            self.create(ports=[{"port": 1, "host_port": port}])
        self.assertEqual(e.exception.code(), grpc.StatusCode.ALREADY_EXISTS, e.exception.details())
        self.c.call("Remove", id=box.id)
        self.assertIsNone(fetch(), "it ends with the sandbox")

    def test_a_snapshot_keeps_its_rules(self):
        box = self.create(["world.test:7001"], [{"port": 8080}])
        snap = self.c.call("TakeSnapshot", id=box.id, idempotency_key=uuid.uuid4().hex, retain_owner="t").id

        def start(**fields):
            return self.c.call("Create", idempotency_key=uuid.uuid4().hex, snapshot=snap, **fields)
        for again in (start(), self.c.call("Fork", snapshot=snap, idempotency_key="f", count=1).children[0]):
            self.assertEqual(self.ask(again.id, "world.test", 7001), "7001 5 from %s\n" % HERE)
            self.assertEqual(again.ports[0].port, 8080)
            self.assertNotIn(again.ports[0].host_port, (0, box.ports[0].host_port))
        for said in ({"network": 1}, {"network": 2}, {"rules": {"egress": ["world.test:7002"]}}):
            other = start(**said)
            self.assertEqual(self.ask(other.id, "world.test", 7001), "", said)
            self.assertEqual(len(other.ports), 0, "what is said replaces all of it")
        self.c.call("Release", snapshot=snap, owner="t")

    def test_egress_goes_on_after_kill_9(self):
        box = self.create(["world.test:7001"]).id
        self.d.kill()
        self.d.start()
        self.c.close()
        self.c = lab.Client(pb, self.d.socket)
        self.assertEqual(self.ask(box, "world.test", 7001), "7001 5 from %s\n" % HERE)

    def test_much_data_and_many_connections(self):
        box = self.create(["%s:7001" % WORLD]).id
        script = "head -c 20000000 /dev/zero | nc %s 7001" % WORLD
        self.assertEqual(self.c.sh(box, script)[1], "7001 20000000 from %s\n" % HERE)
        script = ("i=0; while [ $i -lt 40 ]; do i=$((i+1)); (echo x | nc %s 7001 >> /work/out) & done; wait; "
                  "wc -l < /work/out" % WORLD)
        self.assertEqual(self.c.sh(box, script)[1], "40\n")

    def test_bad_rules_name_themselves(self):
        for rules in ({"egress": ["*.org:443"]}, {"egress": ["x:0"]}, {"egress": ["0.0.0.0/0:80"]},
                      {"ports": [{"port": 0}]}, {"ports": [{"port": 1, "host_port": 70000}]}):
            with self.assertRaises(grpc.RpcError) as e:
                self.create(**rules)
            self.assertEqual(e.exception.code(), grpc.StatusCode.INVALID_ARGUMENT)
        with self.assertRaises(grpc.RpcError):
            self.create(["x:1"], network=1)

    def test_the_command(self):
        box = self.d.out("start", "bb", "--allow", "%s:7001" % WORLD, "-p", "8080")
        self.assertEqual(self.d.json("ls")[0]["ports"][0]["port"], 8080)
        self.assertEqual(self.ask(box, WORLD, 7001), "7001 5 from %s\n" % HERE)


if __name__ == "__main__":
    lab.main()
