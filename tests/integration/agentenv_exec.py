#!/usr/bin/python3
"""agentenv_exec.py AGENTENVD AGENTENV PROTO_DIR: commands that are talked to while they run, and that outlive
their client and the daemon (I1)."""
import signal
import threading
import unittest
import uuid

import grpc

import agentenv_lab as lab

pb = lab.stubs()


class ExecTest(lab.ClientTest):
    pb = pb

    def setUp(self):
        super().setUp()
        self.box = self.c.call("Create", idempotency_key=uuid.uuid4().hex, image="bb").id

    def exec(self, name, script=None, **fields):
        if script:
            fields["argv"] = ["sh", "-c", script]
        return self.c.call("Exec", id=self.box, exec_id=name, **fields)

    def tell(self, name, **fields):
        return self.c.call("ExecInput", id=self.box, exec_id=name, **fields)

    def code(self, call):
        with self.assertRaises(grpc.RpcError) as e:
            r = call()
            if not hasattr(r, "DESCRIPTOR"):
                list(r)
        return e.exception.code()

    @staticmethod
    def rest(events):
        """Output, its offset, and the exit."""
        out, at, end = b"", None, None
        for e in events:
            at = e.offset if at is None and (e.out or e.err) else at
            out += e.out + e.err
            end = e.exit if e.HasField("exit") else end
        return out, at, end


class Talk(ExecTest):
    def test_input_by_call(self):
        events = self.exec("cat", "cat", stdin_open=True)
        self.assertEqual(next(events).joined.stdin_bytes, 0)
        self.tell("cat", stdin=b"one ")
        self.assertEqual(next(events).out, b"one ")
        self.tell("cat", stdin=b"one two", stdin_offset=0)
        self.tell("cat", stdin_end=True)
        out, at, end = self.rest(events)
        self.assertEqual((out, at, end.status), (b"two", 4, 0))

    def test_terminal(self):
        events = self.exec("t", "stty size; read x; stty size; tty >&2", terminal={"rows": 20, "cols": 70})
        self.assertTrue(next(events).HasField("joined"))
        self.assertEqual(next(events).out, b"20 70\r\n")
        self.tell("t", resize={"rows": 21, "cols": 71}, stdin=b"\n")
        out, _, end = self.rest(events)
        self.assertEqual((out, end.status), (b"\r\n21 71\r\n/dev/pts/0\r\n", 0))

    def test_signal(self):
        events = self.exec("s", "trap 'echo hup; exit 3' HUP; echo ready; while :; do sleep 0.05; done")
        self.assertTrue(next(events).HasField("joined"))
        self.assertEqual(next(events).out, b"ready\n")
        self.tell("s", signal=signal.SIGHUP)
        out, _, end = self.rest(events)
        self.assertIn(b"hup\n", out)
        self.assertEqual(end.status, 3)

    def test_limits(self):
        out, _, end = self.rest(self.c.call("Exec", id=self.box, argv=["sh", "-c", "ulimit -n; ulimit -t"],
                                            limits={"open_files": 20, "cpu_seconds": 5}))
        self.assertEqual(out, b"20\n5\n")

    def test_refusals(self):
        bad = grpc.StatusCode.INVALID_ARGUMENT
        self.assertEqual(self.code(lambda: self.c.call("Exec", id=self.box, argv=["cat"], stdin_open=True)), bad)
        self.assertEqual(self.code(lambda: self.exec("x", "cat", stdin_open=True, stdin=b"x")), bad)
        self.assertEqual(self.code(lambda: self.exec("a/b", "cat")), bad)
        self.assertEqual(self.code(lambda: self.exec("x", "cat", terminal={"rows": 70000})), bad)
        self.assertEqual(self.code(lambda: self.tell("x", signal=99)), bad)
        self.assertEqual(self.code(lambda: self.exec("never")), grpc.StatusCode.NOT_FOUND)
        self.assertEqual(self.code(lambda: self.tell("never", stdin=b"x")), grpc.StatusCode.FAILED_PRECONDITION)


class Outlive(ExecTest):
    SCRIPT = "echo run >> /work/runs; i=0; while [ $i -lt 60 ]; do i=$((i+1)); echo $i; sleep 0.05; done; exit 7"
    OUTPUT = "".join("%d\n" % i for i in range(1, 61)).encode()

    def once(self, restart):
        events = self.exec("job", self.SCRIPT)
        out = b""
        while len(out) < 20:
            out += next(events).out
        restart(events)
        rest, at, end = self.rest(self.exec("job", self.SCRIPT, offset=len(out)))
        self.assertEqual(at, len(out))
        self.assertEqual((out + rest, end.status), (self.OUTPUT, 7))
        self.assertEqual(self.c.sh(self.box, "cat /work/runs")[1], "run\n", "it ran once")
        again, _, end = self.rest(self.exec("job"))
        self.assertEqual((again, end.status), (self.OUTPUT, 7))

    def test_a_lost_connection(self):
        self.once(lambda events: events.cancel())

    def test_kill_9_of_the_daemon(self):
        def restart(events):
            self.restart()
            with self.assertRaises(grpc.RpcError):
                list(events)
        self.once(restart)

    def test_input_goes_on_after_kill_9(self):
        events = self.exec("in", "cat", stdin_open=True)
        next(events)
        self.tell("in", stdin=b"before ")
        self.assertEqual(next(events).out, b"before ")
        self.restart()
        events = self.exec("in", "cat", stdin_open=True, offset=7)
        taken = next(events).joined.stdin_bytes
        self.assertEqual(taken, 7)
        self.tell("in", stdin=b"after", stdin_offset=taken, stdin_end=True)
        out, at, end = self.rest(events)
        self.assertEqual((out, at, end.status), (b"after", 7, 0))

    def test_one_of_many_callers_runs_it(self):
        ends = []

        def call():
            try:
                ends.append(self.rest(self.exec("same", "echo x >> /work/n; sleep 0.3; exit 2"))[2].status)
            except grpc.RpcError as e:
                ends.append(e.code())
        threads = [threading.Thread(target=call) for _ in range(6)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        self.assertEqual(self.c.sh(self.box, "cat /work/n")[1], "x\n")
        self.assertIn(2, ends)
        self.assertLessEqual(set(ends), {2, grpc.StatusCode.ABORTED})


if __name__ == "__main__":
    lab.main()
