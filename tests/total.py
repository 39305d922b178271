#!/usr/bin/env python3
"""total.py RESULTS: one line for everything that ran; fails when something failed or nothing ran.

A Criterion binary counts with every test it ran (its Synthesis lines), a TAP program with every line, any
other as one.  A skipped test is named; a failed one is named with what it said of the failure."""
import json
import pathlib
import re
import sys

SYNTHESIS = re.compile(r"Tested: (\d+) \| Passing: (\d+) \| Failing: (\d+) \| Crashing: (\d+)")
# What tells of a failure in the output of Criterion, TAP, the sanitizers and Python.
TELLING = re.compile(r"^\[----\]|^\[FAIL\]|^\[CRASH|^not ok|^# |ERROR: |SUMMARY: |Error: |^FAIL")
passed = failed = 0
skipped = []
broken = []
results = pathlib.Path(sys.argv[1])

for path in sorted(results.glob("*.json")):
    for line in path.read_text().splitlines():
        test = json.loads(line)
        output = re.sub(r"\x1b\[[0-9;]*m", "", test.get("stdout") or "")
        counts = SYNTHESIS.findall(output)
        tap = re.findall(r"^(not )?ok \d", output, re.M)
        bad = test["result"] not in ("OK", "EXPECTEDFAIL", "SKIP")
        if bad:
            lines = (output + (test.get("stderr") or "")).splitlines()
            told = [line for line in lines if TELLING.search(line)] or lines[-10:]
            broken.append((f"{path.stem} {test['name']}: {test['result']}", told[:40]))
        missing = re.findall(r"SKIPPED, .*", output)
        skipped += [f"{test['name']}: {why}" for why in missing]
        if test["result"] == "SKIP":
            skipped += [] if missing else [test["name"]]
        elif counts:
            passed += sum(int(c[1]) for c in counts)
            failed += max(sum(int(c[0]) - int(c[1]) for c in counts), 1 if bad else 0)
        elif tap:
            passed += tap.count("")
            failed += max(len(tap) - tap.count(""), 1 if bad else 0)
        else:
            passed, failed = passed + (not bad), failed + bad
for line in (results / "fuzz.out").read_text().splitlines() if (results / "fuzz.out").exists() else []:
    passed += line.startswith("ok ")
    failed += line.startswith("FAILED ")
for name, told in broken:
    print("failed:", name, *told, sep="\n    ")
for name in skipped:
    print("skipped:", name)
print(f"total: {passed} passed, {failed} failed, {len(skipped)} skipped")
sys.exit(1 if failed or not passed else 0)
