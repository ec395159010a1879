"""Loaded by each Python process of tools/sanitize.sh at its start: programs that it runs do not get the sanitizer's runtime, but Python
processes do, being started through the script that preloads it.
"""

import os
import sys

os.environ.pop("LD_PRELOAD", None)
sys.executable = os.environ["SANITIZED_PYTHON"]
