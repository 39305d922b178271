"""What the tests of agentenvd share: a daemon of one's own, the command, a gRPC client, a busybox image,
and counts of what must not be left over."""
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

AGENTENVD, AGENTENV, PROTO = sys.argv[1:4]
SOAK = bool(os.environ.get("LONGHAUL_SOAK"))
APPLETS = ("sh ls cat echo sleep true false mkdir ln dd env rm mv seq head kill pwd chmod touch readlink "
           "stat mkfifo wc test yes find tail date md5sum tty stty").split()


def must_work():
    named = os.environ.get("LONGHAUL_MUST_WORK", "").split(",")
    return "sandbox" in named or "1" in named


def missing():
    """Why sandboxes cannot run here, or None."""
    out = subprocess.run([AGENTENV, "doctor", "-o", "json"], capture_output=True, text=True)
    if out.returncode == 0:
        return None
    return out.stdout + out.stderr


def require_sandboxes():
    why = missing()
    if why and must_work():
        sys.exit("sandboxes must work here: " + why)
    if why:
        print("SKIPPED, sandboxes are missing:", why)
        sys.exit(77)


def make_root(path):
    """A root file system made from busybox."""
    for d in "bin etc tmp proc dev root work".split():
        os.makedirs(os.path.join(path, d))
    shutil.copy("/bin/busybox", os.path.join(path, "bin/busybox"))
    for a in APPLETS:
        os.symlink("busybox", os.path.join(path, "bin", a))
    with open(os.path.join(path, "etc/passwd"), "w") as f:
        f.write("root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000::/work:/bin/sh\n")
    os.chmod(os.path.join(path, "tmp"), 0o1777)


class Daemon:
    """One agentenvd with its state in a temporary directory."""
    args = ()  # more of them

    def __init__(self, state=None):
        self.dir = tempfile.mkdtemp(prefix="agentenvd-test-")
        self.state = state or os.path.join(self.dir, "state")
        self.socket = os.path.join(self.dir, "s")
        self.cgroup = "agentenvd-test-%d-%s" % (os.getpid(), os.path.basename(self.dir)[-6:])
        self.log = open(os.path.join(self.dir, "log"), "ab")
        self.process = None
        self.start()

    def start(self):
        self.process = subprocess.Popen(
            [AGENTENVD, "--state", self.state, "--socket", self.socket, "--cgroup", self.cgroup, *self.args],
            stderr=self.log)
        deadline = time.monotonic() + 30
        while self.run("ls", check=False).returncode != 0:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("agentenvd does not start:\n" + self.log_text())
            time.sleep(0.05)

    def log_text(self):
        with open(os.path.join(self.dir, "log")) as f:
            return f.read()

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=15)

    def close(self):
        """Everything goes; returns what was left."""
        if self.process.poll() is not None:
            self.start()
        self.run("rm", "--all")
        left = self.leftovers()
        status = self.stop()
        self.log.close()
        shutil.rmtree(self.dir)
        return left + ([] if status == 0 else ["exit status %d" % status])

    def run(self, *args, check=True, binary=False, **kw):
        r = subprocess.run([AGENTENV, "--socket", self.socket, *args], capture_output=True,
                           text=not binary, **kw)
        if check and r.returncode != 0:
            raise AssertionError("agentenv %s: %d\n%s\n%s" % (args, r.returncode, r.stderr,
                                                              self.log_text()[-2000:]))
        return r

    def out(self, *args, **kw):
        return self.run(*args, **kw).stdout.strip()

    def json(self, *args, **kw):
        return json.loads(self.run(*args, "-o", "json", **kw).stdout)

    def sh(self, box, script, **kw):
        return self.run("exec", box, "sh", "-c", script, **kw)

    def audit(self):
        return self.json("audit", check=False)[0]["problems"]

    def import_image(self, name="bb"):
        root = os.path.join(self.dir, "root")
        if not os.path.exists(root):
            make_root(root)
        self.run("image", "import", name, root)

    # ---- what must not be left ----

    def cgroups(self):
        found = []
        for base, dirs, _ in os.walk("/sys/fs/cgroup"):
            if os.path.basename(base) == self.cgroup:
                found += [os.path.join(base, d) for d in dirs]
        return found

    def leftovers(self):
        self.run("engines", check=False)  # returns when the self-test is over, whose sandbox is none of ours
        boxes = os.path.join(self.state, "boxes")
        left = ["directory " + d for d in os.listdir(boxes)] + ["cgroup " + c for c in self.cgroups()]
        with open("/proc/self/mountinfo") as f:
            left += ["mount " + line for line in f if self.dir in line]
        return left


