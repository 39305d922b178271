"""What tests of whole jobs share: a short job, what it leaves behind, and what it came to."""
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time

JOB = """
name: short
seed: 7
model: {{path: {source}/deploy/jobs/quickstart-model}}
tasks:
  train_prefix: quickstart/
  eval_prefix: quickstart-eval/
  file: {work}/tasks.pb
  image: {work}/image
  image_name: quickstart
rollout: {{workers: 2, max_running: 16, kv_budget_bytes: {kv_budget}, context_tokens: 160, turn_tokens: 30,
          total_tokens: 60, turns: 2}}
kvstore: {{{kvstore}}}
warm_start: {{steps: 8, batch_sequences: 12, demonstrations: 12, learning_rate: 0.003}}
train: {{steps: 4, groups: 3, group_size: 4, checkpoint_every: 2}}
eval: {{episodes: 6}}
"""


class Lab:
    """A directory with an image, tasks and job files; goes away if every test passed."""

    def __init__(self, bin_dir, source, prefix):
        self.bin = pathlib.Path(bin_dir).resolve()
        self.source = pathlib.Path(source).resolve()
        if not (self.bin / "longhaul").exists():
            reason = f"{self.bin} has no longhaul: build with deploy/build, which installs"
            must = "sandbox" in os.environ.get("LONGHAUL_MUST_WORK", "")
            print("Bail out! " + reason if must else "1..0 # SKIP " + reason)
            sys.exit(must)
        self.work = pathlib.Path(tempfile.mkdtemp(prefix=prefix))
        self.results = []
        self.lock = threading.Lock()
        subprocess.run([self.source / "deploy/jobs/quickstart-image.sh", self.work / "image"], check=True)
        with open(self.work / "tasks.pb", "wb") as f:
            subprocess.run([self.bin / "quickstart-tasks", "--train", "12", "--eval", "6"], stdout=f, check=True)

    def job_file(self, name="job.yaml", kv_budget="4MiB", kvstore="memory_bytes: 16MiB", more=""):
        path = self.work / name
        path.write_text(JOB.format(source=self.source, work=self.work, kv_budget=kv_budget, kvstore=kvstore) + more)
        return path

    def longhaul(self, *args, timeout=180):
        """Runs a command to its end; returns status and output."""
        done = subprocess.run([self.bin / "longhaul", *args], capture_output=True, text=True, timeout=timeout)
        return done.returncode, done.stdout + done.stderr

    def report(self, name, error):
        comment = " # " + " ".join(str(error).split()) if error else ""
        with self.lock:
            self.results.append(not error)
            print(f"{'not ' if error else ''}ok {len(self.results)} - {name}{comment}", flush=True)

    def finish(self):
        if all(self.results):
            shutil.rmtree(self.work)
        sys.exit(0 if all(self.results) else 1)


def processes_of(job):
    """pid -> program of every live process whose command line names the job directory."""
    found = {}
    for entry in pathlib.Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if str(job).encode() in words or any(w.startswith(str(job).encode() + b"/") for w in words):
            found[int(entry.name)] = pathlib.Path(os.fsdecode(words[0])).name
    return found


def cgroups_of(job):
    """The cgroups that are still there of what agentenvd's log says was the job's."""
    names = set(re.findall(r" cgroup=(\S+)", (job / "logs/agentenvd.log").read_text()))
    return {f"cgroup {root}/{d}" for root, dirs, _ in os.walk("/sys/fs/cgroup") for d in dirs if d in names}


def leftovers(job):
    """What is still there of a job after a moment."""
    for _ in range(30):
        left = cgroups_of(job)
        left |= {f"mount {line}" for line in pathlib.Path("/proc/self/mountinfo").read_text().splitlines()
                 if f"{job}/" in line}
        left |= {f"process {pid} {name}" for pid, name in processes_of(job).items()}
        left |= {f"socket {path}" for path in (job / "run").glob("*.sock")}
        left |= {f"sandbox {path}" for path in (job / "agentenv/boxes").glob("*")}
        if not left:
            break
        time.sleep(0.1)
    return left


def fingerprint(job):
    """Name and digest of every file of the newest checkpoint."""
    name = (job / "checkpoints/latest").read_text().strip()
    digest = hashlib.sha256()
    for path in sorted((job / "checkpoints" / name).iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return name, digest.hexdigest()


def fault_of(lab, job, reference=None):
    """None when the job has come to its end as it should: audit, leftovers, the reference's bytes."""
    status, output = lab.longhaul("status", "--audit", job)
    if status:
        return "audit: " + output[-800:]
    left = leftovers(job)
    if left:
        return "left over: " + "; ".join(sorted(left)[:8])
    if reference and fingerprint(job) != reference:
        return f"final checkpoint {fingerprint(job)} differs from {reference}"
    return None
