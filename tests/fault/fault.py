#!/usr/bin/env python3
"""fault.py BIN_DIR SOURCE_DIR [--rounds N] [--parallel N] [--seed N]: kills processes of short jobs with SIGKILL
at random moments.

BIN_DIR is where `deploy/build` installs.  20 rounds, 200 with LONGHAUL_SOAK=1, if not told.  One round in four
kills within the first second (images and tasks are being registered), one in four within the last.  Every job
must end by itself (after `longhaul resume` where its supervisor was killed or stopped too); its audit must be
clean; its final checkpoint must be the same, byte for byte, as that of the undisturbed job (I1, I2, I10); and
nothing may be left over: process, sandbox, cgroup, mount, socket (I7).  Prints TAP.

Rounds that run side by side share the programs, the image and the tasks, which nobody writes.  Everything else
of a job follows from its directory: sockets, locks, the name of agentenvd's cgroups, the command lines by which
its processes are found and its leftovers told from another's.  A round's kills follow from the seed and its
number alone, whatever runs beside it."""
import argparse
import concurrent.futures
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

JOB_LIMIT_S = 180  # times the rounds that share a core
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


def run_job(lab, job, target, delays, rng, limit_s):
    """Runs the job to its end with kills after these delays; returns an error or None, and how many kills hit."""
    def start(*args):
        return subprocess.Popen([lab.bin / "longhaul", *args], stdout=log, stderr=log)

    delays, out, hits = list(delays), lab.work / f"{job.name}.out", 0
    with open(out, "w") as log:
        process = start("run", lab.work / "job.yaml", "--dir", job)
        deadline = time.monotonic() + limit_s
        while True:
            try:
                status = process.wait(delays[0] if delays else max(1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                if not delays:
                    process.terminate()
                    process.wait()
                    return f"did not end within {limit_s:.0f} s", hits
                hit = kill(lab, job, target, rng)
                hits += bool(hit)
                print(f"#   {job.name} {target}: killed {', '.join(hit) or 'nothing'} after {delays.pop(0):.2f} s",
                      flush=True)
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


def round_of_kills(lab, job, target, length, reference, rng, limit_s):
    """One job with one or two kills, checked at its end.  A round that met nothing proves nothing: it is repeated,
    earlier every time, since a machine that is busy one minute and idle the next runs it in a fraction of the time."""
    spans = [(0, 1), (0, length), (max(0, length - 1), length), (0, length)]
    for repetition in range(TRIES):
        if repetition:
            latest = length * 0.5 ** repetition
            spans = [(0.3 * latest, latest)]
        delays = [rng.uniform(*rng.choice(spans)) for _ in range(rng.choice([1, 1, 2]))]
        error, hits = run_job(lab, job, target, delays, rng, limit_s)
        error = error or job_lab.fault_of(lab, job, reference)
        if error:
            return error
        shutil.rmtree(job)
        if hits:
            return None
    return f"{TRIES} jobs ended before a kill met {target}"


def undisturbed(lab, parallel, limit_s):
    """As many jobs side by side as rounds will be: their length, their checkpoint, which is the same, or an error."""
    def one(i):
        began = time.monotonic()
        error, _ = run_job(lab, lab.work / f"u{i}", None, [], None, limit_s)
        return time.monotonic() - began, error or job_lab.fault_of(lab, lab.work / f"u{i}", None)

    with concurrent.futures.ThreadPoolExecutor(parallel) as pool:
        lengths, errors = zip(*pool.map(one, range(parallel)))
    prints = set() if any(errors) else {job_lab.fingerprint(lab.work / f"u{i}") for i in range(parallel)}
    differ = None if len(prints) == 1 else f"{len(prints)} different final checkpoints"
    return sum(lengths) / parallel, min(prints, default=None), next(filter(None, errors), differ)


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("bin_dir")
    parser.add_argument("source_dir")
    parser.add_argument("--rounds", type=int, default=200 if os.environ.get("LONGHAUL_SOAK") == "1" else 20)
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    return parser.parse_args()


def main():
    a = arguments()
    lab = job_lab.Lab(a.bin_dir, a.source_dir, "lh-fault-")
    lab.job_file()
    print(f"1..{a.rounds + 1}\n# seed {a.seed}, in {lab.work}", flush=True)
    limit_s = JOB_LIMIT_S * max(1, a.parallel / os.cpu_count())
    length, reference, error = undisturbed(lab, a.parallel, limit_s)
    lab.report(f"undisturbed, {a.parallel} side by side, {length:.1f} s", error)
    if error:
        lab.finish()

    def one(i):
        target, rng = TARGETS[i % len(TARGETS)], random.Random(f"{a.seed}/{i}")
        lab.report(f"{target} of j{i + 1}",
                   round_of_kills(lab, lab.work / f"j{i + 1}", target, length, reference, rng, limit_s))

    with concurrent.futures.ThreadPoolExecutor(a.parallel) as pool:
        list(pool.map(one, range(a.rounds)))
    lab.finish()


main()