class DaemonTest(unittest.TestCase):
    """Every class has a daemon; every test cleans up, and what it leaves is its failure."""

    @classmethod
    def setUpClass(cls):
        cls.d = Daemon()
        cls.d.import_image()

    @classmethod
    def tearDownClass(cls):
        left = cls.d.close()
        assert not left, left

    def tearDown(self):
        self.d.run("rm", "--all")
        self.d.run("gc", "--grace", "0.001")
        self.assertEqual(self.d.leftovers(), [])
        self.assertEqual(self.d.audit(), [])
        self.assertEqual(os.listdir(self.d.state + "/layers"), [])


class ClientTest(DaemonTest):
    """With a gRPC client of its own, made of the stubs that the class names as `pb`."""

    def setUp(self):
        self.c = Client(self.pb, self.d.socket)

    def tearDown(self):
        self.c.close()
        super().tearDown()

    def restart(self):
        """kill -9 and a new daemon; with a new connection, as the old one may not have noticed yet."""
        self.d.kill()
        self.d.start()
        self.c.close()
        self.c = Client(self.pb, self.d.socket)


def made_by_protoc(module, *names):
    out = tempfile.mkdtemp(prefix="agentenvd-pb-")
    subprocess.run(["protoc", "--proto_path=" + PROTO, "--python_out=" + out, *names], check=True)
    sys.path[:0] = [out, os.path.join(out, os.path.dirname(names[-1]))]
    made = importlib.import_module(module)
    shutil.rmtree(out)
    return made


def stubs():
    """The message classes of the schemas."""
    return made_by_protoc("longhaul.sandbox.v1.sandbox_pb2", "longhaul/task/v1/task.proto",
                          "longhaul/sandbox/v1/sandbox.proto")


def reflection_stubs():
    """Not as a part of "grpc", which is another package."""
    return made_by_protoc("reflection_pb2", "grpc/reflection/v1alpha/reflection.proto")


class Client:
    """longhaul.sandbox.v1.Sandboxes through Python's gRPC."""

    def __init__(self, pb, socket):
        import grpc
        self.pb = pb
        self.channel = grpc.insecure_channel("unix:" + socket, options=[
            ("grpc.max_receive_message_length", 64 << 20), ("grpc.use_local_subchannel_pool", 1),
            ("grpc.max_reconnect_backoff_ms", 200)])
        self.service = pb.DESCRIPTOR.services_by_name["Sandboxes"]

    def call(self, method, timeout=30, **fields):
        m = self.service.methods_by_name[method]
        request = getattr(self.pb, m.input_type.name)(**fields)
        reply = getattr(self.pb, m.output_type.name, None)
        path = "/longhaul.sandbox.v1.Sandboxes/" + method
        make = self.channel.unary_stream if method in ("Exec", "Watch", "WatchFiles", "Download") \
            else self.channel.unary_unary
        return make(path, type(request).SerializeToString, reply.FromString)(request, timeout=timeout)

    def sh(self, box, script, **fields):
        """Exit status and stdout."""
        out, status = b"", None
        for e in self.call("Exec", id=box, argv=["sh", "-c", script], **fields):
            out += e.out
            if e.HasField("exit"):
                status = e.exit.status
        return status, out.decode()

    def close(self):
        self.channel.close()


def main():
    require_sandboxes()
    result = unittest.main(argv=sys.argv[:1], exit=False, verbosity=2).result
    sys.exit(0 if result.wasSuccessful() and result.testsRun else 1)
