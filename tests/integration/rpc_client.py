#!/usr/bin/python3
"""rpc_client.py ECHO_SERVER PROTO_DIR: a client of another make (Python's grpcio) against the server of
proto/rpc.h.  What goes over the wire is gRPC only if somebody else's gRPC says so."""
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import unittest

import grpc

SERVER, PROTO_DIR = sys.argv[1], sys.argv[2]
SERVICE = "/longhaul.test.v1.Echo/"
OPTIONS = [("grpc.max_reconnect_backoff_ms", 500), ("grpc.initial_reconnect_backoff_ms", 50),
           ("grpc.use_local_subchannel_pool", 1)]


def raw(message):
    return message if isinstance(message, bytes) else message.SerializeToString()


class Rpc(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.dir = tempfile.TemporaryDirectory(prefix="lh-rpc-py-")
        subprocess.run(["protoc", f"--proto_path={PROTO_DIR}", f"--python_out={cls.dir.name}",
                        "test.proto"], check=True)
        health = os.path.join(PROTO_DIR, "../../proto")
        subprocess.run(["protoc", f"--proto_path={health}", f"--python_out={cls.dir.name}",
                        "grpc/health/v1/health.proto"], check=True)
        sys.path.insert(0, cls.dir.name)
        sys.path.insert(0, os.path.join(cls.dir.name, "grpc/health/v1"))
        import health_pb2
        import test_pb2
        cls.pb, cls.health = test_pb2, health_pb2
        cls.path = os.path.join(cls.dir.name, "s")
        cls.start_server()
        cls.channel = cls.connect()

    @classmethod
    def tearDownClass(cls):
        cls.channel.close()
        cls.server.send_signal(signal.SIGTERM)
        assert cls.server.wait(timeout=5) == 0
        assert not os.path.exists(cls.path)
        cls.dir.cleanup()

    @classmethod
    def start_server(cls):
        cls.server = subprocess.Popen([SERVER, cls.path])

    @classmethod
    def connect(cls):
        channel = grpc.insecure_channel("unix:" + cls.path, options=OPTIONS)
        grpc.channel_ready_future(channel).result(timeout=10)
        return channel

    def unary(self, method, request, reply, channel=None, **options):
        call = (channel or self.channel).unary_unary(method, raw, reply.FromString)
        return call(request, **{"timeout": 10, **options})

    def stream(self, method, request, reply, **options):
        call = self.channel.unary_stream(method, raw, reply.FromString)
        return call(request, **{"timeout": 10, **options})

    def echo(self, channel=None, timeout=10, **fields):
        return self.unary(SERVICE + "Echo", self.pb.EchoRequest(**fields), self.pb.EchoReply,
                          channel, timeout=timeout)

    def refused(self, code, call, *args, **fields):
        with self.assertRaises(grpc.RpcError) as caught:
            result = call(*args, **fields)
            list(result)
        self.assertEqual(caught.exception.code(), code, caught.exception.details())
        return caught.exception.details()

    def test_unary(self):
        reply = self.echo(text="h\u00e9llo", payload=b"\0\xff")
        self.assertEqual((reply.text, reply.payload), ("h\u00e9llo", b"\0\xff"))
        self.assertEqual(reply.peer_uid, os.geteuid())
        self.assertTrue(9000 < reply.left_ms <= 10200, reply.left_ms)  # rounded up on the wire
        self.assertEqual(self.echo(timeout=None).left_ms, -1)

    def test_every_status_and_its_details(self):
        for code in grpc.StatusCode:
            if code is grpc.StatusCode.OK:
                continue
            details = self.refused(code, self.echo, text="x", fail=code.value[0])
            self.assertEqual(details, 'asked to fail: \u20ac "x"')

    def test_stream(self):
        replies = list(self.stream(SERVICE + "Count", self.pb.CountRequest(n=3000),
                                   self.pb.CountReply))
        self.assertEqual([r.i for r in replies], list(range(3000)))
        self.refused(grpc.StatusCode.NOT_FOUND, self.stream, SERVICE + "Count",
                     self.pb.CountRequest(n=2, fail=5), self.pb.CountReply)

    def test_deadline(self):
        start = time.monotonic()
        self.refused(grpc.StatusCode.DEADLINE_EXCEEDED, self.echo, sleep_ms=20000, timeout=0.3)
        self.assertLess(time.monotonic() - start, 2)

    def cancelled(self):
        return self.unary(SERVICE + "Stats", self.pb.StatsRequest(), self.pb.StatsReply).cancelled

    def test_cancel(self):
        before = self.cancelled()
        replies = self.stream(SERVICE + "Count", self.pb.CountRequest(n=100000, interval_ms=5),
                              self.pb.CountReply, timeout=60)
        self.assertEqual([next(replies).i, next(replies).i], [0, 1])
        replies.cancel()
        deadline = time.monotonic() + 3
        while self.cancelled() <= before:
            self.assertLess(time.monotonic(), deadline, "the handler never noticed")
            time.sleep(0.01)

    def test_health(self):
        request, reply = self.health.HealthCheckRequest, self.health.HealthCheckResponse
        check, watch = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
        for name in ("", "longhaul.test.v1.Echo"):
            self.assertEqual(self.unary(check, request(service=name), reply).status, reply.SERVING)
        self.refused(grpc.StatusCode.NOT_FOUND, self.unary, check, request(service="x"), reply)
        watching = self.stream(watch, request(service=""), reply)
        self.assertEqual(next(watching).status, reply.SERVING)
        watching.cancel()
        unknown = self.stream(watch, request(service="x"), reply)
        self.assertEqual(next(unknown).status, reply.SERVICE_UNKNOWN)
        unknown.cancel()
        self.refused(grpc.StatusCode.INVALID_ARGUMENT, self.unary, check, b"\x0a\x05a", reply)

    def test_hostile_requests(self):
        invalid = grpc.StatusCode.INVALID_ARGUMENT
        for garbage in (b"\xff" * 100, b"\x0a\x02\xc3\x28", b"\x0a\x03a\0b", b"\x0b\x0c", b"\x0a"):
            details = self.refused(invalid, self.unary, SERVICE + "Echo", garbage,
                                   self.pb.EchoReply)
            self.assertIn("longhaul.test.v1.EchoRequest, byte", details)
        self.refused(grpc.StatusCode.RESOURCE_EXHAUSTED, self.echo, payload=bytes(2 << 20))
        for method in (SERVICE + "Nope", "/no.Such/Method", "/x"):
            self.refused(grpc.StatusCode.UNIMPLEMENTED, self.unary, method, b"", self.pb.EchoReply)
        self.assertEqual(self.echo(text="still here").text, "still here")

    def test_eight_clients(self):
        wrong = []

        def work(number):
            with self.connect() as channel:
                for i in range(50):
                    text = f"{number}-{i}"
                    if self.echo(channel, text=text).text != text:
                        wrong.append(text)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        self.assertEqual(wrong, [])

    def test_restart_with_the_same_channel(self):
        self.echo(text="before")
        self.server.kill()
        self.server.wait()
        self.refused(grpc.StatusCode.UNAVAILABLE, self.echo)
        self.start_server()
        call = self.channel.unary_unary(SERVICE + "Echo", raw, self.pb.EchoReply.FromString)
        start = time.monotonic()
        reply = call(self.pb.EchoRequest(), timeout=10, wait_for_ready=True)
        self.assertEqual(reply.server_pid, self.server.pid)
        self.assertLess(time.monotonic() - start, 3)

    def test_connections_that_speak_something_else(self):
        for bytes_ in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 4096, os.urandom(4096),
                       b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 64):
            with socket.socket(socket.AF_UNIX) as s:
                s.connect(self.path)
                try:
                    s.sendall(bytes_)
                except BrokenPipeError:
                    pass  # it had seen enough
                self.assertEqual(self.echo(text="meanwhile").text, "meanwhile")

    @unittest.skipUnless(os.geteuid() == 0, "needs another user")
    def test_other_users_are_disconnected(self):
        program = ("import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]);"
                   "s.settimeout(5); sys.exit(0 if s.recv(1) == b'' else 1)")
        command = [sys.executable, "-c", program, self.path]
        self.assertNotEqual(subprocess.run(command, user=65534, stderr=subprocess.DEVNULL).returncode,
                            0, "the socket is 0600")
        os.chmod(self.dir.name, 0o755)
        os.chmod(self.path, 0o666)
        self.assertEqual(subprocess.run(command, user=65534).returncode, 0)
        os.chmod(self.path, 0o600)

    def test_nothing_is_left_of_a_connection(self):
        def open_files():
            return len(os.listdir(f"/proc/{self.server.pid}/fd"))

        before = open_files()
        for _ in range(30):
            with self.connect() as channel:
                self.echo(channel)
        deadline = time.monotonic() + 5
        while open_files() > before:
            self.assertLess(time.monotonic(), deadline, f"{open_files()} files, {before} before")
            time.sleep(0.05)

    def test_second_server_is_refused(self):
        second = subprocess.run([SERVER, self.path], capture_output=True, text=True, timeout=10)
        self.assertEqual(second.returncode, 1)
        self.assertIn("socket in use", second.stderr)


unittest.main(argv=sys.argv[:1])
