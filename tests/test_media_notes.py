"""Every conversion and every loss on the way from a file to pixels and samples is told, whatever it is used as."""

from __future__ import annotations

import wave
from fractions import Fraction

import av
import numpy as np
import pytest
import torch
from PIL import Image, ImageCms

from h3_runtime import geometry, media, references
from h3_runtime.guides import place
from h3_runtime.request import GuideRequest, Media, ReferenceRequest, RenderRequest

RATE = 48000
SIZE = (96, 64)
MILLISECOND = Fraction(1, 1000)
LAYOUTS = {1: "mono", 2: "stereo", 6: "5.1"}


def noise(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def adobe_like() -> bytes:
    return ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()


def exif(value: int) -> Image.Exif:
    made = Image.Exif()
    made[0x0112] = value
    return made


RGB = Image.fromarray(noise(1, 64, 96, 3))
SEE_THROUGH = Image.fromarray(np.dstack([noise(1, 64, 96, 3), np.full((64, 96), 255, np.uint8)]))
HOLE = Image.fromarray(np.dstack([noise(1, 64, 96, 3), np.arange(96, dtype=np.uint8)[None].repeat(64, 0) // 48 * 255]))
GREY16 = Image.fromarray(np.full((64, 96), 40000, np.uint16))
PICTURES = {  # file -> (picture, how it is saved, what is told)
    "plain.png": (RGB, {}, None),
    "srgb.png": (RGB, {"icc_profile": ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()}, None),
    "upright.jpg": (RGB, {"exif": exif(1)}, None),
    "alpha.png": (SEE_THROUGH, {}, "its alpha channel is left out"),
    "hole.png": (HOLE, {}, "left out: 50.0% of its pixels are not opaque and show the colour below"),
    "grey hole.png": (GREY16, {"transparency": 40000}, "its transparent grey is read as any other"),
    "palette.png": (RGB.quantize(16), {}, "palette colours read as RGB"),
    "hole.gif": (RGB.quantize(16), {"transparency": 3}, "its alpha channel is left out: "),
    "grey.png": (RGB.convert("L"), {}, "grey read as RGB"),
    "bits.png": (RGB.convert("1"), {}, "black and white read as RGB"),
    "grey16.png": (GREY16, {}, "16 bits of grey read as 8 of RGB"),
    "cmyk.jpg": (RGB.convert("CMYK"), {}, "CMYK read as RGB"),
    "turned.jpg": (RGB, {"exif": exif(8)}, "turned by 270 degrees clockwise, as its EXIF orientation asks"),
    "mirrored.png": (RGB, {"exif": exif(2)}, "mirrored, as its EXIF orientation asks"),
    "lab.png": (RGB, {"icc_profile": adobe_like()}, "its colour profile (Lab identity built-in) is not applied"),
    "bad profile.png": (RGB, {"icc_profile": b"nothing"}, "its colour profile (unnamed) is not applied"),
    "pages.tif": (RGB, {"save_all": True, "append_images": [RGB, RGB]}, "the first of its 3 pictures is used"),
    "moving.webp": (
        RGB,
        {"save_all": True, "append_images": [Image.fromarray(noise(4, 64, 96, 3))]},
        "the first of its 2 pictures is used",
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    here = tmp_path_factory.mktemp("media")
    for name, (picture, options, _) in PICTURES.items():
        picture.save(here / name, **options)
    deep = noise(3, 64, 96, 6).tobytes()  # big-endian 16 bits, three a pixel
    (here / "deep.ppm").write_bytes(b"P6 96 64 65535\n" + deep)
    return here


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(references, "IMAGE_SHORT_EDGE", 64)
    monkeypatch.setattr(geometry, "SHORT_EDGE", 64)
    monkeypatch.setattr(geometry, "MAX_AREA", 64 * 112)


def asked(how: str, path, **options) -> RenderRequest:
    """One file, used as ``how``."""
    medium = Media(str(path))
    given = {
        "reference": lambda: {"references": (ReferenceRequest(options.pop("kind"), medium),)},
        "guide": lambda: {"guides": (GuideRequest(medium, frame=0),)},
        "first frame": lambda: {"first_frame": medium},
        "source": lambda: {"source": medium},
        "mask": lambda: {"mask": medium, "source": Media(frames=noise(9, 22, 64, 96, 3), name="clip")},
    }[how]()
    return RenderRequest("", SIZE, frames=22, **given)


def told(how: str, path, **options) -> list[str]:
    """The notes about the file itself."""
    return [note for note in place(asked(how, path, **options)).notes if path.name in note]


@pytest.mark.parametrize("name", [*PICTURES, "deep.ppm"])
def test_every_picture_tells_what_was_changed_wherever_it_is_used(folder, name, small):
    sentence = "16 bits a channel read as 8" if name == "deep.ppm" else PICTURES[name][2]
    for how, options in (("reference", {"kind": "image"}), ("guide", {}), ("first frame", {}), ("source", {})):
        notes = [n for n in told(how, folder / name, **options) if n.startswith(f"{name}: ")]
        notes = [n for n in notes if "last frame is repeated" not in n]
        if sentence is None:
            assert notes == [], how
        else:
            assert any(sentence in note for note in notes), (how, notes)


def test_a_picture_of_the_same_ratio_tells_that_it_was_resized(folder, small):
    RGB.resize((192, 128)).save(folder / "double.png")
    sentence = "double.png (192x128) was resized to 96x64"
    for how in ("guide", "first frame", "source"):
        assert sentence in told(how, folder / "double.png"), how
    assert not any("resized" in note for note in told("first frame", folder / "plain.png"))


def test_masks_tell_what_matters_to_a_mask(folder, small):
    for name, sentence in {
        "plain.png": "colours read by their luma",
        "hole.png": "its alpha channel is left out",
        "mirrored.png": "mirrored, as its EXIF orientation asks",
        "pages.tif": "the first of its 3 pictures is used",
        "palette.png": "colours read by their luma",
    }.items():
        notes = told("mask", folder / name)
        assert any(note.startswith(f"mask {name}: ") and sentence in note for note in notes), (name, notes)
    for name in ("grey.png", "bits.png", "grey16.png"):  # nothing of these is lost
        assert told("mask", folder / name) == [], name
    clip = write_clip(folder / "mask30.mkv", noise(5, 28, 64, 96, 1).repeat(3, -1), rate=30)
    assert any("30 fps clip of 28 frames resampled to 22" in note for note in told("mask", clip))


# ---- clips


def write_clip(path, frames, rate=24, layout="yuv444p", codec="ffv1", sound=None, late=0.0, curve=0):
    """Lossless pictures [f, h, w, 3 or 4], and ``sound`` [c, l] at 48 kHz from ``late`` seconds on.

    ``rate``: frames a second, or the millisecond at which each frame stands.
    """
    coder, times = "aac" if codec == "libx264" else "pcm_s16le", None
    if not isinstance(rate, int):
        rate, times = 24, rate
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate)
        stream.width, stream.height, stream.pix_fmt = frames.shape[2], frames.shape[1], layout
        stream.codec_context.color_trc = curve or stream.codec_context.color_trc
        if times is not None:
            stream.codec_context.time_base = MILLISECOND
        sounds = [] if sound is None else [sound] if sound.ndim == 2 else list(sound)
        tracks = [container.add_stream(coder, rate=RATE, layout=LAYOUTS[len(data)]) for data in sounds]
        for index, pixels in enumerate(frames):
            given = "rgba" if pixels.shape[-1] == 4 else "rgb24"
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format=given).reformat(format=layout)
            frame.pts, frame.time_base = (index, Fraction(1, rate)) if times is None else (times[index], MILLISECOND)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
        for track, data in zip(tracks, sounds):
            packed = np.ascontiguousarray(data.T.reshape(1, -1))
            frame = av.AudioFrame.from_ndarray(packed, format="s16", layout=track.codec_context.layout)
            frame.sample_rate, frame.pts, frame.time_base = RATE, round(late * RATE), Fraction(1, RATE)
            container.mux(track.encode(frame))
            container.mux(track.encode(None))
    return path


def tone(channels: int, seconds: float) -> np.ndarray:
    return (np.sin(np.arange(round(seconds * RATE)) / 20) * 9000).astype(np.int16)[None].repeat(channels, 0)


def clear(count: int) -> np.ndarray:
    made = noise(2, count, 64, 96, 4)
    made[..., 3] = 255
    made[0, :8, :8, 3] = 0
    return made


FRAMES = noise(2, 60, 64, 96, 3)
UNEVEN = [index * 1000 // 24 + (300 if index > 30 else 0) for index in range(60)]
CLIPS = {
    "mono": ({"sound": tone(1, 2.5)}, ["mono sound repeated on both channels", "resampled from 48000 to 32000 Hz"]),
    "surround": ({"sound": tone(6, 2.5)}, ["6 channels of sound mixed down to stereo"]),
    "two tracks": ({"sound": np.stack([tone(2, 2.5)] * 2)}, ["the first of its 2 sound tracks is used"]),
    "late sound": ({"sound": tone(2, 2), "late": 0.5}, ["its sound begins 0.500 s after its picture: silence stands"]),
    "silent": ({}, ["has no sound"]),
    "ten bits": ({"layout": "yuv420p10le"}, ["10 bits a channel read as 8"]),
    "hdr": ({"layout": "yuv420p10le", "curve": 16}, ["HDR brightness curve is not converted"]),
    "uneven": ({"rate": UNEVEN}, ["on average (variable rate)", "resampled"]),
    "30 fps": ({"rate": 30}, ["30 fps clip of"]),
}


@pytest.mark.parametrize("name", CLIPS)
def test_every_clip_tells_what_was_changed_wherever_it_is_used(tmp_path, name, small):
    options, sentences = CLIPS[name]
    path = write_clip(tmp_path / f"{name}.mkv", FRAMES, **options)
    for how, more in (("reference", {"kind": "video"}), ("guide", {}), ("source", {})):
        notes = told(how, path, **more)
        for sentence in sentences:
            assert any(sentence in note for note in notes), (how, sentence, notes)
    plain = write_clip(tmp_path / "plain.mkv", FRAMES[:22], sound=tone(2, 22 / 24)[:, : 22 * 2000])
    left = [note for note in told("source", plain) if "resampled from 48000" not in note]
    assert left == []


def test_alpha_interlacing_and_sound_past_the_picture(tmp_path, small):
    path = write_clip(tmp_path / "clear.mkv", clear(22), layout="yuva420p")
    assert any("its alpha channel is left out: transparent pixels" in note for note in told("guide", path))
    path = write_clip(
        tmp_path / "opaque.mkv", np.maximum(clear(22), [0, 0, 0, 255]).astype(np.uint8), layout="yuva420p"
    )
    assert not any("alpha" in note for note in told("guide", path))
    longer = write_clip(tmp_path / "longer.mp4", FRAMES[:22], codec="libx264", layout="yuv420p", sound=tone(2, 2.0))
    assert any("its sound lasts 1.083 s longer than its picture" in note for note in told("source", longer))
    pages = [Image.fromarray(noise(seed, 64, 96, 3)).quantize(8) for seed in range(3)]
    pages[0].save(tmp_path / "moving.gif", save_all=True, append_images=pages[1:], duration=400, transparency=0)
    notes = told("guide", tmp_path / "moving.gif")
    assert any("has no sound: only its picture is held" in note for note in notes)
    assert any("frames resampled to" in note for note in notes)


def test_a_rotation_tag_is_told_of_every_use(tmp_path, small):
    path = write_clip(tmp_path / "turned.mp4", FRAMES, codec="libx264", layout="yuv420p")
    data = bytearray(path.read_bytes())
    at = data.index(b"tkhd") + 4 + 40
    for index, value in enumerate([0, 1, 0, -1, 0, 0, 0, 0, 0x4000]):
        data[at + 4 * index : at + 4 * index + 4] = (value * 65536).to_bytes(4, "big", signed=True)
    path.write_bytes(bytes(data))
    for how, more in (("reference", {"kind": "video"}), ("guide", {}), ("source", {})):
        assert any("turned by 90 degrees clockwise" in note for note in told(how, path, **more)), how


def test_a_first_frame_from_a_clip_tells_that_its_sound_is_left_out(tmp_path, small):
    path = write_clip(tmp_path / "one.mkv", FRAMES[:1], sound=tone(1, 1 / 24))
    notes = told("first frame", path)
    assert any("its sound is left out, a first or last frame is a picture" in note for note in notes)


# ---- sound


@pytest.mark.parametrize("channels", [1, 2, 6])
def test_sound_files_tell_of_their_channels_as_reference_and_guide(tmp_path, channels, small):
    path = tmp_path / "sound.wav"
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels), file.setsampwidth(2), file.setframerate(RATE)
        file.writeframes(np.ascontiguousarray(tone(channels, 0.5).T).tobytes())
    picture = ReferenceRequest("image", Media(frames=noise(1, 1, 64, 96, 3), name="look"))
    request = RenderRequest("", SIZE, frames=22, references=(picture, ReferenceRequest("audio", Media(str(path)))))
    sentence = {1: "mono sound repeated", 2: "resampled from 48000 to 32000 Hz", 6: "6 channels of sound mixed down"}
    for notes in (place(request).notes, told("guide", path)):
        said = [note for note in notes if note.startswith("sound.wav: ")]
        assert any(sentence[channels] in note for note in said) and any("resampled" in note for note in said)
        assert channels != 2 or not any("mono" in note or "mixed" in note for note in said)


def test_readers_without_notes_read_the_same(folder, tmp_path):
    for name in PICTURES:
        assert np.array_equal(media.read_image(folder / name), media.read_image(folder / name, []))
    clip = write_clip(tmp_path / "a.mkv", FRAMES[:5])
    notes: list[str] = []
    frames = list(media.stream_frames(clip, max_frames=3, notes=notes))
    assert len(frames) == 3 and notes == [] and torch.equal(media.read_mask(clip), media.read_mask(clip, notes=notes))
    assert notes == []
