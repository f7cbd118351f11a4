"""References: pictures, clips and sounds that the prompt names, shown to the text encoder and to the model.

images, then videos (each with its soundtrack), then sounds ─▶ <Picture 1> .. <Audio 1><Video 1> .. <Audio 2> ..
"""

from __future__ import annotations

import re

from . import host
from .av_latent import take_latent
from .condition import CLIP_TOOLTIP, FOLDER, encode_request, prompt_input, recipe_input, require_encoder
from .media import take_clip, take_frames, take_media, take_sound
from .sockets import Node, io

LIMITS = {"images": 9, "videos": 3, "video_sounds": 3, "sounds": 3}


def many(name: str, template, prefix: str, words: str):
    return io.Autogrow.Input(
        name,
        optional=True,
        template=io.Autogrow.TemplatePrefix(input=template, prefix=prefix, min=0, max=LIMITS[name]),
        tooltip=words,
    )


def media_inputs() -> list:
    """The growing lists of pictures, clips with their soundtracks, and sounds."""
    return [
        many(
            "images",
            io.Image.Input("image", tooltip="A reference picture: <Picture n> in the prompt."),
            "image_",
            "Up to 9 pictures, named <Picture 1>, <Picture 2> ... in the prompt.",
        ),
        many(
            "videos",
            io.MultiType.Input(
                "video",
                types=[io.Video, io.Image],
                tooltip="A reference clip of 2 to 15 seconds: <Video n>. A video brings its own rate "
                "and sound; "
                "frames count as 24 a second.",
            ),
            "video_",
            "Up to 3 clips, named <Video 1> ... in the prompt; 15 seconds in all.",
        ),
        many(
            "video_sounds",
            io.Audio.Input("video_sound", tooltip="The soundtrack of the clip with the same number."),
            "video_sound_",
            "Soundtracks of clips that were connected as frames.",
        ),
        many(
            "sounds",
            io.Audio.Input("sound", tooltip="A reference sound: <Audio n> in the prompt."),
            "sound_",
            "Up to 3 sounds, named after the soundtracks of the clips.",
        ),
        io.Boolean.Input(
            "soundtracks",
            optional=True,
            default=True,
            tooltip="Whether a connected video's own sound is a reference too.",
        ),
    ]


class References(Node):
    """A prompt with references."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="H3RuntimeReferences",
            display_name="H3 References",
            category=FOLDER,
            description="Encodes a prompt together with the pictures, clips and sounds it names: <Picture 1>, "
            "<Video 1>, "
            "<Audio 1> ... in the order of the inputs. Needs a model with Ref2VA weights. A reference lends its look, "
            "motion or voice; to keep a sound as it is, use H3 Noise Masks.",
            search_aliases=["minimax h3 reference to video", "r2v", "subject", "voice"],
            inputs=[
                io.Clip.Input("clip", optional=True, tooltip=f"{CLIP_TOOLTIP} Not needed with a saved prompt."),
                io.Vae.Input("video_vae", optional=True, tooltip="The video VAE, for pictures and clips."),
                io.Vae.Input("audio_vae", optional=True, tooltip="The audio VAE, for sounds and soundtracks."),
                io.Latent.Input("latent", tooltip="The latent that will be rendered: its size and length are used."),
                prompt_input(),
                *media_inputs(),
                io.Conditioning.Input(
                    "saved",
                    optional=True,
                    tooltip="From H3 Load Prompt Embeddings: the same prompt and references, encoded before.",
                ),
                recipe_input(),
            ],
            outputs=[io.Conditioning.Output(display_name="positive")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    @host.runtime_mode
    def execute(cls, latent, prompt, clip=None, **options):
        from ..h3_runtime import H3Error, RenderRequest

        taken = take_latent(latent)
        notes = list(taken.notes)
        references = collect(options, notes)
        if not references:
            raise H3Error("no reference is connected: give a picture, a clip or a sound, or use H3 Encode Prompt")
        require_encoder(clip, options.get("saved"))
        request = RenderRequest(
            prompt,
            size=(taken.canvas.width, taken.canvas.height),
            frames=taken.canvas.num_frames,
            references=references,
            recipe=options.get("recipe", "reference"),
        )
        conditioning, said = encode_request(
            request, clip, options.get("saved"), options.get("video_vae"), options.get("audio_vae")
        )
        return cls.report([*notes, *said], conditioning)


def collect(options: dict, notes: list[str]) -> tuple:
    """The connected references as ReferenceRequests: pictures, clips, sounds, each in the order of their numbers."""
    from ..h3_runtime import Media, ReferenceRequest

    found = []
    for number, image in numbered(options.get("images")):
        name = f"picture {number}"
        if len(image) > 1:
            notes.append(f"{name}: the first of {len(image)} pictures is used")
        found.append(ReferenceRequest("image", Media(frames=take_frames(image[:1], name, notes), name=name)))
    sounds = dict(numbered(options.get("video_sounds")))
    for number, video in numbered(options.get("videos")):
        name, sound = f"clip {number}", sounds.pop(number, None)
        if sound is None:
            media = take_media(video, name, notes)
        else:
            frames, fps = video, 24.0
            if not hasattr(video, "shape"):
                parts = video.get_components()
                frames, fps = parts.images, float(parts.frame_rate)
                if parts.audio is not None:
                    notes.append(f"{name}: its own sound is left out, video sound {number} takes its place")
            media = Media(frames=take_clip(frames, fps, name, notes), audio=take_sound(sound, name, notes), name=name)
        found.append(ReferenceRequest("video", media, sound=options.get("soundtracks", True) or sound is not None))
    notes += [f"video sound {number} belongs to no clip: it is left out" for number in sounds]
    for number, sound in numbered(options.get("sounds")):
        name = f"sound {number}"
        found.append(ReferenceRequest("audio", Media(audio=take_sound(sound, name, notes), name=name)))
    return tuple(found)


def numbered(group: dict | None) -> list[tuple[int, object]]:
    """(number from 1, value) of an autogrown group's connected inputs, in order."""
    found = []
    for position, (name, value) in enumerate((group or {}).items()):
        digits = re.search(r"(\d+)$", name)
        if value is not None:
            found.append((int(digits[1]) if digits else position, value))
    found.sort(key=lambda pair: pair[0])
    return [(number + 1, value) for number, value in found]


NODES = [References]
