#!/usr/bin/env python3
"""jobs.py BIN_DIR SOURCE_DIR: whole short jobs.  Prints TAP.

The same job twice comes to the same bytes (I10), also with so little KV memory that caches are spilled and
loaded (I5).  What is wrong with a job or its directory is said clearly, with exit status 1, and is no reason
for the job not to come to those bytes once it is put right."""
import json
import pathlib
import re
import socket
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import job_lab

lab = job_lab.Lab(sys.argv[1], sys.argv[2], "lh-jobs-")
TENTH = "240KiB"  # sixteen at a time need ten times as much: five pages and two states of two pages each
SLOW_DISK = "memory_bytes: 1MiB, disk_bytes: 64MiB, disk_bytes_per_s: 1MiB"


def run(name, *options, **job_options):
    """A job from beginning to end; returns its directory and an error or None."""
    job = lab.work / name
    status, output = lab.longhaul("run", lab.job_file(name + ".yaml", **job_options), "--dir", job, *options)
    return job, f"exit status {status}: {output[-500:]}" if status else job_lab.fault_of(lab, job)


def same(job, error):
    return error or job_lab.fault_of(lab, job, reference)


def kv_fault(job):
    """None when caches moved to the store and back and resumed turns found them there."""
    lines = [json.loads(line) for line in (job / "metrics.jsonl").read_text().splitlines()]
    total = {key: sum(line[key] for line in lines if line["kind"] == "step")
             for key in ("spilled_bytes", "loaded_bytes", "store_lookups", "store_hits")}
    print("# " + ", ".join(f"{key} {value}" for key, value in total.items()))
    if not total["spilled_bytes"] or not total["loaded_bytes"]:
        return "nothing was spilled and loaded"
    return None if 2 * total["store_hits"] >= total["store_lookups"] > 0 else "less than half of the turns hit"


def refused(args, *words):
    """None when the command fails with status 1 and says all these words."""
    status, output = lab.longhaul(*args)
    missing = [word for word in words if word not in output]
    return f"exit status {status}, without {missing}: {output[-500:]}" if status != 1 or missing else None


def start_and_stop(name):
    """A job that has been stopped a second after its first experience."""
    job = lab.work / name
    process = subprocess.Popen([lab.bin / "longhaul", "run", lab.job_file(name + ".yaml"), "--dir", job],
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (job / "ledger/ledger.db").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(1)
    status, output = lab.longhaul("stop", job)
    process.wait(30)
    return job, f"stop: exit status {status}: {output}" if status else None


def socket_in_use(job):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        other.bind(str(job / "run/kv.sock"))
        other.listen()
        error = refused(["resume", job], "kvstored failed", "socket in use", "run/kv.sock")
    (job / "run/kv.sock").unlink()
    return error


def other_version(job):
    mine = (job / "job.pb").read_bytes()
    version = re.search(rb"\d+\.\d+\.\d+", mine).group()
    (job / "job.pb").write_bytes(mine.replace(version, b"9" + version[1:]))
    error = refused(["resume", job], "was made by Longhaul 9", "use that version")
    (job / "job.pb").write_bytes(mine)
    return error


def full_disk(job, part, words, finish):
    """A part of the job moves to a disk of its own that has no room for more; to finish, that disk grows."""
    here, kept = job / part, job / (part + "-kept")
    here.mkdir(exist_ok=True)
    here.rename(kept)
    here.mkdir()
    used = sum(path.stat().st_size + 8192 for path in kept.rglob("*")) // 1024
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={used + 64}k", "longhaul-full", here], check=True)
    try:
        subprocess.run(["cp", "-a", f"{kept}/.", here], check=True)
        error = refused(["resume", job], "trainer failed", words)
        subprocess.run(["mount", "-o", "remount,size=256m", here], check=True)
        status, output = lab.longhaul("resume", job) if finish and not error else (0, "")
        if status:
            error = f"resumed with space, exit status {status}: {output[-500:]}"
        subprocess.run(["cp", "-a", f"{here}/.", kept], check=True)
    finally:
        subprocess.run(["umount", here], check=True)
    here.rmdir()
    kept.rename(here)
    return error


def unknown_field():
    job = lab.work / "unknown"
    path = lab.job_file("unknown.yaml", more="colour: red\n")
    line = path.read_text().count("\n")
    return refused(["run", path, "--dir", job], f"unknown.yaml:{line}", "colour") or (
        "it left a directory" if job.exists() else None)


print("1..10", flush=True)
first, error = run("first")
lab.report("a job", error)
if error:
    lab.finish()
reference = job_lab.fingerprint(first)
lab.report("the same job again: the same bytes", same(*run("again")))
lab.report("control with shuffled rewards", run("control", "--control", "shuffle-rewards")[1])
job, error = run("tenth", kv_budget=TENTH, kvstore=SLOW_DISK)
lab.report("a tenth of the KV memory, a slow disk under the store: spilled, loaded, the same bytes", same(job, error) or kv_fault(job))
job, error = start_and_stop("victim")
lab.report("a socket in use", error or socket_in_use(job))
lab.report("a job of another version", other_version(job))
lab.report("a full disk under the checkpoints", full_disk(job, "checkpoints", "No space left", False))
lab.report("a full disk under the ledger", full_disk(job, "ledger", "free space", True))
lab.report("after all that: the same bytes", same(job, None))
lab.report("an unknown field", unknown_field())
lab.finish()
