"""Runs the tests that need a GPU, in at most nine minutes, and writes what they measure.

    python tests/gpu/run.py --out DIR [--dry] [--group A|B|C]

It needs one NVIDIA GPU, a torch with CUDA from 2.9 on, Python from 3.11 on, cloudpickle, numpy and pytest; no network, and
nothing of kale_dist installed. `DIR/gpu.json` gets the figures and what became of each test. Without a GPU it says so and
runs nothing. `--dry` runs what can run on a CPU, to try the suite itself.
"""

import argparse
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import time
from xml.etree import ElementTree as ET

LIMIT_S = 535.0
"""After that nothing more is started: a lent machine takes a command away after ten minutes."""

LEAST_S = 20.0
HERE = pathlib.Path(__file__).resolve().parent
GROUPS = {"A": "test_a_start.py", "B": "test_b_one_gpu.py", "C": "test_c_two_ranks.py"}
ASK = "import torch; print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else '')"


def outcomes(report):
    """What became of each test of a report of pytest: name, to outcome and seconds."""
    if not report.exists():
        return {}
    found = {}
    for case in ET.parse(report).iter("testcase"):
        kinds = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        texts = [(child.get("message") or "")[:500] for child in case if child.tag in kinds]
        found[case.get("name")] = {
            "outcome": kinds[0] if kinds else "passed", "s": round(float(case.get("time") or 0), 1), "text": " ".join(texts)
        }  # fmt: skip
    return found


def run_group(group, out, left_s, environment):
    """Run one group of tests; return pytest's exit code, or None if the time was over."""
    command = [
        sys.executable, "-m", "pytest", HERE / GROUPS[group], "-q", f"--rootdir={HERE}", f"--confcutdir={HERE}", "-c", os.devnull,
        "-p", "no:cacheprovider", "--tb=short", f"--junitxml={out / f'{group}.xml'}",
    ]  # fmt: skip
    if importlib.util.find_spec("pytest_timeout"):
        command += ["--timeout=110"]
    try:
        return subprocess.run(list(map(str, command)), env=environment, timeout=left_s, check=False).returncode
    except subprocess.TimeoutExpired:
        return None


def main():
    """Run the groups that the time allows; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("build/gpu"))
    parser.add_argument("--dry", action="store_true", help="on the CPU")
    parser.add_argument("--group", choices=GROUPS, action="append", help="only this one; may be repeated")
    given = parser.parse_args()
    gpu = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=False).stdout.strip()
    if not gpu and not given.dry:
        print("There is no GPU here that torch can use: nothing was run. `kale-dist doctor` says what torch sees.")
        return 0
    out = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    figures = out / "figures.jsonl"
    figures.unlink(missing_ok=True)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            filter(None, [*map(str, (HERE / "site", HERE, HERE.parents[1])), os.environ.get("PYTHONPATH")])
        ),
        "KALE_DIST_GPU_SUITE": "cpu" if given.dry else "cuda",
        "KALE_DIST_GPU_FIGURES": str(figures),
    }
    began, codes, tests = time.monotonic(), {}, {}
    for group in given.group or GROUPS:
        left_s = LIMIT_S - (time.monotonic() - began)
        if left_s < LEAST_S:
            print(f"Group {group} was skipped: the time is over")
            codes[group] = None
            continue
        (out / f"{group}.xml").unlink(missing_ok=True)
        codes[group] = run_group(group, out, left_s, environment)
        tests |= outcomes(out / f"{group}.xml")
    measured = {}
    if figures.exists():
        for line in figures.read_text().splitlines():
            measured |= json.loads(line)
    whole = {
        "gpu": gpu or None, "seconds": round(time.monotonic() - began, 1), "groups": codes, "tests": tests, "figures": measured
    }  # fmt: skip
    (out / "gpu.json").write_text(json.dumps(whole, indent=2) + "\n")
    print(f"{out / 'gpu.json'}: {len(tests)} tests, {len(measured)} figures, {whole['seconds']:.0f} s")
    return 0 if all(code == 0 for code in codes.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
