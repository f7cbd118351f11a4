"""Graphs in the form of ComfyUI's API: every node of ours with the least and with all of its inputs, and refusals.

loaders() ─▶ prompted() ─▶ + sampler() ─▶ + decode() or saved()        96x64, 22 frames, 2 steps
"""

from __future__ import annotations

CARRIED = "small carried model"


def node(class_type: str, **inputs) -> dict:
    """One node of a graph in the API's form; a link is [node id, output]."""
    return {"class_type": class_type, "inputs": inputs}


def loaders(model: str = CARRIED) -> dict:
    """The small model's loaders, an empty latent of 96x64 with 22 frames, and media of that size."""
    return {
        "model": node("H3RuntimeLoadModel", model=model),
        "clip": node("H3RuntimeLoadTextEncoder", text_encoder=CARRIED),
        "vaes": node("H3RuntimeLoadVaes", video_vae=CARRIED, audio_vae=CARRIED),
        "empty": node("H3RuntimeEmptyLatent", width=96, height=64, frames=22),
        "media": node("H3RuntimeSampleMedia", width=96, height=64, frames=22),
    }


def prompted(prompt: str = "a red ball", model: str = CARRIED) -> dict:
    return {**loaders(model), "prompt": node("H3RuntimeEncodePrompt", clip=["clip", 0], prompt=prompt)}


def sampler(positive: str = "prompt", latent: str = "empty", **widgets) -> dict:
    given = {"model": ["model", 0], "positive": [positive, 0], "latent": [latent, 0], "seed": 3, "steps": 2}
    return node("H3RuntimeSampler", **{**given, **widgets})


def decode(latent: str = "sampler", prefix: str = "clip") -> dict:
    return node(
        "H3RuntimeDecodeAndSave",
        latent=[latent, 0],
        video_vae=["vaes", 0],
        audio_vae=["vaes", 1],
        filename_prefix=prefix,
    )


def saved(latent: str = "sampler", prefix: str = "latent") -> dict:
    return node("H3RuntimeSaveLatent", latent=[latent, 0], filename_prefix=prefix)


def minimal_graphs() -> dict[str, dict]:
    base = prompted()
    clip = {"encoded": node("H3RuntimeEncodeClip", video_vae=["vaes", 0], audio_vae=["vaes", 1], images=["media", 1])}
    framed = node(
        "H3RuntimeFirstLastFrame",
        clip=["clip", 0],
        video_vae=["vaes", 0],
        latent=["empty", 0],
        prompt="a ball",
        first_frame=["media", 0],
    )
    return {
        "render": {
            **base,
            "sampler": sampler(),
            "save": decode(),
            "plan": node("H3RuntimeMemoryPlan", model=["model", 0], latent=["empty", 0]),
        },
        "frames": {
            **base,
            "framed": framed,
            "guided": node(
                "H3RuntimeAddGuide",
                positive=["framed", 0],
                latent=["empty", 0],
                video_vae=["vaes", 0],
                image=["media", 0],
            ),
            "sampler": sampler("guided"),
            "images": node("H3RuntimeDecodeVideo", latent=["sampler", 0], video_vae=["vaes", 0]),
            "sound": node("H3RuntimeDecodeSound", latent=["sampler", 0], audio_vae=["vaes", 1]),
            "save": node("H3RuntimeSaveVideo", images=["images", 0]),
            "heard": node("PreviewAudio", audio=["sound", 0]),
        },
        "masks": {
            **base,
            **clip,
            "masked": node("H3RuntimeNoiseMasks", latent=["encoded", 0], mask=["media", 3]),
            "sampler": sampler("prompt", "masked"),
            "save": saved(),
            "grid": node("PreviewImage", images=["masked", 1]),
        },
        "longer": {
            **base,
            "sampler": sampler(),
            "next": node("H3RuntimeExtendClip", latent=["sampler", 0], seconds=0.7),
            "second": sampler("prompt", "next"),
            "joined": node("H3RuntimeJoinClips", first=["sampler", 0], second=["second", 0]),
            "save": decode("joined"),
        },
        "apart": {
            **base,
            "fast": node("H3RuntimeAccelerate", accelerator="second-order"),
            "smaller": node("H3RuntimeQuantise", model=["model", 0]),
            "sampler": sampler(model=["smaller", 0], acceleration=["fast", 0]),
            "split": node("H3RuntimeSplitLatent", latent=["sampler", 0]),
            "together": node("H3RuntimeJoinLatent", picture=["split", 0], sound=["split", 1]),
            "save": decode("together"),
            "kept": node("H3RuntimeSavePrompt", positive=["prompt", 0]),
        },
        "references": {
            **loaders(),
            "prompt": node(
                "H3RuntimeReferences",
                clip=["clip", 0],
                video_vae=["vaes", 0],
                latent=["empty", 0],
                prompt="as in <Picture 1>",
                recipe="comfy",  # the reference's own recipe enlarges pictures to 2048 pixels: minutes on a CPU
                **{"images.image_0": ["media", 0]},
            ),
            "sampler": sampler(),
            "save": decode(),
        },
        "compare": minimal_compare(),
        "files": minimal_files(),
    }


