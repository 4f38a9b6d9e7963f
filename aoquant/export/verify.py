"""`aoquant verify`: compare a folder of aoquant's with the checksums that it was written with."""

from pathlib import Path

from aoquant.export import gguf_checksum
from aoquant.files import checkpoint, checksums


def verify(folder: Path) -> str:
    """Compare every file of weights in a folder, and what says how they are read, with its checksum.

    folder: of `aoquant run`, `aoquant.save_pretrained` or `aoquant convert`, or one that `aoquant export` wrote, in any
        of its formats. Returns a sentence that counts what was compared.

    Raises:
        ValueError: a file is damaged, is missing, or holds no checksum; names the file.
    """
    if not (folder / "config.json").is_file() and (folder / "checkpoint" / "config.json").is_file():
        folder = folder / "checkpoint"  # of a run's results
    if not folder.is_dir():
        raise ValueError(f"{folder}: is no folder: give the folder that aoquant wrote")
    found = sorted(folder.glob("*.gguf"))
    for path in found:
        gguf_checksum.verify(path)
    if found:
        return f"{folder}: {len(found)} GGUF file(s) are what was written"
    files = checkpoint.files(folder)
    checksums.verify_configs(files)
    for path in files:
        if not checksums.check_names(path):
            raise ValueError(
                f"{path}: holds no checksums, so nothing can be compared: another library or an earlier version wrote it"
            )
    compared = checksums.verify(files)
    return f"{folder}: {compared} tensors of {len(files)} file(s) are what was written"
