"""``python -m fsdp.checkpoint inspect|verify|export|diff PATH``: look at checkpoints without starting any ranks."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from fsdp.checkpoint import directory
from fsdp.checkpoint import manifest as manifests
from fsdp.checkpoint.errors import CheckpointError
from fsdp.checkpoint.export import MAX_SHARD, export
from fsdp.checkpoint.reader import Reader
from fsdp.checkpoint.sources import CheckpointSource, Source, open_source

EPILOG = """
PATH is a checkpoint, the folder of a run (its newest complete checkpoint is meant), a safetensors or torch file, a
folder of such with an index, or a torch distributed checkpoint. verify wants a checkpoint.
exit codes: 0 all is well; 1 verify found damage, diff found differences, or PATH cannot be read; 2 wrong arguments.
"""
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="python -m fsdp.checkpoint",
        description="Look at checkpoints, without starting any ranks.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--trust-pickle", action="store_true", help="load torch files that hold any objects, which may run any code"
    )
    commands = top.add_subparsers(dest="command", required=True)
    inspect = commands.add_parser("inspect", parents=[common], help="what is in it")
    inspect.add_argument("path", type=Path)
    verify = commands.add_parser("verify", parents=[common], help="every byte against its checksum")
    verify.add_argument("path", type=Path)
    exporter = commands.add_parser("export", parents=[common], help="write model.safetensors")
    exporter.add_argument("path", type=Path)
    exporter.add_argument("out", type=Path, help="a folder")
    exporter.add_argument("--dtype", choices=DTYPES, help="cast floating-point tensors")
    exporter.add_argument("--max-shard-size", type=int, default=MAX_SHARD, metavar="BYTES", help="of one file")
    exporter.add_argument("--optimizer", action="store_true", help="write optimizer.pt too, a torch.optim state dict")
    differ = commands.add_parser("diff", parents=[common], help="names, shapes and values that differ")
    differ.add_argument("path", type=Path)
    differ.add_argument("other", type=Path)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    options = parser().parse_args(arguments)
    try:
        if options.command == "verify":
            return _verify(options.path)
        if options.command == "export":
            files = export(
                options.path,
                options.out,
                dtype=DTYPES.get(options.dtype),
                max_shard_size=options.max_shard_size,
                optimizer=options.optimizer,
                trust_pickle=options.trust_pickle,
            )
            for file in files:
                print(f"{file}  {file.stat().st_size:,} bytes")
            return 0
        source = open_source(options.path, options.trust_pickle)
        if options.command == "inspect":
            return _inspect(source)
        return _diff(source, open_source(options.other, options.trust_pickle))
    except (CheckpointError, OSError) as error:
        sys.stderr.write(f"fsdp.checkpoint: error: {error}\n")
        return 1


def _inspect(source: Source) -> int:
    if isinstance(source, CheckpointSource):
        manifest = source.manifest
        print(f"{source.path}: step {manifest.step}, saved by {manifest.world_size} ranks")
        for file in manifest.files:
            print(f"  {file.name}  {file.nbytes:,} bytes")
        for family, members in manifest.tensors.items():
            if family != manifests.MODEL:
                print(f"  {family}: {len(members)} tensors of {sum(t.numel for t in members.values()):,} elements")
        for name, other in manifest.tied.items():
            print(f"  {name} is {other}")
        if isinstance(manifest.extra, dict) and manifest.extra:
            print(f"  extra: {', '.join(manifest.extra)}")
    width = max((len(name) for name in source.tensors), default=0)
    for name, (dtype, shape) in source.tensors.items():
        print(f"{name:{width}}  {str(dtype).removeprefix('torch.'):9}  {'x'.join(map(str, shape)) or 'scalar'}")
    total = sum(math.prod(shape) for _, shape in source.tensors.values())
    print(f"{len(source.tensors)} tensors, {total:,} elements")
    return 0


def _verify(path: Path) -> int:
    checkpoint = directory.resolve(path)
    manifest = directory.read_manifest(checkpoint)
    Reader(checkpoint, manifest).verify([range(len(file.blocks)) for file in manifest.files])
    total = sum(file.nbytes for file in manifest.files)
    print(f"{checkpoint}: step {manifest.step}, {len(manifest.files)} files, {total:,} bytes, all as they were written")
    return 0


def _diff(first: Source, second: Source) -> int:
    lines = [f"- {name}" for name in first.tensors if name not in second.tensors]
    lines += [f"+ {name}" for name in second.tensors if name not in first.tensors]
    for name in first.tensors:
        if name not in second.tensors:
            continue
        a, b = first.tensors[name], second.tensors[name]
        if a != b:
            lines.append(f"~ {name}: {a.dtype} {a.shape} and {b.dtype} {b.shape}")
        if a.shape == b.shape and (difference := _difference(first.whole(name), second.whole(name))):
            lines.append(f"~ {name}: {difference}")
    print("\n".join(lines) if lines else f"{len(first.tensors)} tensors, all equal")
    return int(bool(lines))


def _difference(a: torch.Tensor, b: torch.Tensor) -> str:
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    x, y = a.to(wide), b.to(wide)
    other = ~((x == y) | ((x != x) & (y != y)))
    count = int(other.sum())
    if not count:
        return ""
    return f"{count:,} of {a.numel():,} elements differ, by at most {float((x - y)[other].abs().max()):g}"


if __name__ == "__main__":
    sys.exit(main())
