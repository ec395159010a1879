"""The kernel view: EROFS images of metadata, mounted once for a node, and overlays that stack them over the contents in weefs.

Metadata then costs no request to weefs: the kernel reads the image. Contents come from `objects` below the mount of weefs, a data-only
layer, where a file is the same inode as in the merged view. What a kernel can is tried and not read off its version:

| tried in this order, with images mounted from their files (6.12), then on loop devices | since |
|---|---|
| `metacopy=off`, a stack of one image for each layer | no kernel yet |
| `metacopy=off`, one image for the plan | Linux 6.16 |
| `metacopy=on`, a stack | Linux 6.5 |

With `metacopy=off` an environment behaves as in the merged view and its upper directory says by itself what changed; but
kernels then follow redirects only from the lowest layer (files of a higher one disappear from listings), which is why a
stack is tried by what it shows. Each only counts if an overlay in an environment's overlay works, too: filesystems can be
stacked two deep, and a kernel may count an image mounted from a file as one.

An image is mounted at `<run_dir>/meta/<its file's name>` when the first environment needs it and unmounted when the last plan that uses it
is gone. The mount table is the record: a successor of this daemon in the same mount namespace finds what is mounted there.
"""

import errno
import io
import logging
import os
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import attrs

from envlet import errors, mounts, overlay, syscalls
from envlet.errors import EnvletError
from envlet.ports import MountedPlan
from layerformat import Entry, Kind, decode_footer, encode, restore_toc
from weefs import core

log = logging.getLogger("envlet")

FOOTER_SIZE = 80
_PROBE_NAMES = ("0" * 32, "1" * 32)
_PROBE_INODES = 8
_PROBE_CONTENTS = b"the contents of a redirected file"

Wanted = Literal["auto", "kernel", "merged"]


@attrs.frozen
class View:
    """How roots are shown on this node."""

    kind: Literal["kernel", "merged"]
    reason: str
    """Why this one, one sentence."""
    metacopy: bool = False
    """Whether the overlay follows images to contents only with `metacopy` and `redirect_dir` on."""
    loop: bool = False
    """Whether images need loop devices."""
    stack: bool = False
    """Whether a plan may be a stack of its layers' images; else it is one image."""


def choose(wanted: Wanted, scratch: Path) -> View:
    """The view of this node. `scratch` is made, on the filesystem of the upper directories; the caller removes it. Blocks.

    Raises EnvletError(MOUNT_FAILED) if `kernel` is wanted and this kernel cannot, OSError if `scratch` cannot be used.
    """
    if wanted == "merged":
        return View("merged", "the configuration says so")
    view = probe(scratch)
    if wanted == "kernel" and view.kind != "kernel":
        raise EnvletError(errors.MOUNT_FAILED, f"view = kernel, but {view.reason}; choose view = auto or merged")
    return view


def probe(scratch: Path) -> View:
    """What this kernel can, by doing it. Blocks. Raises OSError if the image cannot be written."""
    images = _write_probe(scratch)
    refusals = []
    for loop in (False, True):
        for metacopy, stack in ((False, True), (False, False), (True, True)):
            view = View("kernel", _describe(loop, metacopy, stack), metacopy, loop, stack)
            try:
                _try(scratch / f"{loop:d}{metacopy:d}{stack:d}", images if stack else images[:1], scratch / "objects", view)
            except (OSError, ValueError) as error:
                refusals.append(f"{view.reason}: {error}")
            else:
                return view
    return View("merged", f"this kernel cannot show images: {'; '.join(refusals)}")


def _describe(loop: bool, metacopy: bool, stack: bool) -> str:
    images = "an image for each layer" if stack else "an image for each plan"
    return f"{images}, mounted {'on loop devices' if loop else 'from files'}, metacopy={'on' if metacopy else 'off'}"


