"""Kernel packs: one compiled target in one file, made after installation or carried to another machine.

A pack is data: a manifest and device images, never host code. The file, all integers little-endian:

    byte 0    magic, 8 bytes
    byte 8    format, u32
    byte 12   length of the manifest in bytes, u32
    byte 16   length of the file in bytes, u64
    byte 24   SHA-256 of the rest of the file: of bytes 0..24 and 56..end
    byte 56   zeros to byte 64
    byte 64   manifest, JSON (atlas/build/manifest.py); its image offsets count from the first image's place
              images, each at the next multiple of 64 after what precedes it, zeros between

The same input gives the same bytes, and nothing in them depends on the machine that compiled them.
Reading trusts nothing: every size is checked before it is used, and no more is read than the file's size.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import shlex
import stat
import struct
import tempfile
from pathlib import Path

from atlas.build import manifest as manifests
from atlas.build.manifest import CORE_ABI, KernelSet, Manifest
from atlas.errors import BuildError

FORMAT = 1
"""Version of the file's layout. The manifest inside has its own."""

SUFFIX = ".atlaspack"

MAGIC = b"\x89ATLASK\n"
"""Not text, and damaged by a transfer that changes line ends or drops the eighth bit."""

ALIGNMENT = 64
MAX_BYTES = 1 << 30
MAX_MANIFEST_BYTES = 4 << 20

_HEADER = struct.Struct("<8sIIQ32s8x")
_HASHED_HEAD, _HASHED_TAIL = 24, 56

_ELF = struct.Struct("<4sBB10xHH4x8xQQ4xHHHHHH")  # of ELF64: ident, machine, tables and their sizes
_EM_CUDA = 190
_SECTION = struct.Struct("<4xI16xQQ")  # of ELF64: type, offset, size
_SHT_NOBITS = 8
_PTX = re.compile(rb"[\t\n\r -~]*\0?")


@dataclasses.dataclass(frozen=True)
class Pack:
    """An opened pack: its manifest with one kernel set, and the device images it refers to."""

    manifest: Manifest
    images: list[memoryview]

    @property
    def kernel_set(self) -> KernelSet:
        return self.manifest.sets[0]


def rebuild_command(model: str = "MODEL", hardware: str = "HW", quant: str = "QUANT") -> str:
    """The command that makes the right pack; names in capitals where one is not known."""
    return f"python -m atlas.build {shlex.quote(model)} --hw {hardware} --quant {quant}"


def cache_name(kernel_set: KernelSet) -> str:
    """File name in the cache: what a lookup asks for, so that no file is opened in vain, and a hash of the kernels'
    names, so that packs for checkpoints that mix formats in different ways stand beside each other."""
    names = hashlib.sha256("\n".join(sorted(kernel.name for kernel in kernel_set.kernels)).encode()).hexdigest()[:8]
    words = (kernel_set.hardware, kernel_set.shape_hash, kernel_set.quant, names, str(CORE_ABI))
    return "-".join(words) + SUFFIX


def to_bytes(manifest: Manifest, blob: bytes) -> bytes:
    """The file of a build of one CUDA target. Raises BuildError for anything else."""
    text = manifest.to_json().encode("ascii")
    body = text + bytes(-(_HEADER.size + len(text)) % ALIGNMENT) + blob
    total = _HEADER.size + len(body)
    unsigned = _HEADER.pack(MAGIC, FORMAT, len(text), total, bytes(32)) + body
    data = _HEADER.pack(MAGIC, FORMAT, len(text), total, _digest(unsigned)) + body
    from_bytes(data, "the new pack")
    return data


def rebuild(model: str = "MODEL", hardware: str = "HW", quant: str = "QUANT") -> str:
    """`rebuild_command` as the last part of an error."""
    return f"run: {rebuild_command(model, hardware, quant)}"


