"""MiniMax-H3 Runtime: joint video and sound, exact to the reference.

Names are imported when first used, so that importing the package costs nothing and needs no torch.
"""

from importlib import import_module

__version__ = "0.1.0"

_HOMES = {
    "AVLatent": "job",
    "Canvas": "geometry",
    "CheckpointInfo": "checkpoint.info",
    "Encoding": "media",
    "Foreseen": "forecast",
    "GraphModels": "graph",
    "Guide": "job",
    "GuideRequest": "request",
    "GuideSize": "memory.rows",
    "H3Error": "errors",
    "Loading": "model",
    "Lora": "lora",
    "LoraRequest": "request",
    "MadeCondition": "text.conditions",
    "Masks": "job",
    "Media": "request",
    "Models": "model",
    "Mp4Writer": "media",
    "NonFiniteError": "errors",
    "Origin": "graph",
    "PackedLayout": "layout",
    "Part": "graph",
    "PastMedia": "graph",
    "PixelEncoder": "references",
    "Placement": "memory.placement",
    "REFERENCE_DIT": "demo.maker",
    "RecoveryFolder": "recovery",
    "Reference": "job",
    "ReferenceRequest": "request",
    "RenderJob": "job",
    "RenderRequest": "request",
    "RenderResult": "render",
    "RenderSizes": "memory.rows",
    "Shown": "text.shown",
    "SoundMask": "request",
    "Take": "media.join",
    "TextCondition": "job",
    "Watcher": "graph",
    "audio_latents": "geometry",
    "clip_frames": "extend",
    "clip_reference": "memory.rows",
    "condition_shown": "graph",
    "continue_clip": "extend",
    "continued_frames": "extend",
    "decode_audio": "decode",
    "decode_video": "decode",
    "describe_latent": "graph",
    "describe_part": "forecast",
    "draw_masks": "mask_picture",
    "dump": "manifest",
    "encode_media": "graph",
    "encoder_of_record": "graph",
    "find_parts": "checkpoint.parts",
    "fit_audio": "media",
    "floor_frames": "geometry",
    "foresee": "forecast",
    "gradient_levels": "memory.rows",
    "join_clips": "extend",
    "join_files": "media.join",
    "judge_latent": "soundness",
    "label_of_parts": "forecast",
    "load_condition": "text.conditions",
    "load_latent": "latents",
    "loras_beside": "forecast",
    "make_manifest": "manifest",
    "make_model": "demo.maker",
    "make_reference_dit": "demo.maker",
    "open_lora": "lora",
    "picture_reference": "memory.rows",
    "pixel_frames": "geometry",
    "plan_lines": "memory.plan_lines",
    "plan_results": "memory.plan_lines",
    "plan_schedule": "schedule",
    "plan_sizes": "graph",
    "pool_pixels": "job",
    "prompt_rows": "memory.rows",
    "refuse_other": "text.conditions",
    "render_request": "render",
    "resample_slots": "references",
    "resample_sound": "media",
    "run_job": "graph",
    "sample": "sampler",
    "sample_media": "demo.media",
    "save_clip": "save",
    "save_condition": "text.conditions",
    "save_latent": "latents",
    "settle_placement": "graph",
    "snap_frames": "geometry",
    "sound_reference": "memory.rows",
    "to_uint8": "media",
    "weakest": "graph",
    "weights_of_parts": "graph",
    "whole_frames": "extend",
    "with_decoders": "forecast",
    "with_parts": "graph",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
