"""What decided a render, as one JSON object: written into the file, kept beside it, and enough to repeat it.

    RenderResult ─▶ manifest {request, resolved, models, fidelity, environment, latent hash}
    manifest file, or mp4 ─▶ load_manifest ─▶ request_from (media looked up by name and checked by hash) ─▶ render
    two manifests ─▶ differences: one line per thing that is not the same

It holds base names and hashes only: no absolute path, user or host name, no date. Measurements go to the report.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from pathlib import Path

import torch

from .accelerators import spec_of
from .errors import H3Error
from .guides import with_size
from .media import read_metadata
from .render import RenderResult, environment
from .request import GuideRequest, LoraRequest, Media, ReferenceRequest, RenderRequest, SoundMask

VERSION = 1
METADATA_KEY = "h3_manifest"
PLAIN_FIELDS = (
    "prompt",
    "size",
    "frames",
    "seed",
    "num_forwards",
    "start",
    "stop",
    "denoise",
    "video_shift",
    "audio_shift",
    "dtype",
    "recipe",
    "quantise",
    "exclude",
    "tile_batch",
    "solver",
    "few_step",
)


def make_manifest(result: RenderResult) -> dict:
    """The manifest of a finished or partial render."""
    job, schedule = result.job, result.job.schedule
    return {
        "h3_manifest": VERSION,
        "request": describe_request(result.request, result),
        "resolved": {
            "task": job.task,
            "width": job.canvas.width,
            "height": job.canvas.height,
            "num_frames": job.canvas.num_frames,
            "solver": job.solver,
            "sigmas_video": list(schedule.video),
            "sigmas_audio": list(schedule.audio),
            "forwards_run": [schedule.start, schedule.stop],
            "finished": result.finished,
        },
        "models": {
            part: {
                "file": Path(info.path).name,
                "format": info.format,
                "partition": info.partition,
                "fingerprint": info.fingerprint,
                "quantisation": info.quantisation,
            }
            for part, info in sorted(result.infos.items())
        },
        "loras": describe_loras(result.loras),
        "conditioning": None if result.record is None else result.record.to_dict(),
        "fidelity": result.fidelity.to_dict(),
        "environment": environment(result.device),
        "latent_sha256": latent_hash(result.latent),
    }


def latent_hash(latent) -> str:
    """SHA-256 of both streams' float32 values."""
    digest = hashlib.sha256()
    for tensor in (latent.video, latent.audio):
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def describe_request(request: RenderRequest, result: RenderResult) -> dict:
    """The request with its fitted size, media as name and hash."""
    fitted = with_size(request, result.canvas)
    described = {name: getattr(fitted, name) for name in PLAIN_FIELDS}
    described |= {"size": list(fitted.size), "dtype": result.dtype}
    for name in ("first_frame", "last_frame", "source", "state", "embeds"):
        described[name] = _describe_media(getattr(request, name))
    described["guides"] = [
        {**_describe_media(g.media), "frame": g.frame, "seconds": g.seconds, "strength": g.strength}
        for g in request.guides
    ]
    described["references"] = [
        {**_describe_media(r.media), "kind": r.kind, "sound": r.sound, "fps": r.fps} for r in request.references
    ]
    described["loras"] = [{**_describe_media(lora.media), "strength": lora.strength} for lora in request.loras]
    described["accelerators"] = [[name, dict(options)] for name, options in request.accelerators]
    mask, sound = request.mask, request.sound_mask
    described["mask"] = _describe_media(mask) if isinstance(mask, Media) else mask
    if isinstance(sound, SoundMask):
        described["sound_mask"] = {f.name: getattr(sound, f.name) for f in fields(sound)}
    else:
        described["sound_mask"] = sound
    return json.loads(json.dumps(described, default=lambda number: number.item()))  # numpy's numbers


def describe_loras(described: dict | None) -> dict | None:
    """What a LoRA plan says of itself, with base names in place of paths."""
    if described is None:
        return None
    loras = [{**lora, "path": Path(lora["path"]).name} for lora in described["loras"]]
    return json.loads(json.dumps({**described, "loras": loras}))


def _describe_media(media: Media | None) -> dict | None:
    return None if media is None else {"name": media.name, "sha256": media.sha256}


def dump(manifest: dict) -> str:
    """Canonical JSON text: the same manifest gives the same bytes."""
    return json.dumps(manifest, indent=1, sort_keys=True, ensure_ascii=False)


