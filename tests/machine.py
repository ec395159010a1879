"""A small machine under qemu: a distribution's kernel, a root in memory, one Python program; its result and console.

For what this machine cannot show about itself, first of all pure cgroup version 2 on a hybrid host. The machine is
emulated, so a program in it runs some ten times slower than here. Rejected: KVM where there is a /dev/kvm. Inside
another virtual machine that one may open and then fail or hang, and a test must not depend on it.

The root is an initramfs: it needs no block driver and no image tool. It holds the interpreter that runs the tests, the
distributions that ours needs, our packages, the programs asked for, and the shared libraries of all of them as ldd
names them: the same binaries as here, so that only the kernel differs. An initramfs itself cannot be the root of a
container host, since pivot_root refuses to leave it; it is bound over itself and that mount becomes the root.

The program's stdout is a serial line of its own, apart from the kernel's messages: one JSON value. Everything waits
with a bound; the emulator is ended by its pid.
"""

from __future__ import annotations

import json
import lzma
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO

import attrs
import zstandard

REPOSITORY = Path(__file__).resolve().parent.parent
CACHE = REPOSITORY / "build" / "machine"
KERNEL_PACKAGES = ("linux-image-cloud-amd64", "linux-image-virtual")
"""Debian's and Ubuntu's name of the newest kernel for virtual machines; both depend on the real packages."""
QEMU = "qemu-system-x86_64"
ROOT = "machine"
"""The directory of the initramfs that becomes the root."""
VENV = "/venv"
PYTHON = f"{VENV}/bin/python"
CONSOLE_SHOWN_BYTES = 20_000
_STDLIB_UNUSED = {"test", "idlelib", "ensurepip", "lib2to3", "tkinter", "turtledemo", "dist-packages", "site-packages"}


class MachineError(Exception):
    """The machine could not be made, or did not answer; the message ends with its console."""


@attrs.frozen
class Kernel:
    """An unpacked kernel package."""

    image: Path
    modules: Path
    """`lib/modules/VERSION` of the package."""

    def module_files(self, names: Iterable[str]) -> list[Path]:
        """The files of these modules and of those that they need, in the order of loading; without what is built in.

        The package has no modules.dep (its installation makes it), so the dependencies come from the modules.
        """
        files = {_module_name(path.name): path for path in self.modules.rglob("*.ko*")}
        builtin = {_module_name(Path(line).name) for line in (self.modules / "modules.builtin").read_text().split()}
        ordered: list[Path] = []

        def visit(name: str) -> None:
            if name in builtin:
                return
            if name not in files:
                raise MachineError(f"{self.modules} has no module {name!r}, and it is not built in; choose another kernel package")
            if files[name] not in ordered:
                found = re.search(rb"\0depends=([^\0]*)\0", read_module(files[name]))
                for needed in found[1].decode().split(",") if found else []:
                    if needed:
                        visit(_module_name(needed))
                ordered.append(files[name])

        for name in names:
            visit(_module_name(name))
        return ordered


def _module_name(text: str) -> str:
    return text.partition(".")[0].replace("-", "_")


def read_module(path: Path) -> bytes:
    """A kernel module's ELF file; Debian stores it as it is or with xz, Ubuntu with zstd."""
    data = path.read_bytes()
    if path.suffix == ".xz":
        return lzma.decompress(data)
    if path.suffix == ".zst":
        return zstandard.ZstdDecompressor().decompressobj().decompress(data)
    return data


def kernel() -> Kernel:
    """The distribution's kernel, downloaded and unpacked below the build directory, once. Raises MachineError."""
    if platform.machine() != "x86_64":
        raise MachineError(f"the test machine is x86_64 only; this is {platform.machine()}, where nobody has made its kernel choice yet")
    target = CACHE / "kernel"
    if not target.is_dir():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            unpacked = Path(scratch, "kernel")
            _apt("download", *_kernel_packages(), cwd=Path(scratch))
            for package in Path(scratch).glob("*.deb"):
                subprocess.run(["dpkg-deb", "-x", package, unpacked], check=True)
            try:
                unpacked.rename(target)
            except OSError:
                if not target.is_dir():  # else another run was faster
                    raise
    images, modules = sorted(target.rglob("vmlinuz-*")), sorted(target.rglob("modules.builtin"))
    if not images or not modules:
        raise MachineError(f"{target}: expected vmlinuz-* and modules.builtin of a kernel package; remove the directory and try again")
    return Kernel(images[-1], modules[-1].parent)


def _kernel_packages() -> list[str]:
    """The real packages behind the newest kernel's name: one in Debian, image and modules apart in Ubuntu."""
    for name in KERNEL_PACKAGES:
        wanted, seen = [name], set[str]()
        while wanted:
            package = wanted.pop()
            seen.add(package)
            depends = subprocess.run(["apt-cache", "depends", package], capture_output=True, text=True, check=False).stdout
            wanted += set(re.findall(r"Depends: (linux-(?:image|modules)-\d\S*)", depends)) - seen
        if real := sorted(seen - {name}):
            return real
    raise MachineError(f"apt knows none of {', '.join(KERNEL_PACKAGES)} with its kernel; run `apt-get update`, or add one here")


