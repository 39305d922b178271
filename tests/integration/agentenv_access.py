#!/usr/bin/python3
"""agentenv_access.py AGENTENVD AGENTENV PROTO_DIR: callers by TLS, what their tokens let them do, and what the audit log
says of it."""
import json
import os
import re
import subprocess
import tempfile
import threading
import time
import unittest
import uuid

import grpc

import agentenv_lab as lab

pb = lab.stubs()


class TlsDaemon(lab.Daemon):
    def start(self):
        self.cert, self.key = os.path.join(self.dir, "cert.pem"), os.path.join(self.dir, "key.pem")
        if not os.path.exists(self.key):
            subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
                            "-nodes", "-days", "1", "-subj", "/CN=localhost", "-addext",
                            "subjectAltName=DNS:localhost", "-keyout", self.key, "-out", self.cert],
                           check=True, capture_output=True)
        self.process = subprocess.Popen(
            [lab.AGENTENVD, "--state", self.state, "--socket", self.socket, "--cgroup", self.cgroup,
             "--listen", "localhost:0", "--tls-cert", self.cert, "--tls-key", self.key], stderr=self.log)
        deadline = time.monotonic() + 30
        while self.run("ls", check=False).returncode != 0:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("agentenvd does not start:\n" + self.log_text())
            time.sleep(0.05)
        self.port = int(re.findall(r"serving by TLS.* port=(\d+)", self.log_text())[-1])


class Remote(lab.Client):
    """The same client, by TLS and with a token."""

    def __init__(self, d, secret):
        self.pb = pb
        self.service = pb.DESCRIPTOR.services_by_name["Sandboxes"]
        with open(d.cert, "rb") as f:
            tls = grpc.ssl_channel_credentials(f.read())
        if secret:
            tls = grpc.composite_channel_credentials(tls, grpc.access_token_call_credentials(secret))
        self.channel = grpc.secure_channel("localhost:%d" % d.port, tls)


