#!/usr/bin/python3
"""agentenv_seeing.py AGENTENVD AGENTENV PROTO_DIR: metrics by call and by HTTP, top, the manual page, completion."""
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
import unittest
import urllib.error
import urllib.request

import agentenv_lab as lab


class SeenDaemon(lab.Daemon):
    def start(self):
        self.process = subprocess.Popen(
            [lab.AGENTENVD, "--state", self.state, "--socket", self.socket, "--cgroup", self.cgroup,
             "--metrics", "127.0.0.1:0"], stderr=self.log)
        deadline = time.monotonic() + 30
        while self.run("ls", check=False).returncode != 0:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("agentenvd does not start:\n" + self.log_text())
            time.sleep(0.05)
        self.port = int(re.findall(r"serving metrics.* port=(\d+)", self.log_text())[-1])


class Seeing(lab.DaemonTest):
    @classmethod
    def setUpClass(cls):
        cls.d = SeenDaemon()
        cls.d.import_image()

    def scrape(self):
        with urllib.request.urlopen("http://127.0.0.1:%d/metrics" % self.d.port, timeout=10) as page:
            return page.read().decode()

    def values(self):
        """As Prometheus reads it: every line is a comment or a sample of a family that was announced."""
        families, samples = set(), {}
        for line in self.scrape().splitlines():
            comment = re.fullmatch(r"# (HELP|TYPE) (\w+) .+", line)
            if comment:
                families.add(comment.group(2))
                continue
            sample = re.fullmatch(r'(\w+)(\{(\w+="[^"\\]*",?)+\})? (-?[0-9.]+)', line)
            self.assertTrue(sample, line)
            self.assertIn(sample.group(1), families)
            samples[sample.group(1) + (sample.group(2) or "")] = float(sample.group(4))
        return samples

    def test_what_happens_is_counted(self):
        before = self.values()
        box = self.d.out("start", "bb")
        self.d.sh(box, "true")
        self.d.run("exec", "nosuch", "true", check=False)
        after = self.values()

        def more(name):
            return after.get(name, 0) - before.get(name, 0)
        self.assertEqual(more('agentenv_calls_total{method="Sandboxes/Create",code="OK"}'), 1)
        self.assertEqual(more('agentenv_calls_total{method="Sandboxes/Exec",code="OK"}'), 1)
        self.assertEqual(more('agentenv_calls_total{method="Sandboxes/Exec",code="NOT_FOUND"}'), 1)
        self.assertEqual(more('agentenv_sandboxes{state="RUNNING"}'), 1)
        self.assertGreater(more('agentenv_call_seconds_total{method="Sandboxes/Create"}'), 0)
        self.assertGreater(after["process_resident_memory_bytes"], 1 << 20)
        pid = self.d.json("ls")[0]["init_pid"]
        subprocess.run(["kill", "-9", str(pid)], check=True)
        for _ in range(100):
            if self.values()['agentenv_deaths_total{cause="killed"}'] == after['agentenv_deaths_total{cause="killed"}'] + 1:
                break
            time.sleep(0.05)
        else:
            self.fail("the death was not counted")
        self.assertIn("agentenv_calls_total", self.d.out("metrics"))

    def test_the_doctor(self):
        rows = {r["what"]: r for r in self.d.json("doctor")}
        self.assertEqual(rows["sandboxes"]["state"], "offered")
        self.assertEqual(rows["fsonly"]["state"], "offered")
        self.assertIn("swap", rows)
        for r in rows.values():
            self.assertIn(r["state"], ("offered", "missing"))
            self.assertTrue(r["text"] or r["state"] == "offered", r)
        with tempfile.TemporaryDirectory() as public: # nobody may not enter where this was built
            os.chmod(public, 0o755)
            program = shutil.copy(lab.AGENTENV, public)
            user = subprocess.run([program, "doctor", "-o", "json"], capture_output=True, text=True, user=65534,
                                  extra_groups=[], cwd="/")
        rows = {r["what"]: r for r in json.loads(user.stdout)}  # without user namespaces for users it has no sandboxes
        self.assertEqual(user.returncode, 0 if rows["sandboxes"]["state"] == "offered" else 1)
        self.assertIn("run agentenvd as root", user.stdout)
        self.assertNotEqual(rows.get("root", {}).get("state"), "offered")

    def test_http_knows_one_page(self):
        for path, data in (("/", None), ("/metrics/x", None), ("/metrics", b"post")):
            with self.assertRaises(urllib.error.HTTPError) as e:
                urllib.request.urlopen("http://127.0.0.1:%d%s" % (self.d.port, path), data=data, timeout=10)
            self.assertEqual(e.exception.code, 404)
            e.exception.close()

    def test_top(self):
        self.d.out("start", "bb", "--name", "small")
        big = self.d.out("start", "bb", "--name", "big")
        self.d.sh(big, "dd if=/dev/zero of=/dev/shm/x bs=1048576 count=30 2>/dev/null; sleep 60 & true")
        rows = self.d.json("top")
        self.assertEqual({r["name"] for r in rows}, {"small", "big"})
        self.assertGreaterEqual(rows[0]["memory_bytes"], rows[1]["memory_bytes"])
        text = self.d.out("top", "-n", "2", "-d", "10ms", "-o", "table")
        self.assertEqual(text.count("2 sandboxes, 2 running"), 2)

    def test_the_manual_and_completion_know_every_verb(self):
        help_text = subprocess.run([lab.AGENTENV, "--help"], capture_output=True, text=True).stdout
        verbs = re.findall(r"^  ((?:[a-z]+ )?[a-z]+) ", help_text.split("Verbs")[1], re.M)
        self.assertGreater(len(verbs), 25)
        page = self.d.out("man")
        for v in verbs:
            self.assertIn(".B %s\n" % v, page)
        for words, wanted in ((["agentenv", ""], {v.split()[0] for v in verbs}),
                              (["agentenv", "snapshot", ""], {v.split()[1] for v in verbs if v.startswith("snapshot ")}),
                              (["agentenv", "sh"], {"shell"})):
            script = '%s\nCOMP_WORDS=(%s)\nCOMP_CWORD=%d\n_agentenv\nprintf "%%s\\n" "${COMPREPLY[@]}"' % (
                self.d.out("completion"), " ".join("'%s'" % w for w in words), len(words) - 1)
            out = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
            self.assertEqual((set(out.stdout.split()), out.stderr), (wanted, ""), words)


if __name__ == "__main__":
    lab.main()
