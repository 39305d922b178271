#!/usr/bin/env python3
"""quickstart.py BIN_DIR SOURCE_DIR: the quickstart job, and the same with rewards shuffled, held to what
docs/QUICKSTART.md promises of them.  Prints TAP.  About a quarter of an hour on two cores."""
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile

bin_dir, source = (pathlib.Path(arg).resolve() for arg in sys.argv[1:3])
work = pathlib.Path(tempfile.mkdtemp(prefix="lh-quickstart-"))
failures = 0
done = 0


def promise(name, kept, seen):
    """One line of TAP."""
    global failures, done
    done += 1
    failures += not kept
    print(f"{'' if kept else 'not '}ok {done} - {name} # {seen}", flush=True)


def run(name, *options):
    """Runs the job; returns its evaluations by name and its steps."""
    made = work / name
    made.mkdir()
    job = (source / "deploy/jobs/quickstart.yaml").read_text()
    job = job.replace("../../build/release/quickstart/", f"{work}/")
    job = job.replace("path: quickstart-model", f"path: {source}/deploy/jobs/quickstart-model")
    (made / "job.yaml").write_text(job)
    subprocess.run([bin_dir / "longhaul", "run", made / "job.yaml", "--dir", made / "run", *options], check=True,
                   stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (made / "run/metrics.jsonl").read_text().splitlines()]
    return {line["name"]: line for line in lines if line["kind"] == "eval"}, \
           [line for line in lines if line["kind"] == "step"]


subprocess.run([source / "deploy/jobs/quickstart-image.sh", work / "image"], check=True)
with open(work / "tasks.pb", "wb") as f:
    subprocess.run([bin_dir / "quickstart-tasks", "--train", "1500"], stdout=f, check=True)

evals, steps = run("plain")
warm, final, blank = evals["warm"], evals["final"], evals["blank"]
worst = min(final["families"].items(), key=lambda family: family[1]["success"])
promise("the warm start leaves something to learn", warm["success"] <= 0.6, warm["success"])
promise("reinforcement learns it", final["success"] >= 0.9, final["success"])
promise("no family lags behind", worst[1]["success"] >= 0.8, f"{worst[0]} {worst[1]['success']}")
promise("enough episodes", final["episodes"] >= 200, final["episodes"])
promise("enough of them need a second turn", final["second_turn_share"] >= 0.4, final["second_turn_share"])
promise("which is decided by what was seen", blank["second_turn_success"] <= 0.2, blank["second_turn_success"])
gap = max(step["logprob_gap_max"] for step in steps)
promise("rollout's and trainer's log-probabilities are equal in every step", gap == 0, gap)

evals, steps = run("shuffled", "--control", "shuffle-rewards")
gain = evals["final"]["success"] - evals["warm"]["success"]
promise("shuffled rewards teach nothing", gain <= 0.05, gain)

print(f"1..{done}")
if not failures:
    shutil.rmtree(work)
sys.exit(bool(failures))
