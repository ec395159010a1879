"""The root of an environment: one overlay mount, over the plan's directory (merged view) or over the images of its layers
(kernel view, envlet/kernel_view.py).

`index`, `redirect_dir` and `metacopy` are off so that the upper directory says by itself what changed: a renamed
lower directory is a copy (the kernel answers EXDEV and mv copies), a changed mode copies the file. Kernels before 6.16
follow images to the contents of files only with `redirect_dir` and `metacopy` on; then the upper directory does not say
everything, and `env.diff` asks the mounted root. `nodev` because a root needs no devices: /dev is a filesystem of its own.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from envlet import syscalls

XATTR_PREFIX = "trusted.overlay."
OPAQUE_XATTR = "trusted.overlay.opaque"
METACOPY_XATTR = "trusted.overlay.metacopy"
REDIRECT_XATTR = "trusted.overlay.redirect"
_VALUE_MAX_BYTES = 255


def escape_option(path: Path, also: str = "") -> str:
    """A path as a value in overlayfs' option string. `also`: further characters to escape (':' in lowerdir)."""
    text = str(path)
    for special in "\\," + also:
        text = text.replace(special, "\\" + special)
    return text


def mount_options(lower: Path, upper: Path, work: Path) -> str:
    """The option string. Raises ValueError where it does not fit the page that mount(2) takes."""
    options = (
        f"lowerdir={escape_option(lower, ':')},upperdir={escape_option(upper)},workdir={escape_option(work)},"
        "index=off,xino=on,redirect_dir=off,metacopy=off"
    )
    if len(os.fsencode(options)) >= 4096:
        raise ValueError(f"overlay options of {len(options)} bytes, 4095 at most; use shorter state and run directories")
    return options


def mount(lower: Path, upper: Path, work: Path, target: Path) -> None:
    """Mounts the overlay. All four directories exist. Raises OSError or ValueError."""
    syscalls.mount("overlay", str(target), "overlay", syscalls.MS_NODEV, mount_options(lower, upper, work))


def stack_options(layers: Sequence[Path], data: Path, upper: Path, work: Path, *, metacopy: bool) -> str:
    """The option string of a stack, for kernels that take it only so. Raises ValueError where it does not fit."""
    lower = ":".join(escape_option(layer, ":") for layer in reversed(layers)) + "::" + escape_option(data, ":")
    switch = "on" if metacopy else "off"
    options = (
        f"lowerdir={lower},upperdir={escape_option(upper)},workdir={escape_option(work)},"
        f"index=off,xino=on,redirect_dir={switch},metacopy={switch}"
    )
    if len(os.fsencode(options)) >= 4096:
        raise ValueError(f"overlay options of {len(options)} bytes for {len(layers)} layers, 4095 at most before Linux 6.8")
    return options


def mount_stack(layers: Sequence[Path], data: Path, upper: Path, work: Path, target: Path, *, metacopy: bool) -> None:
    """Mounts an overlay over `layers`, base first; contents of files are in the data-only layer `data`. Raises OSError or ValueError."""
    switch = "on" if metacopy else "off"
    with contextlib.ExitStack() as opened:
        places = [("lowerdir+", layer) for layer in reversed(layers)]
        places += [("datadir+", data), ("upperdir", upper), ("workdir", work)]
        parameters = [(key, _short_path(path, opened)) for key, path in places]
        parameters += [("index", "off"), ("xino", "on"), ("redirect_dir", switch), ("metacopy", switch)]
        try:
            syscalls.mount_new("overlay", str(target), parameters, syscalls.MOUNT_ATTR_NODEV)
        except OSError as error:
            if error.errno != errno.EINVAL or "lowerdir+" not in str(error):
                raise
            options = stack_options(layers, data, upper, work, metacopy=metacopy)  # before Linux 6.8
            syscalls.mount("overlay", str(target), "overlay", syscalls.MS_NODEV, options)


def _short_path(path: Path, opened: contextlib.ExitStack) -> str:
    """A path as a parameter's value: itself, or by way of a descriptor where it is long or has what overlayfs would take for an escape."""
    text = str(path)
    if len(os.fsencode(text)) <= _VALUE_MAX_BYTES and not set(text) & set("\\,:"):
        return text
    fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    opened.callback(os.close, fd)
    return f"/proc/self/fd/{fd}"


def unmount(target: Path) -> None:
    """Unmounts it; fine if nothing is mounted there. Raises OSError: EBUSY while something uses it."""
    try:
        syscalls.umount(str(target))
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOENT):
            raise


def probe(scratch: Path) -> None:
    """Mounts an overlay whose directories are below `scratch`, which it makes, and removes a file in it: the upper needs
    whiteouts, too. Raises OSError where the filesystem cannot do it; the caller removes `scratch`.
    """
    lower, upper, work, root = (scratch / name for name in ("lower", "upper", "work", "root"))
    for directory in (lower, upper, work, root):
        directory.mkdir(parents=True)
    (lower / "file").touch()
    mount(lower, upper, work, root)
    try:
        (root / "file").unlink()
        (root / "directory").mkdir()
        os.setxattr(upper / "directory", OPAQUE_XATTR, b"y")
    finally:
        unmount(root)


def copy_metadata(source: Path, target: Path) -> None:
    """Gives the directory `target` the owner, mode, attributes and times of `source`: the upper directory is the root
    that one sees.
    """
    status = os.lstat(source)
    os.chown(target, status.st_uid, status.st_gid)
    os.chmod(target, stat.S_IMODE(status.st_mode))
    for name in os.listxattr(source):
        if not name.startswith(XATTR_PREFIX):
            os.setxattr(target, name, os.getxattr(source, name))
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))
