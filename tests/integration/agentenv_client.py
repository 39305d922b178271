#!/usr/bin/python3
"""agentenv_client.py AGENTENVD AGENTENV PROTO_DIR: the service driven by a gRPC client of another make:
life cycle, attempts, idempotency, hostile uploads."""
import io
import os
import tarfile
import threading
import time
import unittest
import uuid

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

import agentenv_lab as lab

pb = lab.stubs()


class ServiceTest(lab.ClientTest):
    pb = pb

    def create(self, key=None, **fields):
        fields.setdefault("image", "bb")
        return self.c.call("Create", idempotency_key=key or uuid.uuid4().hex, **fields)

    def refused(self, code, method, **fields):
        with self.assertRaises(grpc.RpcError) as e:
            r = self.c.call(method, **fields)
            if not hasattr(r, "DESCRIPTOR"):
                list(r)
        self.assertEqual(e.exception.code(), code, e.exception.details())
        self.assertTrue(e.exception.details())
        return e.exception.details()


SLOW_TASK = '''tasks {
  name: "test/slow" revision: 1 licence: "Apache-2.0" split: SPLIT_TRAIN family: "slow"
  prompt { role: ROLE_USER text: "Nothing." }
  budgets { turns: 1 }
  environment { image: "bb" limits { memory_bytes: 67108864 pids: 32 } agent_network: NETWORK_NONE }
  timeouts { verify { ms: 60000 on_timeout: ON_TIMEOUT_INFRA_INVALID } }
  verifier { command: "while ! test -e /work/end; do sleep 0.1; done; echo 1 > \\"$LONGHAUL_REWARD\\"" reward_max: 1 pass_mark: 1 }
  oracle { actions: "true" }
}'''


class Judged(ServiceTest):
    def setUp(self):
        super().setUp()
        with open(self.d.dir + "/slow.textproto", "w") as f:
            f.write(SLOW_TASK)
        self.d.run("task", "register", "--no-verify", f.name)

    def tearDown(self):
        self.d.run("task", "rm", "test/slow")
        super().tearDown()

    def test_what_is_being_judged_is_not_removed_meanwhile(self):
        """It is told so at once, and can be removed afterwards."""
        box = self.create(image=None, task="test/slow").id
        verify = self.c.channel.unary_unary("/longhaul.sandbox.v1.Sandboxes/Verify",
                                            pb.VerifyRequest.SerializeToString, bytes)
        verdict = verify.future(pb.VerifyRequest(id=box), timeout=60)
        self.until(lambda: self.c.call("Show", id=box).state == pb.STATE_FORKING)
        began = time.monotonic()
        why = self.refused(grpc.StatusCode.FAILED_PRECONDITION, "Remove", id=box)
        self.assertLess(time.monotonic() - began, 20)
        self.assertIn("is FORKING: its files are being judged", why)
        verifier, = [s.id for s in self.c.call("List").sandboxes if s.owner == "verifier"]
        self.c.sh(verifier, "touch /work/end")
        self.assertTrue(verdict.result())
        self.assertEqual(self.c.call("Remove", id=box).removed, 1)

    def until(self, there):
        deadline = time.monotonic() + 30
        while not there():
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.02)


