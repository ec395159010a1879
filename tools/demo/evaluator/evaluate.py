#!/usr/bin/python3
"""The reward of a solution: 1.0 when the hidden tests and the pristine visible ones pass, else 0.0. One JSON line."""

import json
import subprocess
import sys

# The tests are those of this group, never the ones that the solution could have changed.
command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", "/eval", "/eval"]
result = subprocess.run(command, cwd="/eval", capture_output=True, text=True)
summary = result.stdout.strip().splitlines()[-1] if result.stdout.strip() else result.stderr[-500:]
print(json.dumps({"reward": 1.0 if result.returncode == 0 else 0.0, "tests": summary}))