def load_manifest(path: str | Path) -> dict:
    """From a manifest file, or out of an mp4 that carries one. H3Error for anything else."""
    path = Path(path)
    if not path.is_file():
        raise H3Error(f"{path} does not exist: give a .json manifest or an mp4 that this runtime made")
    if path.suffix.lower() == ".json":
        text = path.read_bytes()
    else:
        text = read_metadata(path).get(METADATA_KEY)
        if text is None:
            raise H3Error(f"{path.name} carries no manifest: it was saved without metadata, or by another program")
    try:
        manifest = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise H3Error(f"{path.name} is not a manifest: {error}") from None
    if not isinstance(manifest, dict) or manifest.get("h3_manifest") != VERSION:
        raise H3Error(f"{path.name} is not a manifest of version {VERSION}: give the file beside a render, or the mp4")
    return manifest


def request_from(manifest: dict, folders: Iterable[Path]) -> tuple[RenderRequest, list[str]]:
    """The request again, its media found by name in ``folders``; sentences name files whose content differs.

    H3Error when a file cannot be found, or when the manifest lacks what a request needs.
    """
    notes, places = [], list(dict.fromkeys(Path(folder) for folder in folders))
    try:
        return _request_from(manifest["request"], lambda described: _find(described, places, notes)), notes
    except (KeyError, TypeError, AttributeError) as error:
        raise H3Error(f"the manifest is damaged: its request lacks or mistakes {error}; give another copy") from None


def _find(described: dict | None, folders: Sequence[Path], notes: list[str]) -> Media | None:
    """The medium of that name in ``folders``, the one with the same content first."""
    if described is None:
        return None
    name = described["name"]
    if name != Path(name).name or "\\" in name:  # a manifest may come from anywhere: it names files, never places
        raise H3Error(f"the manifest names the file {name!r}: only names without folders are read")
    candidates = [folder / name for folder in folders if (folder / name).exists()]
    if not candidates:
        places = ", ".join(str(folder) for folder in folders)
        raise H3Error(f"{name} is needed and stands in none of {places}: add --inputs FOLDER")
    same = [path for path in candidates if Media(str(path)).sha256 == described["sha256"]]
    if not same:
        notes.append(f"{name} has other content than when the manifest was written")
    return Media(str((same or candidates)[0]))


def _request_from(asked: dict, find: Callable[[dict | None], Media | None]) -> RenderRequest:
    sound = asked["sound_mask"]
    if isinstance(sound, dict):
        ranges, curve = (tuple(tuple(pair) for pair in sound[key]) for key in ("ranges", "curve"))
        sound = SoundMask(ranges=ranges, curve=curve, feather=sound["feather"])
    plain = {name: asked[name] for name in PLAIN_FIELDS if name in asked}
    plain |= {"size": tuple(asked["size"]), "exclude": tuple(asked.get("exclude", ()))}
    plain["accelerators"] = tuple(spec_of(name, **options) for name, options in asked.get("accelerators", ()))
    return RenderRequest(
        **plain,
        first_frame=find(asked["first_frame"]),
        last_frame=find(asked["last_frame"]),
        source=find(asked["source"]),
        state=find(asked["state"]),
        loras=tuple(LoraRequest(find(lora), lora["strength"]) for lora in asked.get("loras", ())),
        guides=tuple(
            GuideRequest(find(g), frame=g["frame"], seconds=g["seconds"], strength=g["strength"])
            for g in asked["guides"]
        ),
        references=tuple(
            ReferenceRequest(r["kind"], find(r), r["sound"], r["fps"]) for r in asked.get("references", ())
        ),
        embeds=find(asked.get("embeds")),
        mask=find(asked["mask"]) if isinstance(asked["mask"], dict) else asked["mask"],
        sound_mask=sound,
    )


def differences(old: dict, new: dict, path: str = "") -> list[str]:
    """One line per value that differs: ``models.dit.fingerprint: abc... -> def...``."""
    if isinstance(old, dict) and isinstance(new, dict):
        lines = []
        for key in sorted({*old, *new}):
            lines += differences(old.get(key), new.get(key), f"{path}.{key}" if path else key)
        return lines
    return [] if old == new else [f"{path}: {_short(old)} -> {_short(new)}"]


def _short(value) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
