#!/usr/bin/env python3
"""fault.py BIN_DIR SOURCE_DIR ROUNDS [SEED]: kills processes of short jobs with SIGKILL at random moments.

Every job must end by itself (after `longhaul resume` where its supervisor was killed too); its audit must be
clean; its final checkpoint must be the same, byte for byte, as that of the undisturbed job (I1, I2, I10); and
nothing may be left over: process, cgroup, mount, shared memory, socket (I7).  Prints TAP."""
import hashlib
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time

bin_dir, source = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2]).resolve()
rounds = int(sys.argv[3])
seed = int(sys.argv[4]) if len(sys.argv) > 4 else int(time.time())
JOB_LIMIT_S = 180
TARGETS = ["longhaul-rollout", "agentenvd", "kvstored", "arbiterd", "longhaul-trainer", "everything"]

JOB = """
name: fault
seed: 7
model: {{path: {source}/deploy/jobs/quickstart-model}}
tasks:
  train_prefix: quickstart/
  eval_prefix: quickstart-eval/
  file: {work}/tasks.pb
  image: {work}/image
  image_name: quickstart
rollout: {{workers: 2, max_running: 16, kv_budget_bytes: 4MiB, context_tokens: 128, turn_tokens: 12,
          total_tokens: 24, turns: 2}}
kvstore: {{memory_bytes: 16MiB}}
warm_start: {{steps: 6, batch_sequences: 8, demonstrations: 12}}
train: {{steps: 4, groups: 3, group_size: 4, checkpoint_every: 2}}
eval: {{episodes: 6}}
"""


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
        if any(str(job).encode() in word for word in words[1:]):
            found[int(entry.name)] = pathlib.Path(os.fsdecode(words[0])).name
    return found


def state_of_machine():
    """What a job could leave behind, as a set of lines."""
    lines = set()
    for root, dirs, _ in os.walk("/sys/fs/cgroup"):
        lines.update(f"cgroup {root}/{d}" for d in dirs)
    lines.update("mount " + line.split(" - ")[0].split(" ", 2)[2]
                 for line in pathlib.Path("/proc/self/mountinfo").read_text().splitlines())
    lines.update(f"shm {name}" for name in os.listdir("/dev/shm"))
    return lines


def leftovers(before, job):
    """New things that are still there after a moment; what others start and end meanwhile is not ours."""
    for _ in range(30):
        left = {line for line in state_of_machine() - before
                if any(mark in line for mark in ("longhaul", "agentenv", str(job)))}
        left |= {f"process {pid} {name}" for pid, name in processes_of(job).items()}
        left |= {f"socket {path}" for path in (job / "run").glob("*.sock")}
        if not left:
            break
        time.sleep(0.1)
    return left


def fingerprint(job):
    """Digest of every file of the newest checkpoint."""
    name = (job / "checkpoints/latest").read_text().strip()
    digest = hashlib.sha256()
    for path in sorted((job / "checkpoints" / name).iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return name, digest.hexdigest()


def kill(job, target, rng):
    """SIGKILL; returns what was hit."""
    victims = {pid: name for pid, name in processes_of(job).items()
               if target == "everything" or name == target}
    if target != "everything" and victims:
        victims = dict([rng.choice(sorted(victims.items()))])
    for pid in victims:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    return sorted(victims.values())


def longhaul(log, *args):
    return subprocess.Popen([bin_dir / "longhaul", *args], stdout=log, stderr=log)


def run_job(work, job, target, delays, rng):
    """Runs the job to its end with kills at the given moments; returns an error or None."""
    with open(work / f"{job.name}.out", "w") as log:
        process = longhaul(log, "run", work / "job.yaml", "--dir", job)
        deadline = time.monotonic() + JOB_LIMIT_S
        for delay in delays:
            try:
                process.wait(delay)
                break
            except subprocess.TimeoutExpired:
                hit = kill(job, target, rng)
                print(f"#   {target}: killed {', '.join(hit) or 'nothing'} after {delay:.2f} s", flush=True)
        while True:
            try:
                status = process.wait(max(1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.terminate()
                process.wait()
                return f"did not end within {JOB_LIMIT_S} s"
            if status == 0:
                return None
            if status != -signal.SIGKILL:
                return f"exit status {status}: {(work / (job.name + '.out')).read_text()[-500:]}"
            if not (job / "job.pb").exists():
                shutil.rmtree(job, ignore_errors=True)
                process = longhaul(log, "run", work / "job.yaml", "--dir", job)
            else:
                process = longhaul(log, "resume", job)


def check_job(job, before, reference):
    audit = subprocess.run([bin_dir / "longhaul", "status", "--audit", job], capture_output=True, text=True)
    if audit.returncode:
        return "audit: " + (audit.stdout + audit.stderr)[-800:]
    left = leftovers(before, job)
    if left:
        return "left over: " + "; ".join(sorted(left)[:8])
    if reference and fingerprint(job) != reference:
        return f"final checkpoint {fingerprint(job)} differs from {reference}"
    return None


def main():
    rng = random.Random(seed)
    work = pathlib.Path(tempfile.mkdtemp(prefix="lh-fault-"))
    subprocess.run([source / "deploy/jobs/quickstart-image.sh", work / "image"], check=True)
    with open(work / "tasks.pb", "wb") as f:
        subprocess.run([bin_dir / "quickstart-tasks", "--train", "24", "--eval", "6"], stdout=f, check=True)
    (work / "job.yaml").write_text(JOB.format(source=source, work=work))
    print(f"1..{rounds + 1}\n# seed {seed}, in {work}", flush=True)

    before = state_of_machine()
    started = time.monotonic()
    error = run_job(work, work / "j0", None, [], rng) or check_job(work / "j0", before, None)
    length = time.monotonic() - started
    print(f"{'not ' if error else ''}ok 1 - undisturbed, {length:.1f} s{'' if not error else ' # ' + error}", flush=True)
    if error:
        sys.exit(1)
    reference, failed = fingerprint(work / "j0"), 0
    for i in range(1, rounds + 1):
        target, job = TARGETS[(i - 1) % len(TARGETS)], work / f"j{i}"
        delays = [rng.uniform(0.05, length) for _ in range(rng.choice([1, 1, 2]))]
        error = run_job(work, job, target, delays, rng) or check_job(job, before, reference)
        failed += bool(error)
        print(f"{'not ' if error else ''}ok {i + 1} - {target}{'' if not error else ' # ' + error}", flush=True)
        if not error:
            shutil.rmtree(job)
    if not failed:
        shutil.rmtree(work)
    sys.exit(1 if failed else 0)


main()
