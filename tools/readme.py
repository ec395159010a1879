"""Runs the commands that the README shows, and compares or rewrites the output that it shows.

`python -m tools.readme FILE` rewrites the output in FILE; the tests call `run_examples` and `differences`. Commands stand in
blocks marked `console`: a line that begins with `$ ` is a command, lines that begin with `> ` go on with it, the rest is
its output. All blocks run in one shell, in a scratch directory whose `build` is the repository's. A block of another kind
with a file's name behind it (`toml ready.toml`) is that file there.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import attrs

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"^```\w+ ([\w.-]+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TIMEOUT_S = 300


@attrs.frozen
class Example:
    """A command as the file shows it, and its output."""

    command: str
    shown: str


def parse_block(block: str) -> list[Example]:
    examples: list[Example] = []
    for line in block.splitlines():
        if line.startswith("$ "):
            examples.append(Example(line[2:], ""))
        elif line.startswith("> ") and not examples[-1].shown:
            examples[-1] = attrs.evolve(examples[-1], command=f"{examples[-1].command}\n{line[2:]}")
        else:
            examples[-1] = attrs.evolve(examples[-1], shown=f"{examples[-1].shown}{line}\n")
    return examples


def examples_of(text: str) -> list[Example]:
    return [example for block in BLOCK.findall(text) for example in parse_block(block)]


def run_examples(text: str, scratch: Path) -> list[tuple[int, str]]:
    """Exit status and output (both streams) of each command of a document, in one shell. Processes that it leaves are its own to
    end.
    """
    examples = examples_of(text)
    (scratch / "build").symlink_to(ROOT / "build")
    for name, contents in FILE.findall(text):
        (scratch / name).write_text(contents)
    marker = f"--- {os.getpid()} ---"
    script = [f"cd {scratch}"]
    for example in examples:
        # The commands' own last line may lack its end: the marker begins one.
        script.append(f'{example.command}\nprintf "\\n{marker} %s\\n" $?')
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WEENV_")}
    environment["XDG_CACHE_HOME"] = str(scratch / ".cache")  # nobody's conversions of before
    result = subprocess.run(
        ["bash", "-s"],
        input="\n".join(script) + "\n",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        timeout=TIMEOUT_S,
    )
    parts = re.split(rf"\n{re.escape(marker)} (\d+)\n", result.stdout)
    # The scratch directory's name is no reader's business.
    texts = [part.replace(str(scratch), "/srv/weenv") for part in parts[0::2]]
    outputs = [(int(status), output) for output, status in zip(texts, parts[1::2], strict=False)]
    if len(outputs) != len(examples):
        raise RuntimeError(
            f"only {len(outputs)} of {len(examples)} commands came to their end:\n{result.stdout[-2000:]}"
        )
    return outputs


def comparable(output: str) -> list[str]:
    """Lines of an output without what differs from run to run: digests, ids, numbers, and the widths that follow from them."""
    text = re.sub(r"\be[0-9a-f]{12}\b", "ID", output)
    text = re.sub(r"[0-9a-f]{11,64}|\b[0-9a-f]{7}\b(?= \d{4}-)", "HEX", text)  # digests, and commits before their date
    text = re.sub(r"\d[\d.,:T-]*( ?(B|kB|MB|GB|µs|ms|s|min|h)\b)?", "N", text)
    lines = [re.sub(r"[ ─]+", " ", line).strip() for line in text.splitlines()]
    return [line for line in lines if line]


def differences(examples: Sequence[Example], outputs: Sequence[tuple[int, str]]) -> list[str]:
    """What a reader would see otherwise than shown. A shown line `…` stands for any lines."""
    found = []
    for example, (status, output) in zip(examples, outputs, strict=True):
        if status != 0:
            found.append(f"$ {example.command}\nended with status {status}:\n{output}")
            continue
        pattern = "".join("(?s:.*)" if line == "…" else re.escape(line) + "\n" for line in comparable(example.shown))
        received = "".join(f"{line}\n" for line in comparable(output))
        if not re.fullmatch(pattern, received):
            found.append(f"$ {example.command}\nshown:\n{example.shown}\nreceived:\n{output}")
    return found


def rewrite(text: str, outputs: Sequence[tuple[int, str]]) -> str:
    """The text with the outputs as received; an example that shows `…` keeps what it shows."""
    remaining = iter(outputs)

    def block(match: re.Match[str]) -> str:
        lines = []
        for example in parse_block(match[1]):
            _status, output = next(remaining)
            lines += ["$ " + example.command.replace("\n", "\n> ")]
            shown = example.shown if "…" in example.shown.splitlines() else output
            lines += shown.strip("\n").splitlines()
        return "```console\n" + "\n".join(lines) + "\n```"

    return BLOCK.sub(block, text)


def main() -> None:
    path = Path(sys.argv[1])
    text = path.read_text()
    with tempfile.TemporaryDirectory(prefix="weenv-readme-") as scratch:
        outputs = run_examples(text, Path(scratch))
    path.write_text(rewrite(text, outputs))


if __name__ == "__main__":
    main()
