#!/usr/bin/env python3
"""long_context.py BIN_DIR SOURCE_DIR KIB: a job of long trajectories, with all the memory it wants and with a
tenth of that and a slow disk under its store.  Prints TAP.

Both must come to the same bytes (I5), trajectories and checkpoint; and with the tenth the window must be seen
to contract and to recover, in metrics.jsonl and so in the report's plot.  An agent that reads a log piece by
piece gets to KIB KiB of tokens in eight turns; that it does so, a tiny policy learns from short logs first."""
import json
import pathlib
import random
import re
import sqlite3
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import job_lab

TURNS = 8
CONTEXT = int(sys.argv[3]) * 1024
LOG = CONTEXT // TURNS - 80  # what one turn shows: below the harness's limit of 4,096 bytes
MEMBERS, GROUPS, RUNNING, STEPS = 4, 10, 16, 2
TOKEN_BYTES, STATE_BYTES, PAGE = 64, 2688, 64  # of this model in float32

WARM = """
name: warm
seed: 7
model: {{path: {model}}}
tasks: {{train_prefix: short/, file: {work}/tasks.pb, image: {work}/image, image_name: quickstart}}
rollout: {{workers: 1, max_running: 16, kv_budget_bytes: 4MiB, context_tokens: 640, turn_tokens: 16,
          total_tokens: 128, turns: {turns}}}
kvstore: {{memory_bytes: 4MiB}}
warm_start: {{steps: 24, batch_sequences: 16, learning_rate: 0.01, demonstrations: 16}}
train: {{steps: 0}}
"""

LONG = """
name: long-context
seed: 7
model: {{path: {model}}}
tasks: {{train_prefix: long/, file: {work}/tasks.pb, image: {work}/image, image_name: quickstart}}
rollout: {{workers: 1, max_running: {running}, kv_budget_bytes: {budget}, context_tokens: {context},
          turn_tokens: 16, total_tokens: 128, turns: {turns}, page_tokens: {page}, unit_tokens: 32,
          prefill_chunk: 512}}
kvstore: {{memory_bytes: 1MiB, disk_bytes: 256MiB, disk_bytes_per_s: {pace}}}
train: {{steps: {steps}, groups: {groups}, group_size: {members}}}
"""

TASK = """
tasks {{
  name: "{name}" revision: 1 licence: "Apache-2.0" split: SPLIT_TRAIN family: "log"
  prompt {{ role: ROLE_USER text: "read the log" }}
  environment {{
    image: "quickstart"
    files {{ path: "/work/log" content: "{log}" }}
    files {{ path: "/work/r" content: "cat log; echo >>seen" }}
  }}
  verifier {{ command: "[ $(wc -l <seen) -ge 4 ]" }}
  oracle {{ {actions} }}
}}
"""


def write_tasks(lab):
    """short/: to learn to read on; long/: to do so."""
    rnd = random.Random(1)

    def task(name, size):
        log = "".join(rnd.choice("abcdefgh ") for _ in range(size))
        return TASK.format(name=name, log=log, actions=" ".join(['actions: "sh r"'] * TURNS))

    text = "".join([task(f"short/{i}", 24) for i in range(16)] + [task(f"long/{i:02}", LOG) for i in range(16)])
    proto = lab.source / "proto"
    binary = subprocess.run(["protoc", f"--proto_path={proto}", "--encode=longhaul.task.v1.TaskSet",
                             "longhaul/task/v1/task.proto"], input=text.encode(), capture_output=True, check=True)
    (lab.work / "tasks.pb").write_bytes(binary.stdout)


def run(name, template, **fields):
    """A job from beginning to end: its directory, what it printed, an error or None."""
    path, job = lab.work / f"{name}.yaml", lab.work / name
    path.write_text(template.format(work=lab.work, turns=TURNS, **fields))
    status, output = lab.longhaul("run", path, "--dir", job, timeout=1800)
    return job, output, f"exit status {status}: {output[-800:]}" if status else job_lab.fault_of(lab, job)


