#!/usr/bin/env python3
"""fault.py BIN_DIR SOURCE_DIR [ROUNDS [SEED]]: kills processes of short jobs with SIGKILL at random moments.

BIN_DIR is where `deploy/build` installs.  20 rounds, 200 with LONGHAUL_SOAK=1, if not told.  One round in four
kills within the first second (images and tasks are being registered), one in four within the last.  Every job
must end by itself (after `longhaul resume` where its supervisor was killed or stopped too); its audit must be
clean; its final checkpoint must be the same, byte for byte, as that of the undisturbed job (I1, I2, I10); and
nothing may be left over: process, sandbox, cgroup, mount, shared memory, socket (I7).  Prints TAP."""
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import job_lab

JOB_LIMIT_S = 180
APPEAR_S = 1.0  # how long a kill waits for its victim to be there
TRIES = 6       # of a round that met nothing to kill
TARGETS = ["longhaul-rollout", "agentenvd", "kvstored", "arbiterd", "longhaul-trainer", "everything", "longhaul",
           "stop"]


def kill(lab, job, target, rng):
    """SIGKILL, or `longhaul stop`; returns what was hit."""
    if target == "stop":
        lab.longhaul("stop", job)
        return ["the job by longhaul stop"]
    deadline, victims = time.monotonic() + APPEAR_S, {}
    while not victims and time.monotonic() < deadline:
        victims = {pid: name for pid, name in job_lab.processes_of(job).items()
                   if target == "everything" or name == target}
        time.sleep(0 if victims else 0.01)
    if target != "everything" and victims:
        victims = dict([rng.choice(sorted(victims.items()))])
    for pid in victims:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    return sorted(victims.values())


def run_job(lab, job, target, delays, rng):
    """Runs the job to its end with kills after these delays; returns an error or None, and how many kills hit."""
    def start(*args):
        return subprocess.Popen([lab.bin / "longhaul", *args], stdout=log, stderr=log)

    delays, out, hits = list(delays), lab.work / f"{job.name}.out", 0
    with open(out, "w") as log:
        process = start("run", lab.work / "job.yaml", "--dir", job)
        deadline = time.monotonic() + JOB_LIMIT_S
        while True:
            try:
                status = process.wait(delays[0] if delays else max(1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                if not delays:
                    process.terminate()
                    process.wait()
                    return f"did not end within {JOB_LIMIT_S} s", hits
                hit = kill(lab, job, target, rng)
                hits += bool(hit)
                print(f"#   {target}: killed {', '.join(hit) or 'nothing'} after {delays.pop(0):.2f} s", flush=True)
                continue
            if status == 0:
                return None, hits
            stopped = target == "stop" and status == 1 and "stopped;" in out.read_text()
            if status != -signal.SIGKILL and not stopped:
                return f"exit status {status}: {out.read_text()[-500:]}", hits
            if (job / "job.pb").exists():
                process = start("resume", job)
            else:
                shutil.rmtree(job, ignore_errors=True)
                process = start("run", lab.work / "job.yaml", "--dir", job)


def round_of_kills(lab, job, target, length, reference, rng):
    """One job with one or two kills, checked at its end.  A round that met nothing proves nothing: it is repeated."""
    spans = [(0, 1), (0, length), (max(0, length - 1), length), (0, length)]
    for _ in range(TRIES):
        delays = [rng.uniform(*rng.choice(spans)) for _ in range(rng.choice([1, 1, 2]))]
        error, hits = run_job(lab, job, target, delays, rng)
        error = error or job_lab.fault_of(lab, job, reference)
        if error:
            return error
        shutil.rmtree(job)
        if hits:
            return None
    return f"{TRIES} jobs ended before a kill met {target}"


def main():
    soak = os.environ.get("LONGHAUL_SOAK") == "1"
    rounds = int(sys.argv[3]) if len(sys.argv) > 3 else 200 if soak else 20
    seed = int(sys.argv[4]) if len(sys.argv) > 4 else int(time.time())
    rng = random.Random(seed)
    lab = job_lab.Lab(sys.argv[1], sys.argv[2], "lh-fault-")
    lab.job_file()
    print(f"1..{rounds + 1}\n# seed {seed}, in {lab.work}", flush=True)

    started = time.monotonic()
    error, _ = run_job(lab, lab.work / "j0", None, [], rng)
    length = time.monotonic() - started
    error = error or job_lab.fault_of(lab, lab.work / "j0")
    lab.report(f"undisturbed, {length:.1f} s", error)
    if error:
        lab.finish()
    reference = job_lab.fingerprint(lab.work / "j0")
    for i in range(rounds):
        target = TARGETS[i % len(TARGETS)]
        lab.report(target, round_of_kills(lab, lab.work / f"j{i + 1}", target, length, reference, rng))
    lab.finish()


main()