def minimal_files() -> dict:
    return {
        **loaders(),
        "one": node("CreateVideo", images=["media", 1], audio=["media", 2], fps=24.0),
        "save": node("H3RuntimeJoinVideoFiles", **{"videos.video_0": ["one", 0]}),
    }


def minimal_compare() -> dict:
    return {
        **loaders(),
        "one": node("CreateVideo", images=["media", 1], audio=["media", 2], fps=24.0),
        "two": node("CreateVideo", images=["media", 1], fps=24.0),
        "images": node("H3RuntimeCompare", images_a=["media", 1], images_b=["media", 1]),
        "videos": node("H3RuntimeCompareVideos", video_a=["one", 0], video_b=["two", 0]),
    }


def full_compare() -> dict:
    """Two clips in memory with all that tells of them, and two files whose frames were kept."""
    kept = {name: decode(name, f"full/{name}") for name in ("sampler", "second")}
    for step in kept.values():
        step["inputs"]["keep_frames"] = True
    judged = {"thresholds": "psnr=90", "resize": True, "filename_prefix": "full/compare"}
    return {
        **prompted(),
        "sampler": sampler(),
        "second": sampler(seed=4),
        "video": node("H3RuntimeDecodeVideo", latent=["sampler", 0], video_vae=["vaes", 0]),
        "compare": node(
            "H3RuntimeCompare",
            images_a=["media", 1],
            audio_a=["media", 2],
            latent_a=["second", 0],
            report_a=["second", 1],
            name_a="clip a",
            images_b=["video", 0],
            audio_b=["media", 2],
            latent_b=["sampler", 0],
            report_b=["video", 1],
            name_b="clip b",
            **judged,
        ),
        "kept_a": kept["sampler"],
        "kept_b": kept["second"],
        "files": node("H3RuntimeCompareVideos", video_a=["kept_a", 0], video_b=["kept_b", 0], **judged),
    }