def _apt(*arguments: str, cwd: Path) -> None:
    result = subprocess.run(["apt-get", "-q", *arguments], cwd=cwd, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise MachineError(
            f"apt-get {' '.join(arguments)} failed; run `apt-get update` if its lists are old:\n{result.stdout}{result.stderr}"
        )


class Initramfs:
    """A cpio archive (newc) that is written as it grows. Paths in it are absolute; parents come by themselves."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self._written: set[str] = set()

    def directory(self, path: str) -> None:
        if path != "/" and path not in self._written:
            self.data(path, b"", stat.S_IFDIR | 0o755)

    def symlink(self, path: str, target: str) -> None:
        self.data(path, target.encode(), stat.S_IFLNK | 0o777)

    def text(self, path: str, text: str) -> None:
        self.data(path, text.encode(), stat.S_IFREG | 0o755)

    def file(self, path: str, source: Path) -> None:
        """A file with the mode and the time of `source`: by its time, compiled Python is known to be valid."""
        info = source.stat()
        self.data(path, source.read_bytes(), info.st_mode, int(info.st_mtime))

    def data(self, path: str, data: bytes, mode: int, mtime_s: int = 0) -> None:
        """An entry, unless there is one at this path."""
        if path in self._written:
            return
        self.directory(os.path.dirname(path))
        self._written.add(path)
        name = path.lstrip("/").encode() + b"\0"
        fields = (len(self._written), mode, 0, 0, 1, mtime_s, len(data), 0, 0, 0, 0, len(name), 0)
        header = b"070701" + "".join(f"{field:08x}" for field in fields).encode() + name
        self._out.write(header + bytes(-len(header) % 4) + data + bytes(-len(data) % 4))

    def tree(self, path: str, source: Path, skip: Iterable[str] = ()) -> Iterator[Path]:
        """A directory's files, except those below top-level names in `skip`; yields what it takes."""
        for here, names, files in os.walk(source):
            names[:] = [name for name in names if Path(here) != source or name not in skip]
            for name in sorted(files):
                taken = Path(here, name)
                self.file(f"{path}/{taken.relative_to(source)}", taken)
                yield taken

    def close(self) -> None:
        self.data("/TRAILER!!!", b"", 0)


def distributions(name: str) -> list[metadata.Distribution]:
    """What the distribution `name` needs to run, directly or not, as installed here; without itself and its extras."""
    found: dict[str, metadata.Distribution] = {}
    wanted = [name]
    while wanted:
        for requirement in metadata.distribution(wanted.pop()).requires or []:
            project = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]
            if "extra ==" in requirement or project in found:
                continue
            try:
                found[project] = metadata.distribution(project)
            except metadata.PackageNotFoundError:
                if ";" in requirement:  # for another Python or system
                    continue
                raise
            wanted.append(project)
    return list(found.values())


def shared_libraries(files: Sequence[Path]) -> set[Path]:
    """The shared libraries that these programs and libraries load. Raises MachineError if one is not here."""
    result = subprocess.run(["ldd", *files], capture_output=True, text=True, check=False)  # fails for static ones
    if missing := re.findall(r"\S+ => not found", result.stdout):
        raise MachineError(f"shared libraries are missing here: {', '.join(sorted(set(missing)))}")
    return {Path(path) for path in re.findall(r"(?:=> |^\t)(/\S+) \(", result.stdout, re.MULTILINE)}


@attrs.frozen
class Contents:
    """What is in the machine besides Python and our packages."""

    program: Path
    """Run in the machine by our interpreter; prints one JSON value on its stdout."""
    programs: tuple[str, ...]
    """Of this machine, found in PATH."""
    packages: tuple[str, ...]
    """Directories of the repository, importable there."""
    modules: tuple[str, ...]
    """Kernel modules, loaded at the start."""


INIT = """#!/bin/busybox sh
export PATH=/bin
busybox mount --bind /machine /machine
cd /machine
busybox mount --move . /
exec busybox chroot . /start
"""

START = """#!/bin/busybox sh
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
for applet in mount mkdir insmod ip poweroff; do alias $applet="busybox $applet"; done
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
exec </dev/null >/dev/console 2>&1
mkdir -p /dev/pts /dev/shm
mount -t devpts devpts /dev/pts
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /tmp
mount -t cgroup2 -o nsdelegate cgroup2 /sys/fs/cgroup
mount --make-rshared /
for module in /modules/*; do insmod $module; done
ip link set lo up
@PYTHON@ /program >/dev/ttyS1
poweroff -f
"""