def _write_probe(scratch: Path) -> list[Path]:
    """Images of two layers that have a directory in common, and their contents."""
    images = []
    for number, name in enumerate(_PROBE_NAMES):
        blob = io.BytesIO()
        file = Entry(path=b"a/file%d" % number, kind=Kind.REGULAR, mode=0o644, size=len(_PROBE_CONTENTS))
        encode([(file, io.BytesIO(_PROBE_CONTENTS)), (Entry(path=b"b", kind=Kind.DIRECTORY, mode=0o755), io.BytesIO())], blob)
        data = blob.getvalue()
        footer = decode_footer(data[-FOOTER_SIZE:], blob_size=len(data))
        toc = restore_toc(data[footer.toc_offset : footer.toc_offset + footer.toc_stored_size], footer.toc_raw_size)
        (scratch / "objects" / name).mkdir(parents=True)
        for inode in range(_PROBE_INODES):  # whichever the file's is
            (scratch / "objects" / name / str(inode)).write_bytes(_PROBE_CONTENTS)
        images.append(scratch / f"image{number}")
        fd = os.open(images[-1], os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            core.write_layer_image(toc, name, fd)
        finally:
            os.close(fd)
    return images


def _try(place: Path, images: Sequence[Path], objects: Path, view: View) -> None:
    """Raises OSError or ValueError unless redirected files are listed, can be read and changed, and an overlay mounted over the overlay."""
    upper, work, root, nested = (place / name for name in ("upper", "work", "root", "nested"))
    layers = [place / image.name for image in images]
    for directory in (upper, work, root, nested, *layers):
        directory.mkdir(parents=True)
    mounted: list[Path] = []
    try:
        for image, layer in zip(images, layers, strict=True):
            mount_image(image, layer, loop=view.loop)
            mounted.append(layer)
        overlay.mount_stack(layers, objects, upper, work, root, metacopy=view.metacopy)
        mounted.append(root)
        names = [f"file{number}" for number in range(len(images))]
        if sorted(os.listdir(root / "a")) != names:
            raise OSError(errno.EIO, "redirected files are not listed")
        for name in names:
            if (root / "a" / name).read_bytes() != _PROBE_CONTENTS:
                raise OSError(errno.EIO, "a redirected file does not show its contents")
            (root / "a" / name).chmod(0o600)
        options = f"lowerdir={overlay.escape_option(root / 'a', ':')}:{overlay.escape_option(root / 'b', ':')}"
        syscalls.mount("overlay", str(nested), "overlay", syscalls.MS_RDONLY, options)
        mounted.append(nested)
        if (nested / names[0]).read_bytes() != _PROBE_CONTENTS:
            raise OSError(errno.EIO, "an overlay over the overlay does not show the contents of a file")
    finally:
        for target in reversed(mounted):
            overlay.unmount(target)


def mount_image(image: Path, target: Path, *, loop: bool) -> None:
    """Mounts an image. Raises OSError."""
    flags = syscalls.MS_RDONLY | syscalls.MS_NODEV | syscalls.MS_NOSUID
    if not loop:
        syscalls.mount(str(image), str(target), "erofs", flags)
        return
    fd, device = syscalls.attach_loop(str(image))
    try:
        syscalls.mount(device, str(target), "erofs", flags)
    finally:
        os.close(fd)  # the mount keeps the device; without one, this frees it


class KernelView:
    """The mounted images of a node, and what mounts roots. Its methods block and may be called from several threads."""

    def __init__(self, directory: Path, view: View, *, required: bool = False) -> None:
        """`required`: a root that cannot be shown from images is an error; else the merged view shows it."""
        self.view = view
        self._required = required
        self._merged_instead = 0
        self._directory = directory
        self._plans: dict[str, tuple[Path, ...]] = {}
        self._seen: set[Path] = set()
        self._lock = threading.Lock()

    def statistics(self) -> dict[str, int]:
        return {
            "plans": len(self._plans),
            "images": len({image for images in self._plans.values() for image in images}),
            "merged_instead": self._merged_instead,
        }

    def mount(self, plan: MountedPlan, upper: Path, work: Path, target: Path) -> None:
        """Mounts an environment's root: over the plan's images if it has some, else over its directory. Raises OSError or ValueError."""
        if self.view.kind == "kernel":
            try:
                self._mount_images(plan, upper, work, target)
                return
            except (OSError, ValueError) as error:
                if self._required:
                    raise
                with self._lock:
                    self._merged_instead += 1
                log.warning("plan %s is shown by the merged view: %s", plan.plan_id, error)
        overlay.mount(plan.path, upper, work, target)

    def _mount_images(self, plan: MountedPlan, upper: Path, work: Path, target: Path) -> None:
        if not plan.images:
            raise ValueError(f"it has no images: {plan.images_refused or 'the data plane makes none'}")
        self._hold(plan)
        layers = [self._target(image) for image in plan.images]
        overlay.mount_stack(layers, plan.objects or plan.path.parent / "objects", upper, work, target, metacopy=self.view.metacopy)

    def adopt(self, plan: MountedPlan) -> None:
        """A plan of an earlier daemon in this mount namespace, whose environments go on: its images are kept."""
        if plan.images:
            self._hold(plan)

    def forget(self, plan: MountedPlan) -> None:
        """The plan has no environment any more: unmounts what no other plan uses. Raises OSError."""
        with self._lock:
            if self._plans.pop(plan.plan_id, None) is not None:
                self._unmount_unused()

    def sweep(self) -> None:
        """Unmounts what an earlier daemon in this mount namespace left and no plan that was adopted uses. Raises OSError."""
        with self._lock:
            self._unmount_unused()

    def close(self) -> None:
        """Unmounts all images. No environment uses one any more. Raises OSError."""
        with self._lock:
            self._plans.clear()
            self._unmount_unused()

    def _target(self, image: Path) -> Path:
        return self._directory / image.name

    def _hold(self, plan: MountedPlan) -> None:
        """Sees to it that the plan's images are mounted, each once. The mount table, which is long where there are many environments,
        is read only for images that were not seen in it yet.
        """
        with self._lock:
            self._plans.setdefault(plan.plan_id, plan.images)
            missing = [image for image in plan.images if self._target(image) not in self._seen]
            mounted = self._mounted() if missing else set()
            for image in missing:
                target = self._target(image)
                if str(target) not in mounted:
                    target.mkdir(parents=True, exist_ok=True)
                    mount_image(image, target, loop=self.view.loop)
                self._seen.add(target)

    def _mounted(self) -> set[str]:
        prefix = f"{self._directory}/"
        return {mount.target for mount in mounts.current_mounts() if mount.target.startswith(prefix)}

    def _unmount_unused(self) -> None:
        used = {str(self._target(image)) for images in self._plans.values() for image in images}
        for target in sorted(self._mounted() - used):
            self._seen.discard(Path(target))
            syscalls.umount(target)
        for place in _children(self._directory):
            if str(place) not in used:
                place.rmdir()


def _children(directory: Path) -> Iterable[Path]:
    return sorted(directory.iterdir()) if directory.is_dir() else ()