def full_guides() -> dict:
    everything = {
        "model": node(
            "H3RuntimeLoadModel", model=CARRIED, precision="float32", layout="comfyui", quantise="no", place="ram"
        ),
        "clip": node("H3RuntimeLoadTextEncoder", text_encoder=CARRIED, precision="float32"),
        "empty": node("H3RuntimeEmptyLatent", seconds=1.6, ratio="3:2", megapixels=0.006, width=0, height=0, frames=0),
        "media": node("H3RuntimeSampleMedia", width=96, height=64, frames=39),
        "video": node("CreateVideo", images=["media", 1], audio=["media", 2], fps=24.0),
    }
    settings = {"denoise": 1.0, "start_step": 0, "stop_step": 0, "video_shift": 6.0, "audio_shift": 2.0}
    return {
        **loaders(),
        **everything,
        "framed": node(
            "H3RuntimeFirstLastFrame",
            clip=["clip", 0],
            video_vae=["vaes", 0],
            latent=["empty", 0],
            prompt="He says: <d>[English] Hello.</d>",
            first_frame=["media", 0],
            last_frame=["media", 0],
            recipe="comfy",
        ),
        "guided": node(
            "H3RuntimeAddGuide",
            positive=["framed", 0],
            latent=["empty", 0],
            at="seconds",
            frame=0,
            seconds=0.5,
            strength=0.5,
            video_vae=["vaes", 0],
            audio_vae=["vaes", 1],
            image=["media", 1],
            audio=["media", 2],
            fps=30.0,
            recipe="reference",
        ),
        "again": node(
            "H3RuntimeAddGuide",
            positive=["guided", 0],
            latent=["empty", 0],
            frame=-1,
            video_vae=["vaes", 0],
            audio_vae=["vaes", 1],
            video=["video", 0],
        ),
        "sampler": sampler("again", frames=39, resume=False, **settings),
        "images": node("H3RuntimeDecodeVideo", latent=["sampler", 0], video_vae=["vaes", 0], tile=128),
        "sound": node("H3RuntimeDecodeSound", latent=["sampler", 0], audio_vae=["vaes", 1]),
        "save": node(
            "H3RuntimeSaveVideo",
            images=["images", 0],
            audio=["sound", 0],
            latent=["sampler", 0],
            filename_prefix="full/clip",
            crf=20,
            lossless=False,
            fps=24.0,
        ),
        "kept": node("H3RuntimeSavePrompt", positive=["framed", 0], filename_prefix="full/prompt"),
        "plan": node(
            "H3RuntimeMemoryPlan",
            model=["model", 0],
            latent=["empty", 0],
            positive=["again", 0],
            video_vae=["vaes", 0],
            audio_vae=["vaes", 1],
            steps=2,
            vram_gib=24.0,
            ram_gib=64.0,
        ),
    }


def full_masks() -> dict:
    return {
        **loaders(),
        "prompt": node("H3RuntimeEncodePrompt", clip=["clip", 0], prompt="rain"),
        "video": node("CreateVideo", images=["media", 1], audio=["media", 2], fps=24.0),
        "encoded": node(
            "H3RuntimeEncodeClip",
            video_vae=["vaes", 0],
            audio_vae=["vaes", 1],
            video=["video", 0],
            size_of=["empty", 0],
            fps=24.0,
        ),
        "masked": node(
            "H3RuntimeNoiseMasks",
            latent=["encoded", 0],
            picture="mask",
            sound="ranges",
            sound_text="0.1-0.3,0.5-0.6",
            sound_feather=0.05,
            mask=["media", 3],
        ),
        "sampler": sampler("prompt", "masked"),
        "save": saved(prefix="full/latent"),
        "file": node(
            "H3RuntimeDecodeAndSave",
            latent=["sampler", 0],
            video_vae=["vaes", 0],
            audio_vae=["vaes", 1],
            filename_prefix="full/clip",
            crf=18,
            lossless=True,
        ),
    }


def full_references() -> dict:
    return {
        **loaders(),
        "long": node("H3RuntimeSampleMedia", width=96, height=64, frames=56),
        "video": node("CreateVideo", images=["long", 1], audio=["long", 2], fps=24.0),
        "prompt": node(
            "H3RuntimeReferences",
            clip=["clip", 0],
            video_vae=["vaes", 0],
            audio_vae=["vaes", 1],
            latent=["empty", 0],
            prompt="<Picture 1> in <Video 1> and <Video 2>, voice of <Audio 3>",
            recipe="comfy",
            soundtracks=True,
            **{
                "images.image_0": ["media", 0],
                "videos.video_0": ["video", 0],
                "videos.video_1": ["long", 1],
                "video_sounds.video_sound_1": ["long", 2],
                "sounds.sound_0": ["media", 2],
            },
        ),
        "sampler": sampler(),
        "save": decode(),
    }