class Access(lab.DaemonTest):
    @classmethod
    def setUpClass(cls):
        cls.d = TlsDaemon()
        cls.d.import_image()

    def setUp(self):
        self.clients = []

    def tearDown(self):
        for c in self.clients:
            c.close()
        for t in self.d.json("token", "ls"):
            self.d.run("token", "rm", t["name"])
        super().tearDown()

    def token(self, *args):
        return self.d.out("token", "create", *args)

    def remote(self, secret):
        self.clients.append(Remote(self.d, secret))
        return self.clients[-1]

    def create(self, c, **fields):
        return c.call("Create", idempotency_key=uuid.uuid4().hex, image="bb", **fields)

    def refused(self, code, call):
        with self.assertRaises(grpc.RpcError) as e:
            r = call()
            if not hasattr(r, "DESCRIPTOR"):
                list(r)
        self.assertEqual(e.exception.code(), code, e.exception.details())

    def test_who_shows_no_good_token_gets_nothing(self):
        for secret in (None, "x", "0" * 64, self.token("gone")):
            self.d.run("token", "rm", "gone", check=False)
            self.refused(grpc.StatusCode.UNAUTHENTICATED, lambda: self.remote(secret).call("List"))
        short = self.remote(self.token("short", "--ttl", "1s"))
        short.call("List")
        time.sleep(1.1)
        self.refused(grpc.StatusCode.UNAUTHENTICATED, lambda: short.call("List"))
        plain = grpc.insecure_channel("localhost:%d" % self.d.port)
        with self.assertRaises(grpc.RpcError):
            plain.unary_unary("/longhaul.sandbox.v1.Sandboxes/List")(b"", timeout=3)
        plain.close()

    def test_scopes(self):
        denied = grpc.StatusCode.PERMISSION_DENIED
        read, use, admin = (self.remote(self.token(s, "-s", s)) for s in ("read", "use", "admin"))
        box = self.create(use).id
        self.assertEqual(use.sh(box, "echo hi"), (0, "hi\n"))
        self.assertEqual([s.id for s in read.call("List").sandboxes], [box])
        self.refused(denied, lambda: self.create(read))
        self.refused(denied, lambda: read.call("Exec", id=box, argv=["true"]))
        self.refused(denied, lambda: use.call("Gc"))
        self.refused(denied, lambda: use.call("RemoveImage", name="bb"))
        self.refused(denied, lambda: self.create(use, rules={"egress": ["example.org:443"]}))
        self.refused(denied, lambda: self.create(use, rules={"ports": [{"port": 80}]}))
        self.create(admin, rules={"ports": [{"port": 80}]})
        admin.call("Gc", grace_ms=1)
        for c in (read, use, admin):
            self.refused(denied, lambda: c.call("CreateToken", name="more", scope=pb.SCOPE_ADMIN))
            self.refused(denied, lambda: c.call("ListTokens"))

    def test_a_prefix_is_a_wall(self):
        denied = grpc.StatusCode.PERMISSION_DENIED
        a, b = (self.remote(self.token(n, "--owner", n + "/")) for n in ("a", "b"))
        box = self.create(a, owner="a/1").id
        snap = a.call("TakeSnapshot", id=box, idempotency_key="s", retain_owner="a/keep").id
        self.assertEqual(a.sh(box, "true")[0], 0)
        self.refused(denied, lambda: self.create(a, owner="b/1"))
        self.refused(denied, lambda: self.create(a))
        for method, fields in (("Exec", {"argv": ["true"]}), ("Show", {}), ("Remove", {}), ("Freeze", {}),
                               ("Download", {"path": "/etc/passwd"}), ("ExecInput", {"exec_id": "x"}),
                               ("TakeSnapshot", {"idempotency_key": "x", "retain_owner": "b/x"})):
            self.refused(denied, lambda: b.call(method, id=box, **fields))
        for method, fields in (("List", {}), ("List", {"owner_prefix": "a/"}), ("Remove", {"owner_prefix": ""}),
                               ("Remove", {"owner_prefix": "a/"}), ("ListSnapshots", {}), ("Watch", {}),
                               ("Retain", {"snapshot": snap, "owner": "b/1"}),
                               ("Release", {"snapshot": snap, "owner": "a/keep"})):
            self.refused(denied, lambda: b.call(method, **fields))
        self.refused(denied, lambda: b.call("Create", idempotency_key="k", snapshot=snap, owner="b/1"))
        self.assertEqual(len(b.call("List", owner_prefix="b/").sandboxes), 0)
        a.call("Release", snapshot=snap, owner="a/keep")

    def test_a_number_of_sandboxes(self):
        c = self.remote(self.token("few", "--owner", "few/", "--max", "3"))
        made, refused = [], []

        def create():
            try:
                made.append(self.create(c, owner="few/x").id)
            except grpc.RpcError as e:
                refused.append(e.code())
        threads = [threading.Thread(target=create) for _ in range(8)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        self.assertLessEqual(len(made), 3, "never more; one that is being made may count twice")
        self.assertEqual(set(refused), {grpc.StatusCode.RESOURCE_EXHAUSTED})
        while len(made) < 3:
            create()
        self.assertEqual(len(c.call("List", owner_prefix="few/").sandboxes), 3)
        self.refused(grpc.StatusCode.RESOURCE_EXHAUSTED,
                     lambda: c.call("Fork", id=made[0], idempotency_key="f", count=1))
        c.call("Remove", id=made[0])
        self.create(c, owner="few/y")

    def command(self, secret, *args, ca=None):
        """The command of who is elsewhere, in a clean environment."""
        path = os.path.join(self.d.dir, "token")
        with open(path, "w") as f:
            f.write(secret + "\n")
        env = {"PATH": os.environ["PATH"], "AGENTENV_ADDRESS": "localhost:%d" % self.d.port,
               "AGENTENV_TOKEN_FILE": path}
        return subprocess.run([lab.AGENTENV, "--ca", ca or self.d.cert, *args], env=env, capture_output=True,
                              text=True, timeout=60, stdin=subprocess.DEVNULL)

    def test_the_command_by_tls(self):
        secret = self.token("me", "--owner", "me/")
        r = self.command(secret, "start", "bb", "--owner", "me/1")
        self.assertEqual(r.returncode, 0, r.stderr)
        box = r.stdout.strip()
        r = self.command(secret, "exec", box, "sh", "-c", "echo out; exit 3")
        self.assertEqual((r.returncode, r.stdout), (3, "out\n"), r.stderr)
        big, back = self.d.dir + "/big", self.d.dir + "/back"
        with open(big, "wb") as f:
            f.write(os.urandom(5 << 20))
        self.assertEqual(self.command(secret, "cp", big, box + ":/work/big").returncode, 0)
        self.assertEqual(self.command(secret, "cp", box + ":/work/big", back).returncode, 0)
        subprocess.run(["cmp", big, back], check=True)
        r = self.command(secret, "gc")
        self.assertEqual(r.returncode, 1)
        self.assertIn("does not allow this Sandboxes/Gc", r.stderr)
        self.assertEqual(self.command(secret, "rm", box).returncode, 0)
        self.d.run("token", "rm", "me")
        r = self.command(secret, "ls")
        self.assertEqual(r.returncode, 1, r.stderr)

    def test_the_command_believes_nobody(self):
        secret = self.token("me")
        other = self.d.dir + "/other.pem"
        subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
                        "-days", "1", "-subj", "/CN=localhost", "-keyout", "/dev/null", "-out", other],
                       check=True, capture_output=True)
        r = self.command(secret, "ls", ca=other)
        self.assertEqual(r.returncode, 75, "the server shows a certificate of somebody else: " + r.stderr)
        self.assertEqual(self.command(secret, "--address", "localhost:1", "ls").returncode, 75)
        r = self.command(secret, "--address", "127.0.0.1:%d" % self.d.port, "ls")
        self.assertEqual(r.returncode, 75, "the certificate is for another name")
        self.assertEqual(self.command(secret, "--token-file", "/nowhere", "ls").returncode, 1)

    def test_the_audit_log(self):
        c = self.remote(self.token("who", "--owner", "who/"))
        box = self.create(c, owner="who/\u00fc\n\"x").id
        self.refused(grpc.StatusCode.PERMISSION_DENIED, lambda: c.call("Gc"))
        self.refused(grpc.StatusCode.UNAUTHENTICATED, lambda: self.remote("bad").call("List"))
        self.d.run("ls")
        self.d.run("rm", box)
        with open(self.d.state + "/audit.log") as f:
            lines = [json.loads(line) for line in f]
        entries = [(e["who"], e["method"], e["result"]) for e in lines][-5:]
        self.assertEqual(entries, [
            ("uid:0", "Sandboxes/CreateToken", "OK"), ("token:who", "Sandboxes/Create", "OK"),
            ("token:who", "Sandboxes/Gc", "PERMISSION_DENIED"), ("token:", "Sandboxes/List", "UNAUTHENTICATED"),
            ("uid:0", "Sandboxes/Remove", "OK")])
        self.assertEqual(lines[-4]["owner"], "who/\u00fc\n\"x")
        self.assertEqual(lines[-1]["sandbox"], box)
        self.assertEqual(os.stat(self.d.state + "/audit.log").st_mode & 0o777, 0o600)


if __name__ == "__main__":
    lab.main()