def write_root(out: BinaryIO, contents: Contents, source: Kernel) -> None:
    """The initramfs: the root below its own directory, and what makes that the root."""
    archive = Initramfs(out)
    busybox = _program("busybox")
    archive.file("/bin/busybox", busybox)
    archive.text("/init", INIT)
    for name in ("dev", "proc", "sys", "run", "tmp", "root", "etc"):
        archive.directory(f"/{ROOT}/{name}")
    for name in ("bin", "sbin", "lib", "lib64"):
        archive.symlink(f"/{ROOT}/{name}", f"usr/{name}")
    archive.text(f"/{ROOT}/start", START.replace("@PYTHON@", PYTHON))
    archive.text(f"/{ROOT}/etc/passwd", "root:x:0:0:root:/root:/bin/sh\n")
    archive.symlink(f"/{ROOT}/usr/bin/sh", "busybox")
    archive.file(f"/{ROOT}/program", contents.program)
    for number, module in enumerate(source.module_files(contents.modules)):
        archive.data(f"/{ROOT}/modules/{number:02}-{module.name.partition('.')[0]}.ko", read_module(module), stat.S_IFREG | 0o644)
    loading = [_program(name) for name in (*contents.programs, "busybox")]
    for program in loading:
        archive.file(f"/{ROOT}/usr/bin/{program.name}", program)
    loading += _write_python(archive, contents.packages)
    for library in sorted(shared_libraries(loading)):
        where = library.parent.resolve()  # /lib is /usr/lib
        archive.file(f"/{ROOT}{where}/{library.name}", library)
    archive.close()


def _program(name: str) -> Path:
    found = shutil.which(name, path="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
    if found is None:
        raise MachineError(f"the machine needs the program {name!r}, which is not here; tools/bootstrap.sh installs it")
    return Path(found)


def _write_python(archive: Initramfs, packages: Sequence[str]) -> list[Path]:
    """The interpreter of this process in a virtual environment with our packages; what of it loads shared libraries."""
    interpreter = Path(sys.executable).resolve()
    stdlib = Path(sysconfig.get_path("stdlib"))
    site = f"/{ROOT}{VENV}/lib/{stdlib.name}/site-packages"
    archive.file(f"/{ROOT}{interpreter}", interpreter)
    archive.symlink(f"/{ROOT}{PYTHON}", str(interpreter))
    archive.text(f"/{ROOT}{VENV}/pyvenv.cfg", f"home = {interpreter.parent}\ninclude-system-site-packages = false\n")
    archive.text(f"/{ROOT}{VENV}/bin/weenv", f"#!{PYTHON}\nfrom tools.cli import main\n\nmain()\n")
    unused = _STDLIB_UNUSED | {path.name for path in stdlib.glob("config-*")}
    taken = list(archive.tree(f"/{ROOT}{stdlib}", stdlib, unused))
    for package in packages:
        taken += archive.tree(f"{site}/{package}", REPOSITORY / package)
    for distribution in distributions("weenv"):
        for file in distribution.files or []:
            path = Path(str(distribution.locate_file(file)))
            if ".." not in file.parts and path.is_file():
                archive.file(f"{site}/{file}", path)
                taken.append(path)
    return [interpreter, *(path for path in taken if ".so" in path.suffixes)]


def run(contents: Contents, scratch: Path, *, timeout_s: float, memory_mib: int = 1024) -> tuple[Any, str]:
    """Boots the machine, runs the program, and powers off; its result and the console. Raises MachineError."""
    source = kernel()
    image, console, result = scratch / "root.cpio", scratch / "console", scratch / "result"
    with image.open("wb") as out:
        write_root(out, contents, source)
    command = [
        str(_program(QEMU)), "-nodefaults", "-no-user-config", "-no-reboot", "-display", "none", "-monitor", "none",
        "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2", "-m", f"{memory_mib}M",
        "-kernel", str(source.image), "-initrd", str(image), "-append", "console=ttyS0 panic=-1 mitigations=off",
        "-serial", f"file:{console}", "-serial", f"file:{result}",
    ]  # fmt: skip
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as emulator:
        try:
            said, _ = emulator.communicate(timeout=timeout_s)
            how = f"ended with status {emulator.returncode}"
        except subprocess.TimeoutExpired:
            emulator.kill()
            said, _ = emulator.communicate()
            how = f"did not end within {timeout_s:g} s"
        except BaseException:
            emulator.kill()
            raise
    image.unlink()
    shown = console.read_bytes().decode(errors="replace") if console.exists() else ""
    text = result.read_text(errors="replace") if result.exists() else ""
    try:
        return json.loads(text), shown
    except ValueError as error:
        raise MachineError(
            f"the machine {how}; expected one JSON value from {contents.program.name}, received {text[:500]!r}: {error}\n"
            f"{said.decode(errors='replace')}\n--- its console ---\n{shown[-CONSOLE_SHOWN_BYTES:]}"
        ) from error