def full_files() -> dict:
    return {
        **loaders(),
        "one": node("CreateVideo", images=["media", 1], audio=["media", 2], fps=24.0),
        "two": node("CreateVideo", images=["media", 1], fps=12.0),
        "save": node(
            "H3RuntimeJoinVideoFiles",
            filename_prefix="full/joined",
            crf=16,
            lossless=False,
            **{"videos.video_0": ["one", 0], "videos.video_1": ["two", 0]},
        ),
    }


def full_acceleration() -> dict:
    chosen = {
        "accelerator": "forecast",
        "accelerator.calls": 0.5,
        "accelerator.warmup": 1,
        "accelerator.tail": 1,
        "accelerator.degree": 1,
        "accelerator.window": 2,
        "accelerator.ridge": 0.001,
        "accelerator.sound_limit": 10.0,
        "accelerator.store": "ram",
    }
    return {
        **prompted(),
        "smaller": node("H3RuntimeQuantise", model=["model", 0], quantise="int8", place="ram"),
        "preset": node("H3RuntimeAccelerate", accelerator="preset", **{"accelerator.preset": "extra-high"}),
        "forecast": node("H3RuntimeAccelerate", acceleration=["preset", 0], **chosen),
        "second": node("H3RuntimeAccelerate", accelerator="second-order", acceleration=["forecast", 0]),
        "sampler": sampler(steps=4, resume=False, acceleration=["second", 0]),
        "plan": node("H3RuntimeMemoryPlan", model=["smaller", 0], latent=["empty", 0], acceleration=["second", 0]),
        "save": saved(prefix="full/faster"),
    }


def full_graphs() -> dict[str, dict]:
    made = (full_guides, full_masks, full_references, full_files, full_acceleration, full_compare)
    return {make.__name__.removeprefix("full_"): make() for make in made}


def refusals() -> dict[str, tuple[dict, str]]:
    base = {**prompted(), "sampler": sampler(), "save": decode()}
    swapped = {**base, "save": decode()}
    swapped["save"]["inputs"] |= {"video_vae": ["vaes", 1], "audio_vae": ["vaes", 0]}
    slow = {
        **base,
        "images": node("H3RuntimeDecodeVideo", latent=["sampler", 0], video_vae=["vaes", 0]),
        "save": node("H3RuntimeSaveVideo", images=["images", 0], fps=30.0),
    }
    wrong = node(
        "H3RuntimeReferences",
        clip=["clip", 0],
        video_vae=["vaes", 0],
        latent=["empty", 0],
        prompt="<Picture 1>",
        recipe="comfy",
        **{"images.image_0": ["media", 0]},
    )
    return {
        "batch": ({**base, "empty": node("EmptyLatentImage", width=96, height=64, batch_size=2)}, "2 clips"),
        "empty with a mask": (
            {**base, "masked": node("SetLatentNoiseMask", samples=["empty", 0], mask=["media", 3]),
             "sampler": sampler("prompt", "masked")},
            "the latent is empty",
        ),
        "denoise of nothing": ({**base, "sampler": sampler(denoise=0.5)}, "denoise 0.5 starts from a clip"),
        "swapped VAEs": (swapped, "the other output of H3 Load VAEs"),
        "another rate": (slow, "24"),
        "references on FL2VA": (
            {**base, "prompt": wrong, "model": node("H3RuntimeLoadModel", model="dit.safetensors")},  # of FL2VA weights
            "Ref2VA",
        ),
        "guide past the end": (
            {**base, "guided": node("H3RuntimeAddGuide", positive=["prompt", 0], latent=["empty", 0], frame=400,
                                    video_vae=["vaes", 0], image=["media", 0]), "sampler": sampler("guided")},
            "frames 0 to 21",
        ),
        "decode of nothing": ({**base, "save": decode("empty")}, "never rendered"),
    }  # fmt: skip