class Life(ServiceTest):
    def test_create_exec_snapshot_remove(self):
        box = self.create(owner="o", name="n")
        self.assertEqual((box.state, box.owner, box.name), (pb.STATE_RUNNING, "o", "n"))
        events = list(self.c.call("Exec", id=box.id, argv=["sh", "-c", "echo a; echo b >&2; exit 3"]))
        self.assertEqual(b"".join(e.out for e in events), b"a\n")
        self.assertEqual(b"".join(e.err for e in events), b"b\n")
        self.assertEqual([e.exit.status for e in events if e.HasField("exit")], [3])
        self.assertTrue(events[-1].HasField("exit"))
        snap = self.c.call("TakeSnapshot", id=box.id, idempotency_key="s", retain_owner="t/1")
        self.assertEqual((snap.engine, list(snap.owners), len(snap.layers)), ("fsonly", ["t/1"], 1))
        self.assertEqual(self.c.call("Remove", id=box.id).removed, 1)
        self.refused(grpc.StatusCode.NOT_FOUND, "Show", id=box.id)
        again = self.create(image=None, snapshot=snap.id)
        self.assertEqual(again.snapshot, snap.id)
        reply = self.c.call("Reconcile", owner_prefix="t/",
                            keep=[{"snapshot": "01ARZ3NDEKTSV4RRFFQ69G5FAV", "owner": "t/2"}])
        self.assertEqual((reply.released, [m.owner for m in reply.missing]), (1, ["t/2"]))

    def test_output_is_bounded_and_says_so(self):
        box = self.create()
        events = list(self.c.call("Exec", id=box.id, argv=["sh", "-c", "yes | head -c 500000"],
                                  output_bytes=1000))
        self.assertEqual(sum(len(e.out) for e in events), 1000)
        self.assertTrue(events[-1].exit.truncated)
        self.assertEqual(events[-1].exit.output_bytes, 500000)

    def test_a_client_that_leaves_ends_its_exec(self):
        box = self.create()
        call = self.c.call("Exec", id=box.id, argv=["sh", "-c", "echo x; sleep 99"], timeout_ms=99000)
        next(iter(call))
        call.cancel()
        for _ in range(100):
            n = self.c.call("Show", id=box.id).processes
            if n == 1:
                break
            threading.Event().wait(0.05)
        self.assertEqual(n, 1)

    def test_same_key_same_object(self):
        first = self.create(key="k")
        self.assertEqual(self.create(key="k").id, first.id)
        ids = []
        threads = [threading.Thread(target=lambda: ids.append(self.create(key="race").id))
                   for _ in range(8)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        self.assertEqual((len(ids), len(set(ids))), (8, 1))
        fork = self.c.call("Fork", id=first.id, idempotency_key="f", count=3)
        again = self.c.call("Fork", id=first.id, idempotency_key="f", count=3)
        self.assertEqual([c.id for c in fork.children], [c.id for c in again.children])
        self.assertEqual(len(self.c.call("List").sandboxes), 5)
        self.restart()
        self.assertEqual(self.create(key="k").id, first.id, "also after a restart")
        self.c.call("Remove", id=first.id)
        self.refused(grpc.StatusCode.FAILED_PRECONDITION, "Create", idempotency_key="k", image="bb")

    def test_a_failed_create_may_be_tried_again(self):
        self.refused(grpc.StatusCode.NOT_FOUND, "Create", idempotency_key="later", image="nope")
        self.assertEqual(self.create(key="later").state, pb.STATE_RUNNING)

    def test_lower_attempts_change_nothing(self):
        box = self.create(attempt=2)
        for method, fields in (("Exec", {"argv": ["true"]}), ("Freeze", {}), ("Remove", {}),
                               ("TakeSnapshot", {"idempotency_key": "x"}),
                               ("Fork", {"idempotency_key": "x", "count": 1})):
            self.refused(grpc.StatusCode.ABORTED, method, id=box.id, attempt=1, **fields)
        self.assertEqual(self.c.sh(box.id, "true", attempt=3)[0], 0)
        self.refused(grpc.StatusCode.ABORTED, "Exec", id=box.id, attempt=2, argv=["true"])
        self.restart()
        self.refused(grpc.StatusCode.ABORTED, "Exec", id=box.id, attempt=2, argv=["true"])
        self.assertEqual(self.c.call("Show", id=box.id).attempt, 3)

    def test_bad_requests_name_the_field(self):
        bad = grpc.StatusCode.INVALID_ARGUMENT
        box = self.create()
        self.assertIn("idempotency_key", self.refused(bad, "Create", image="bb"))
        self.refused(bad, "Create", idempotency_key="x")
        self.refused(bad, "Create", idempotency_key="x", image="bb", name="a/b")
        self.refused(bad, "Create", idempotency_key="x", image="bb", limits={"memory_bytes": 100})
        self.refused(bad, "Exec", id=box.id)
        self.refused(bad, "Exec", id=box.id, argv=["x"], env=["novalue"])
        self.refused(bad, "Exec", id=box.id, argv=["x"], cwd="relative")
        self.refused(bad, "Fork", id=box.id, idempotency_key="x", count=65)
        self.refused(bad, "Remove")
        self.refused(bad, "Retain", snapshot="x", owner="")
        self.refused(grpc.StatusCode.NOT_FOUND, "Retain", snapshot="x", owner="o")
        self.refused(bad, "Upload", id=box.id, path="relative")


def tar_of(*members):
    """members: (name, kind, payload)."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as t:
        for name, kind, payload in members:
            m = tarfile.TarInfo(name)
            m.type = kind
            if kind == tarfile.REGTYPE:
                m.size = len(payload)
                t.addfile(m, io.BytesIO(payload))
            else:
                m.linkname = payload or ""
                t.addfile(m)
    return out.getvalue()


class Reflection(ServiceTest):
    """A client that has nothing but the protocol of reflection drives a whole life cycle."""

    def setUp(self):
        super().setUp()
        self.reflection = lab.reflection_stubs()

    def ask(self, **question):
        r = self.reflection
        call = self.c.channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
                                            r.ServerReflectionRequest.SerializeToString,
                                            r.ServerReflectionResponse.FromString)
        return next(call(iter([r.ServerReflectionRequest(**question)]), timeout=10))

    def pool(self, symbol):
        pool = descriptor_pool.DescriptorPool()
        files = {}
        for data in self.ask(file_containing_symbol=symbol).file_descriptor_response.file_descriptor_proto:
            f = descriptor_pb2.FileDescriptorProto.FromString(data)
            files[f.name] = f

        def add(name):
            f = files.pop(name, None)
            if f:
                for d in f.dependency:
                    add(d)
                pool.Add(f)
        for name in list(files):
            add(name)
        return pool

    def test_a_life_by_reflection_alone(self):
        services = [s.name for s in self.ask(list_services="").list_services_response.service]
        self.assertIn("longhaul.sandbox.v1.Sandboxes", services)
        service = self.pool("longhaul.sandbox.v1.Sandboxes").FindServiceByName("longhaul.sandbox.v1.Sandboxes")

        def call(method, streams=False, **fields):
            m = service.methods_by_name[method]
            request = message_factory.MessageFactory().GetPrototype(m.input_type)(**fields)
            reply = message_factory.MessageFactory().GetPrototype(m.output_type)
            make = self.c.channel.unary_stream if streams else self.c.channel.unary_unary
            return make("/%s/%s" % (service.full_name, method), type(request).SerializeToString,
                        reply.FromString)(request, timeout=30)
        box = call("Create", idempotency_key=uuid.uuid4().hex, image="bb", owner="reflected")
        events = list(call("Exec", streams=True, id=box.id, argv=["sh", "-c", "echo out; exit 3"]))
        self.assertEqual((events[0].out, events[-1].exit.status), (b"out\n", 3))
        snap = call("TakeSnapshot", id=box.id, idempotency_key=uuid.uuid4().hex)
        again = call("Create", idempotency_key=uuid.uuid4().hex, snapshot=snap.id)
        self.assertEqual({s.id for s in call("List").sandboxes}, {box.id, again.id})
        for b in (box, again):
            self.assertEqual(call("Remove", id=b.id).removed, 1)

    def test_what_is_not_there_is_said(self):
        for question in ({"file_containing_symbol": "no.such.Symbol"}, {"file_by_filename": "none.proto"},
                         {"file_containing_symbol": ""}, {"all_extension_numbers_of_type": "x"}):
            self.assertEqual(self.ask(**question).error_response.error_code, 5, question)
        deep = self.ask(file_containing_symbol="longhaul.sandbox.v1.Sandboxes.Create")
        self.assertTrue(deep.file_descriptor_response.file_descriptor_proto)


class Hostile(ServiceTest):
    def test_tars_that_leave_or_act_are_refused(self):
        box = self.create()
        reg, sym, lnk = tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE
        bad = grpc.StatusCode.INVALID_ARGUMENT
        for members in ([("../evil", reg, b"x")], [("a/../../evil", reg, b"x")],
                        [("dev", tarfile.CHRTYPE, None)], [("fifo", tarfile.FIFOTYPE, None)],
                        [("block", tarfile.BLKTYPE, None)], [("hard", lnk, "../../etc/passwd")],
                        [("a" * 300, reg, b"x")]):
            self.refused(bad, "Upload", id=box.id, path="/work", tar=tar_of(*members))
        self.refused(bad, "Upload", id=box.id, path="/work", tar=b"this is no archive" * 100)
        # a link planted by the archive itself is not followed
        with self.assertRaises(grpc.RpcError):
            self.c.call("Upload", id=box.id, path="/work",
                        tar=tar_of(("out", sym, "/etc"), ("out/evil", reg, b"x")))
        self.assertEqual(self.c.sh(box.id, "ls /etc")[1].split(), ["passwd"])
        # absolute names land below the destination
        self.c.call("Upload", id=box.id, path="/work", tar=tar_of(("/abs/file", reg, b"here")))
        self.assertEqual(self.c.sh(box.id, "cat /work/abs/file")[1], "here")
        # what is in the way is replaced, not written through
        self.c.sh(box.id, "ln -s /etc/passwd /work/target; ln -s /etc /work/dir")
        self.c.call("Upload", id=box.id, path="/work", tar=tar_of(("target", reg, b"mine")))
        self.assertIn("root:x", self.c.sh(box.id, "cat /etc/passwd")[1])
        self.assertEqual(self.c.sh(box.id, "cat /work/target")[1], "mine")

    def test_owners_are_ids_of_the_sandbox(self):
        box = self.create()
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as t:
            for name, uid in (("root", 0), ("user", 1000), ("huge", 1 << 20)):
                m = tarfile.TarInfo(name)
                m.uid = m.gid = uid
                t.addfile(m)
        self.c.call("Upload", id=box.id, path="/work", tar=out.getvalue())
        self.assertEqual(self.c.sh(box.id, "cd /work; stat -c '%n %u %g' huge root user")[1],
                         "huge 0 0\nroot 0 0\nuser 1000 1000\n")

    def test_exchanging_directories_for_links_gains_nothing(self):
        box = self.create()
        marker = "/etc/agentenvd-escape-%d" % os.getpid()
        self.c.sh(box.id, "mkdir -p /work/a /work/real; ln -s /etc /work/link; "
                          "(while :; do mv -T /work/a /work/t; mv -T /work/link /work/a; "
                          "mv -T /work/a /work/link; mv -T /work/t /work/a; done) >/dev/null 2>&1 &")
        tar = tar_of((os.path.basename(marker), tarfile.REGTYPE, b"x"))
        done = 0
        for _ in range(150):
            try:
                self.c.call("Upload", id=box.id, path="/work/a", tar=tar)
                done += 1
            except grpc.RpcError as e:
                self.assertIn(e.code(), (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT,
                                         grpc.StatusCode.ALREADY_EXISTS, grpc.StatusCode.UNAVAILABLE,
                                         grpc.StatusCode.FAILED_PRECONDITION), e.details())
            self.assertFalse(os.path.exists(marker))
        self.assertGreater(done, 0)

    def test_a_download_reads_no_device_and_no_host_file(self):
        box = self.create()
        self.c.sh(box.id, "cd /work; mkfifo p; ln -s /etc/shadow s; echo x > f; mkdir -p d; ln f d/hard")
        data = b"".join(c.tar for c in self.c.call("Download", id=box.id, path="/work"))
        with tarfile.open(fileobj=io.BytesIO(data)) as t:
            kinds = {m.name: m.type for m in t.getmembers()}
        self.assertEqual(kinds["work/s"], tarfile.SYMTYPE)
        self.assertNotIn("work/p", kinds)
        self.assertEqual(sorted((kinds["work/f"], kinds["work/d/hard"])),
                         sorted((tarfile.REGTYPE, tarfile.LNKTYPE)))
        self.refused(grpc.StatusCode.INVALID_ARGUMENT, "Download", id=box.id, path="/dev/zero")


if __name__ == "__main__":
    lab.main()