def lines_of(job, kind):
    """The lines of metrics.jsonl of this kind."""
    lines = [json.loads(line) for line in (job / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def trajectories(job):
    """What every turn of every trajectory holds: tokens, log-probabilities, masks, versions, by their checksums."""
    with sqlite3.connect(job / "ledger/ledger.db") as db:
        return db.execute("""SELECT g.idx, t.member, s.turn, s.tokens, s.crc, t.reward FROM segments s
            JOIN trajectories t ON s.trajectory = t.id AND s.attempt = t.attempt JOIN groups g ON t.grp = g.id
            WHERE g.round = 'train' ORDER BY 1, 2, 3""").fetchall()


def long_job(name, budget, pace):
    return run(name, LONG, model=policy, running=RUNNING, budget=budget, context=CONTEXT, page=PAGE, pace=pace,
               groups=GROUPS, members=MEMBERS, steps=STEPS)


def is_long(job):
    """None when trajectories got as long as they should and differ in what they earned."""
    with sqlite3.connect(job / "ledger/ledger.db") as db:
        longest, low, high = db.execute("SELECT max(tokens), min(reward), max(reward) FROM trajectories").fetchone()
    print(f"# longest trajectory {longest} tokens, rewards {low} to {high}")
    return None if longest > CONTEXT * 3 // 4 and low < high else "they are short, or all alike"


def throttle_fault(job):
    """None when KV memory was short, the store used, and the window contracted and recovered."""
    total = {key: sum(line[key] for line in lines_of(job, "step"))
             for key in ("spilled_bytes", "loaded_bytes", "store_lookups", "store_hits")}
    flow = [line for line in lines_of(job, "flow") if line["window"]]
    window = [line["window"] for line in flow]
    first = next((i for i, size in enumerate(window) if size <= RUNNING // 2), None)
    print("# " + ", ".join(f"{key} {value}" for key, value in total.items()))
    print(f"# longest wait for a load {max(line['load_wait_ms'] for line in flow):.0f} ms, window {window}")
    if not total["spilled_bytes"] or not total["loaded_bytes"]:
        return "nothing was spilled and loaded"
    if first is None:
        return "the window did not contract"
    return None if max(window[first:]) > 1.5 * min(window) and max(window[first:]) >= RUNNING * 3 // 4 else \
        "the window did not recover"


def plot_fault(output):
    """None when the report has drawn the same: columns of different heights."""
    heights = [0] * 60
    plot = re.search(r"\nwindow: .*\n((?: *[\d.]+ \|.*\n)+)", output)
    for row in plot.group(1).splitlines() if plot else []:
        for column, mark in enumerate(row.split("|", 1)[1][:60]):
            heights[column] += mark == "#"
    low = heights.index(min(heights))
    return None if max(heights[:low + 1]) > min(heights) < max(heights[low:]) else f"no valley in {heights}"


lab = job_lab.Lab(sys.argv[1], sys.argv[2], "lh-long-")
write_tasks(lab)
print("1..6", flush=True)
warm, text, error = run("warm", WARM, model=lab.source / "tests/integration/long-context")
lab.report("a policy that reads on", error)
if error:
    lab.finish()
policy = warm / "checkpoints" / (warm / "checkpoints/latest").read_text().strip()
need = RUNNING * (CONTEXT * TOKEN_BYTES + 2 * STATE_BYTES)
ample, text, error = long_job("ample", 4 * need, 0)
lab.report("long trajectories with all the memory they want", error or is_long(ample))
tenth, text, error = long_job("tenth", need // 10, "1MiB")
lab.report("the same checkpoint with a tenth of it and a slow disk",
           error or job_lab.fault_of(lab, tenth, job_lab.fingerprint(ample)))
lab.report("the same trajectories", None if trajectories(tenth) == trajectories(ample) != [] else "they differ")
lab.report("the window contracts and recovers", throttle_fault(tenth))
lab.report("and the report shows it", plot_fault(text))
if not all(lab.results):
    print("# " + text.replace("\n", "\n# "))
lab.finish()