def write(path: Path, data: bytes) -> None:
    """Put a pack at `path`; a reader sees the old file or the new one. Raises BuildError."""
    try:
        handle, temporary = tempfile.mkstemp(prefix=path.name + ".", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.chmod(temporary, 0o644)  # mkstemp makes it private; a pack is no secret
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise BuildError(str(path), f"cannot be written ({error.strerror})", "a file in a writable folder") from None


def read(path: Path, fix: str = "") -> Pack:
    """Open a pack.

    fix: what to do about a pack that is refused; by default the rebuild command without names.

    Raises:
        BuildError: not a readable regular file, or anything in it is not what it must be.
    """
    file = _File(str(path), fix or rebuild())
    try:
        # Non-blocking: opening a named pipe would wait for its writer.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as stream:
            status = os.fstat(stream.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise file.refusal("not a regular file", f"a kernel pack ({SUFFIX})")
            if status.st_size > MAX_BYTES:
                raise file.refusal(f"{status.st_size} bytes", f"at most {MAX_BYTES} bytes")
            data = stream.read(status.st_size)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        reason = error.strerror if isinstance(error, OSError) else error
        raise file.refusal(f"cannot be read ({reason})", f"a kernel pack ({SUFFIX})") from None
    return file.parse(data)


def from_bytes(data: bytes, where: str, fix: str = "") -> Pack:
    """A pack from its bytes; see `read`."""
    return _File(where, fix or rebuild()).parse(data)


@dataclasses.dataclass(frozen=True)
class _File:
    """A pack being read: where it is, and what to do if it is no good."""

    where: str
    fix: str

    def refusal(self, found: str, accepted: str = "") -> BuildError:
        return BuildError(self.where, found, accepted, self.fix)

    def parse(self, data: bytes) -> Pack:
        manifest_bytes = self._check_header(data)
        view, end = memoryview(data), _HEADER.size + manifest_bytes
        try:
            text = bytes(view[_HEADER.size : end]).decode("ascii")
        except UnicodeDecodeError as error:
            raise self.refusal(f"the manifest is damaged: byte {error.start} is not ASCII", "JSON in ASCII") from None
        images_at = min(end + -end % ALIGNMENT, len(data))
        manifest, images = manifests.from_json(text, view[images_at:], self.where, self.fix)
        if len(manifest.sets) != 1 or manifest.sets[0].kind != "cuda" or not manifest.sets[0].kernels:
            found = ", ".join(f"{s.name} ({s.kind}, {len(s.kernels)} kernels)" for s in manifest.sets[:3])
            raise self.refusal(
                f"the manifest is damaged: sets: {found or 'none'}",
                "one CUDA kernel set; a CPU's kernels are host code, which no pack holds",
            )
        self._check_images(manifest, images, len(data) - images_at)
        return Pack(manifest, images)

    def _check_header(self, data: bytes) -> int:
        """Returns the length of the manifest."""
        if not data.startswith(MAGIC):
            begin = data[: len(MAGIC)].hex(" ") or "nothing"
            raise self.refusal(f"not a kernel pack: begins with {begin}", MAGIC.hex(" "))
        if len(data) < _HEADER.size:
            raise self.refusal(f"cut off: {len(data)} bytes", f"a header of {_HEADER.size} bytes")
        _, version, manifest_bytes, total, digest = _HEADER.unpack_from(data)
        if version != FORMAT:
            raise self.refusal(f"pack format {version}", f"format {FORMAT}")
        if total != len(data):
            problem = "cut off" if len(data) < total else "something is appended"
            raise self.refusal(f"{problem}: {len(data)} bytes", f"{total} bytes, as its header says")
        most = min(MAX_MANIFEST_BYTES, total - _HEADER.size)
        if not 0 < manifest_bytes <= most:
            raise self.refusal(f"a manifest of {manifest_bytes} bytes", f"1..{most} bytes")
        found = _digest(data)
        if found != digest:
            raise self.refusal(f"damaged: its sha256 is {found.hex()[:16]}...", f"{digest.hex()[:16]}..., as written")
        assert isinstance(manifest_bytes, int)
        return manifest_bytes

    def _check_images(self, manifest: Manifest, images: list[memoryview], room: int) -> None:
        """Images follow one another without gaps, and are code for a GPU."""
        variants = [variant for kernel in manifest.sets[0].kernels for variant in kernel.variants]
        code, text = {variant.image for variant in variants}, {variant.ptx for variant in variants}
        place = end = 0
        for index, (image, content) in enumerate(zip(manifest.images, images, strict=True)):
            if image.offset != place:
                raise self.refusal(
                    f"the manifest is damaged: images[{index}].offset: is {image.offset}", f"{place}, with no gap"
                )
            if problem := _not_device_code(content):
                raise self.refusal(f"images[{index}]: {problem}", "a cubin or PTX; a pack holds no host code")
            # PTX needs a zero byte behind it, and is compiled at load, which is said: so it must not pass as a cubin.
            is_cubin = bytes(content[:4]) == b"\x7fELF"
            if (index in code and not is_cubin) or (index in text and is_cubin):
                found = "a cubin" if is_cubin else "PTX"
                raise self.refusal(f"images[{index}]: {found} that kernels name as {'ptx' if is_cubin else 'image'}")
            end = image.offset + image.size
            place = end + -end % ALIGNMENT
        if end != room:
            raise self.refusal(f"{room} bytes of images", f"{end} bytes, as the manifest says")


def _digest(data: bytes) -> bytes:
    view = memoryview(data)
    digest = hashlib.sha256(view[:_HASHED_HEAD])
    digest.update(view[_HASHED_TAIL:])
    return digest.digest()


def _not_device_code(content: memoryview) -> str:
    """What is wrong with an image, or "". The driver is given an address and no length, so an image whose
    tables reach beyond its end must not get there."""
    if bytes(content[:4]) != b"\x7fELF":
        ptx = bytes(content)
        return "" if _PTX.fullmatch(ptx) and b".version" in ptx else "neither ELF nor PTX"
    if len(content) < _ELF.size:
        return f"an ELF file of {len(content)} bytes"
    _, wide, order, _, machine, programs_at, sections_at, *sizes = _ELF.unpack_from(content)
    _, program_size, n_programs, section_size, n_sections, _ = sizes
    if (wide, order, machine) != (2, 1, _EM_CUDA):
        return f"an ELF file for machine {machine}, not for a GPU ({_EM_CUDA})"
    tables = [
        ("programs", programs_at, program_size * n_programs),
        ("sections", sections_at, section_size * n_sections),
    ]
    for name, at, size in tables:
        if at + size > len(content):
            return f"its table of {name} ends at byte {at + size} of {len(content)}"
    if n_sections and section_size < _SECTION.size:
        return f"section headers of {section_size} bytes"
    for index in range(n_sections):
        kind, at, size = _SECTION.unpack_from(content, sections_at + index * section_size)
        if kind != _SHT_NOBITS and at + size > len(content):
            return f"its section {index} ends at byte {at + size} of {len(content)}"
    return ""
