#!/usr/bin/python3
"""agentenv_harbor.py AGENTENVD AGENTENV PROTO_DIR: tasks in the published Harbor format, written for this test
(harbor/): imported, proven by their oracle and by doing nothing, judged by their contract, exported unchanged; and
malformed in each way, refused with the line."""
import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest

import agentenv_lab as lab

TASKS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "harbor")


class Harbor(lab.DaemonTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        root = cls.d.dir + "/bash"
        lab.make_root(root)
        for a in subprocess.run(["/bin/busybox", "--list"], capture_output=True, text=True, check=True).stdout.split():
            if a != "busybox" and not os.path.lexists(root + "/bin/" + a):
                os.symlink("busybox", root + "/bin/" + a)
        if os.path.lexists(root + "/bin/bash"):
            os.unlink(root + "/bin/bash")
        with open(root + "/bin/bash", "w") as f:
            f.write('#!/bin/sh\nexec /bin/sh "$@"\n')
        os.chmod(root + "/bin/bash", 0o755)
        cls.d.run("image", "import", "bash-1", root)
        cls.pb = lab.stubs()
        cls.client = lab.Client(cls.pb, cls.d.socket)

    @classmethod
    def tearDownClass(cls):
        cls.client.close()
        super().tearDownClass()

    def setUp(self):
        self.dir = tempfile.mkdtemp(prefix="harbor-", dir=self.d.dir)
        self.addCleanup(shutil.rmtree, self.dir)

    def tearDown(self):
        self.d.run("rm", "--all")
        for t in self.d.json("task", "ls"):
            self.d.run("task", "rm", t["name"])
        super().tearDown()

    def copy(self, name="hello-file", **changes):
        """A task of ours with files changed: text, or None to remove it."""
        path = tempfile.mkdtemp(dir=self.dir) + "/" + name
        shutil.copytree(TASKS + "/" + name, path)
        for file, text in changes.items():
            file = path + "/" + file.replace("__", "/").replace("_dot_", ".")
            if text is None:
                os.unlink(file)
                continue
            with open(file, "w") as f:
                f.write(text)
        return path

    def toml(self, name, old, new):
        with open("%s/%s/task.toml" % (TASKS, name)) as f:
            text = f.read()
        self.assertIn(old, text)
        return text.replace(old, new, 1)

    def refused(self, why, path, *more):
        r = self.d.run("task", "register", path, *more, check=False)
        self.assertEqual(r.returncode, 1, r.stdout + r.stderr)
        self.assertRegex(r.stderr, why)
        self.assertEqual(self.d.json("task", "ls"), [])

    def test_ten_tasks_are_proven_and_exported_unchanged(self):
        out = self.d.out("task", "register", "--split", "train", TASKS)
        self.assertEqual(out, "10 tasks: 10 registered, 0 unchanged, 0 refused")
        listed = self.d.json("task", "ls")
        self.assertEqual(len(listed), 10)
        for t in listed:
            self.assertTrue(t["verified"], t)
            self.assertEqual(t["split"], "train")
            folder = t["name"].split("/")[1]
            self.d.run("task", "export", t["name"], self.dir + "/" + folder)
            subprocess.run(["diff", "-r", TASKS + "/" + folder, self.dir + "/" + folder], check=True)
            mode = os.stat(self.dir + "/" + folder + "/tests/test.sh").st_mode
            self.assertEqual(mode, os.stat(TASKS + "/" + folder + "/tests/test.sh").st_mode)
        again = self.d.out("task", "register", "--split", "train", self.dir)
        self.assertEqual(again, "10 tasks: 0 registered, 10 unchanged, 0 refused")
        shown = json.loads(self.d.out("task", "show", "--json", "longhaul-tests/sum-numbers"))["tasks"][0]
        self.assertEqual(shown["prompt"][0]["text"],
                         "Add up the numbers in numbers.txt and write the sum to sum.txt.\n", "without the canary")
        self.assertEqual(shown["environment"]["limits"]["memoryBytes"], str(64 << 20))

    def judge(self, name, *commands):
        self.d.run("task", "register", "--no-verify", TASKS + "/" + name)
        return self.judge_registered("longhaul-tests/" + name, *commands)

    def judge_registered(self, task, *commands):
        box = self.d.out("start", "--task", task)
        for c in commands:
            self.d.sh(box, c, check=False)
        verdict = sys.modules["longhaul.task.v1.task_pb2"].Verdict
        verify = self.client.channel.unary_unary("/longhaul.sandbox.v1.Sandboxes/Verify",
                                                 self.pb.VerifyRequest.SerializeToString, verdict.FromString)
        return verify(self.pb.VerifyRequest(id=box, attempt=0xffffffff), timeout=120)

    def test_the_agent_cannot_plant_its_reward(self):
        for command in ("mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; echo 1 > /logs/verifier/reward.json",
                        "rm -rf /logs; ln -s /app /logs; mkdir -p /app/verifier; echo 1 > /app/verifier/reward.json",
                        "echo > /logs; mkdir -p /tests; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh",
                        "rm -rf /logs; mkfifo /logs",
                        "(while :; do echo 1 > /logs/verifier/reward.txt; done) > /dev/null 2>&1 &",
                        "cd /; rm -rf /app",
                        "rm /bin/bash"):
            with self.subTest(command):
                v = self.judge("hello-file", command)
                self.assertEqual((v.kind, v.reward, v.passed), (1, 0.0, False), v)

    def test_a_missing_or_senseless_reward_is_invalid_never_0(self):
        script = "tests__test_dot_sh"
        for text, code in (("true\n", "reward_missing"), ("exit 1\n", "reward_missing"),
                           ("echo one > /logs/verifier/reward.txt\n", "reward_malformed"),
                           ("echo nan > /logs/verifier/reward.txt\n", "reward_not_finite"),
                           ("echo '{}' > /logs/verifier/reward.json\n", "reward_malformed"),
                           ("echo '{\"a\": 1}' > /logs/verifier/reward.json\n", "reward_malformed"),
                           ("echo '{\"reward\": 1, \"a\": \"x\"}' > /logs/verifier/reward.json\n", "reward_malformed"),
                           ("echo '[1]' > /logs/verifier/reward.json\n", "reward_malformed"),
                           ("echo 7 > /logs/verifier/reward.json\n", "reward_out_of_range"),
                           ("mkdir /logs/verifier/reward.json\n", "reward_unreadable"),
                           ("sleep 60\n", "verify_timeout")):
            with self.subTest(text):
                path = self.copy(**{script: text})
                if "sleep" in text:
                    with open(path + "/task.toml", "w") as f:
                        f.write(self.toml("hello-file", "[verifier]\ntimeout_sec = 60.0", "[verifier]\ntimeout_sec = 0.5"))
                self.d.run("task", "register", "--no-verify", path)
                v = self.judge_registered("longhaul-tests/hello-file", "echo hello > hello.txt")
                self.assertEqual((v.kind, v.code), (2, code), v)
                self.d.run("rm", "--all")
        # so such a task is never accepted
        self.d.run("rm", "--all")
        self.d.run("task", "rm", "longhaul-tests/hello-file")
        self.refused("no reward was written", self.copy(**{script: "true\n"}))

    def test_rewards_are_read_in_order(self):
        v = self.judge("two-metrics", "touch a.txt b.txt")
        self.assertEqual((v.kind, v.reward), (1, 1.0))
        self.assertEqual(self.judge("two-metrics", "touch a.txt").reward, 0.0)

    def test_malformed_tasks_are_refused_with_their_line(self):
        def toml(old, new, why, name="hello-file"):
            text = self.toml(name, old, new)
            self.refused(why, self.copy(name, task_dot_toml=text))

        toml('[task]', '[task', r"task.toml:3: the name of a table does not end")
        toml('cpus = 1', 'cpus = ', r"task.toml:19: a value is missing")
        toml('cpus = 1', 'cpus = 1 2', r"task.toml:19: something follows")
        toml('cpus = 1', 'cpus = 1\ncpus = 2', r"task.toml:20: the key is given twice")
        toml('cpus = 1', 'cpus = "1"', r"task.toml:19: environment.cpus must be a number")
        toml('cpus = 1', 'cpus = -1', r"task.toml:19: environment.cpus is -1")
        toml('cpus = 1', 'cpus = 01', r"task.toml:19: neither a number")
        toml('cpus = 1', 'gpus = 1', r"task.toml:19: environment.gpus is 1")
        toml('timeout_sec = 60.0', 'timeout_sec = -60.0', r"task.toml:13: verifier.timeout_sec is -60")
        toml('"longhaul-tests/hello-file"', '"../x"', r'task.toml:4: task.name "../x" is not of the form')
        toml('description = "W', 'description = "\\qW', r"task.toml:5: unknown escape")
        toml('description = "', 'description = "\n', r"task.toml:5: a text does not end")
        toml('cpus = 1', 'network_mode = "allowlist"', r'task.toml:19: environment.network_mode is "allowlist"')
        toml('cpus = 1', 'allowed_hosts = ["a.example"]', r"task.toml:19: environment.allowed_hosts is not supported")
        toml('cpus = 1', 'mcp_servers = [{ name = "x" }]', r"task.toml:19: environment.mcp_servers is not supported")
        toml('cpus = 1', 'os = "windows"', r'task.toml:19: environment.os is "windows"')
        toml('cpus = 1', 'env = { A = 1 }', r"task.toml:19: environment.env.A must be a text")
        toml('cpus = 1', 'env = { A = "x${B}" }', r"task.toml:19: environment.env.A has \$\{\} within")
        toml('[verifier]', '[verifier]\nuser = "judge"', r'task.toml:13: verifier.user is "judge"')
        toml('[verifier]', '[verifier]\nenvironment_mode = "separate"', r"task.toml:13: verifier.environment_mode is")
        toml('[verifier]', '[[steps]]\nname = "one"\n[verifier]', r"task.toml:\d+: steps is not supported")
        toml('memory = "64M"', 'memory = "64"', r'task.toml:\d+: environment.memory must be a text like "2G"', "old-spelling")
        self.refused("task.toml: .*(No such|no such)|has no task.toml", self.copy(task_dot_toml=None))
        self.refused("instruction.md: No such file", self.copy(instruction_dot_md=None))
        self.refused("tests/test.sh is missing", self.copy(tests__test_dot_sh=None))
        self.refused("solution/solve.sh is missing", self.copy(solution__solve_dot_sh=None))
        self.refused("neither environment/Dockerfile nor", self.copy(environment__Dockerfile=None))
        self.refused("docker-compose.yaml: several containers", self.copy(**{"environment__docker-compose_dot_yaml": ""}))
        self.refused("Dockerfile:2: ADD is not supported", self.copy(environment__Dockerfile="FROM bash:1\nADD a b\n"))
        self.refused("no image bash-2", self.copy(environment__Dockerfile="FROM bash:2\n"))
        self.refused("Dockerfile:2: RUN false: exit status 1", self.copy(environment__Dockerfile="FROM bash:1\nRUN false\n"))

    def test_an_oracle_that_fails_or_a_task_that_is_done_already(self):
        self.refused("oracle", self.copy(solution__solve_dot_sh="true\n"))
        self.refused("nothing|nop", self.copy(tests__test_dot_sh="echo 1 > /logs/verifier/reward.txt\n"))


if __name__ == "__main__":
    lab.main()
