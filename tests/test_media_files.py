"""Sound files, pictures and masks: every kind read as the reference reads it, and clear refusals."""

from __future__ import annotations

import math
import wave
from fractions import Fraction

import av
import numpy as np
import pytest
import torch
from PIL import Image

from h3_runtime import media
from h3_runtime.errors import H3Error
from h3_runtime.geometry import SAMPLE_RATE

F = Fraction


def grey_frames(count):
    """Frame i is grey 20 i."""
    return np.full((count, 32, 48, 3), np.arange(count, dtype=np.uint8)[:, None, None, None] * 20)


def write_clip(path, count):
    with media.Mp4Writer(path, 48, 32) as writer:
        writer.write(grey_frames(count))


def wav(path, samples, rate):
    """samples: float [c, l]."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(len(samples))
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((np.asarray(samples).T * 32767).round().astype("<i2").tobytes())
    return path


# ---------------------------------------------------------------- sound


def test_mono_stereo_and_more(tmp_path):
    generator = np.random.default_rng(1)
    mono = generator.uniform(-0.9, 0.9, (1, 5000))
    read = media.read_audio(wav(tmp_path / "mono.wav", mono, SAMPLE_RATE))
    assert read.shape == (2, 5000) and torch.equal(read[0], read[1])
    assert np.abs(read[0].numpy() - mono[0]).max() < 2**-14  # as loud as it was
    stereo = generator.uniform(-0.9, 0.9, (2, 5000))
    read = media.read_audio(wav(tmp_path / "stereo.wav", stereo, SAMPLE_RATE))
    assert np.abs(read.numpy() - stereo).max() < 2**-14

    surround = np.zeros((6, 4000), np.float32)
    surround[[0, 2, 4]] = 0.9  # front left, centre, side left
    surround[1] = 0.3
    path = tmp_path / "surround.wav"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("pcm_f32le", rate=SAMPLE_RATE, layout="5.1")
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(surround.T.reshape(1, -1)), format="flt", layout="5.1")
        frame.sample_rate, frame.pts, frame.time_base = SAMPLE_RATE, 0, F(1, SAMPLE_RATE)
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    read = media.read_audio(path)
    half = math.sqrt(0.5)
    left, right = 0.9 * (1 + 2 * half), 0.3 + 0.9 * half
    assert read.shape == (2, 4000)
    assert float(read[0, 100]) == pytest.approx(1.0, abs=1e-3)
    assert float(read[1, 100]) == pytest.approx(right / left, abs=1e-3)
    assert float(read.abs().max()) <= 1.0


@pytest.mark.parametrize("rate", [8000, 16000, 22050, 44100, 48000, 44101, 192000])
def test_resampler_keeps_a_tone_and_its_place(rate):
    seconds = np.arange(rate // 4) / rate
    tone = torch.from_numpy(np.stack([np.sin(2 * np.pi * 440 * seconds), np.cos(2 * np.pi * 1000 * seconds)])).float()
    out = media.resample_sound(tone, rate)
    assert out.shape == (2, math.ceil(tone.shape[1] * SAMPLE_RATE / rate))
    at = np.arange(out.shape[1]) / SAMPLE_RATE
    wanted = np.stack([np.sin(2 * np.pi * 440 * at), np.cos(2 * np.pi * 1000 * at)])
    assert np.abs(out.numpy() - wanted)[:, 200:-200].max() < 4e-3  # ends apart


RATES = (8000, 22050, 44100, 48000, 96000)


def resampled_slowly(sound: torch.Tensor, rate: int) -> torch.Tensor:
    """torchaudio's formula written out in float64: every output sample as one sum over the whole input."""
    from math import gcd

    old, new = rate // gcd(rate, SAMPLE_RATE), SAMPLE_RATE // gcd(rate, SAMPLE_RATE)
    base = min(old, new) * 0.99
    count = -(-sound.shape[1] * new // old)
    inputs = torch.arange(sound.shape[1], dtype=torch.float64) / old
    outputs = torch.arange(count, dtype=torch.float64) / new
    t = ((inputs - outputs[:, None]) * base).clamp(-6, 6)  # [out, in]
    kernel = torch.sinc(t) * torch.cos(t * torch.pi / 12) ** 2 * base / old
    return sound.double() @ kernel.T


@pytest.mark.parametrize("rate", RATES)
def test_resampler_is_its_formula(rate):
    sound = torch.randn(2, 701, generator=torch.Generator().manual_seed(0))
    expected = resampled_slowly(sound, rate)
    ours = media.resample_sound(sound, rate)
    assert ours.shape == expected.shape
    assert float((ours - expected).norm() / expected.norm()) < 2e-5  # the reference's phases are float32; so are ours


@pytest.mark.parametrize("rate", RATES)
def test_resampler_is_the_references(rate):
    """The reference resamples with torchaudio; where it is installed, the two are compared directly."""
    try:
        from torchaudio.transforms import Resample
    except ImportError:
        return  # the formula itself is proven above, on every machine
    sound = torch.randn(2, 5001, generator=torch.Generator().manual_seed(0))
    theirs = Resample(rate, SAMPLE_RATE)(sound)
    assert float((media.resample_sound(sound, rate) - theirs).norm() / theirs.norm()) < 1e-6


def test_sound_spans(tmp_path):
    ramp = np.linspace(-0.9, 0.9, 44100)[None]
    path = wav(tmp_path / "ramp.wav", ramp, 44100)
    assert media.read_audio(path).shape == (2, 32000)
    part = media.read_audio(path, start_seconds=0.5, max_seconds=0.25)
    assert part.shape == (2, 8000)
    assert float(part[0, 4000]) == pytest.approx(-0.9 + 1.8 * 0.625, abs=1e-3)
    for options, word in (({"start_seconds": 2}, "start earlier"), ({"max_seconds": 0}, "max_seconds is 0")):
        with pytest.raises(H3Error, match=word):
            media.read_audio(path, **options)


def test_fit_audio():
    sound = torch.arange(10.0).expand(2, 10)
    same, note = media.fit_audio(sound, 10)
    assert note is None and torch.equal(same, sound)
    cut, note = media.fit_audio(sound, 7)
    assert torch.equal(cut, sound[:, :7]) and "3 samples" in note
    longer, note = media.fit_audio(sound, 14)
    assert torch.equal(longer[:, :10], sound) and not longer[:, 10:].any() and "4 samples" in note


# ---------------------------------------------------------------- pictures


def test_pictures_of_every_mode(tmp_path):
    generator = np.random.default_rng(2)
    rgb = generator.integers(0, 256, (12, 18, 3), dtype=np.uint8)
    grey16 = generator.integers(0, 65536, (12, 18)).astype(np.uint16)
    alpha = np.dstack([rgb, generator.integers(0, 2, (12, 18), dtype=np.uint8) * 255])
    grey8 = np.rint(grey16 / 257).astype(np.uint8)
    palette = Image.fromarray(rgb).quantize(16)
    cases = {
        "rgb.png": (Image.fromarray(rgb), rgb),
        "alpha.png": (Image.fromarray(alpha, "RGBA"), rgb),
        "grey.png": (Image.fromarray(rgb[..., 0]), rgb[..., :1].repeat(3, 2)),
        "grey16.png": (Image.fromarray(grey16), grey8[..., None].repeat(3, 2)),
        "grey16.tif": (Image.fromarray(grey16), grey8[..., None].repeat(3, 2)),
        "palette.png": (palette, np.asarray(palette.convert("RGB"))),
        "bits.png": (Image.fromarray(rgb[..., 0] > 127), ((rgb[..., :1] > 127) * 255).repeat(3, 2)),
        "rgb.bmp": (Image.fromarray(rgb), rgb),
    }
    for name, (picture, expected) in cases.items():
        picture.save(tmp_path / name)
        read = media.read_image(tmp_path / name)
        assert read.dtype == np.uint8 and read.flags.writeable
        assert np.array_equal(read, expected), name
        assert media.kind_of(tmp_path / name) == "image"


def test_exif_orientation(tmp_path):
    rgb = np.random.default_rng(2).integers(0, 256, (12, 18, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise by 90 degrees
    Image.fromarray(rgb).save(tmp_path / "a.png", exif=exif)
    assert np.array_equal(media.read_image(tmp_path / "a.png"), np.rot90(rgb, -1))


def test_write_image(tmp_path):
    rgb = np.random.default_rng(2).integers(0, 256, (12, 18, 3), dtype=np.uint8)
    for name in ("a.png", "a.webp", "a.bmp", "a.tiff"):
        assert media.write_image(tmp_path / name, torch.from_numpy(rgb.astype(np.float32) / 255)) == tmp_path / name
        assert np.array_equal(media.read_image(tmp_path / name), rgb)
    media.write_image(tmp_path / "a.jpg", np.full((16, 16, 3), 100, np.uint8))
    assert np.abs(media.read_image(tmp_path / "a.jpg").astype(int) - 100).max() <= 2
    with pytest.raises(H3Error, match="shape"):
        media.write_image(tmp_path / "b.png", rgb[..., 0])
    with pytest.raises(H3Error, match="ends in"):
        media.write_image(tmp_path / "b.xyz", rgb)
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".bmp", ".jpg", ".png", ".tiff", ".webp"]


def test_to_uint8():
    values = np.array([-1.0, 0.0, 0.499 / 255, 0.501 / 255, 254.6 / 255, 1.0, 7.0], np.float32)
    wanted = [0, 0, 0, 1, 255, 255, 255]
    assert media.to_uint8(values).tolist() == media.to_uint8(torch.from_numpy(values)).tolist() == wanted
    every = np.arange(256, dtype=np.uint8)
    assert np.array_equal(media.to_uint8(every.astype(np.float32) / 255), every)
    assert media.to_uint8(torch.tensor([1.0], dtype=torch.bfloat16)).tolist() == [255]


def test_resizes_are_the_references():
    generator = np.random.default_rng(4)
    sizes = [(100, 57), (57, 100), (64, 32), (33, 97), (640, 360), (31, 31)]
    for width, height in sizes:
        pixels = generator.integers(0, 256, (height, width, 3), dtype=np.uint8)
        stretched = media.resize_stretch(pixels, 64, 32)
        whole = Image.fromarray(pixels).resize((64, 32), Image.Resampling.LANCZOS)
        assert np.array_equal(stretched, np.asarray(whole))
        covered, (left, top, right, bottom) = media.resize_cover(pixels, 64, 32)
        assert covered.shape == stretched.shape == (32, 64, 3)
        assert 0 <= left < right <= width + 1e-9 and 0 <= top < bottom <= height + 1e-9
        assert (right - left) / (bottom - top) == pytest.approx(2, rel=0.05)
        assert abs((left + right) / 2 - width / 2) <= width / 64 and abs((top + bottom) / 2 - height / 2) <= height / 32


def test_covering_matches_diffusers():
    module = pytest.importorskip("diffusers.modular_pipelines.minimax_h3.before_encoder")
    from diffusers.image_processor import VaeImageProcessor

    step = module.MiniMaxH3ResizeStep()
    components = type("Parts", (), {"image_processor": VaeImageProcessor(vae_scale_factor=16)})()
    generator = np.random.default_rng(4)
    for width, height in ((100, 57), (57, 100), (95, 63), (129, 64), (333, 97)):
        first, last = (generator.integers(0, 256, (height, width, 3), dtype=np.uint8) for _ in range(2))
        state = module.PipelineState()
        given = {"image": first, "last_image": last}
        for name, pixels in given.items():
            state.set(name, Image.fromarray(pixels))
        state.set("height", 64)
        state.set("width", 96)
        _, state = step(components, state)
        theirs = [np.asarray(picture) for picture in state.get("keyframes")]
        assert np.array_equal(media.resize_stretch(first, 96, 64), theirs[0])
        assert np.array_equal(media.resize_cover(last, 96, 64)[0], theirs[1])


# ---------------------------------------------------------------- masks, kinds, refusals


def test_masks(tmp_path):
    values = np.arange(6 * 8).reshape(6, 8).astype(np.uint8) * 5
    folder = tmp_path / "masks"
    folder.mkdir()
    for number in (1, 2, 10):
        Image.fromarray(np.full((6, 8), number * 20, np.uint8)).save(folder / f"m{number}.png")
    (folder / "notes.txt").write_text("no mask")
    Image.fromarray(values).save(tmp_path / "one.png")
    one = media.read_mask(tmp_path / "one.png")
    assert one.dtype == torch.float32 and np.array_equal(one.numpy(), (values / 255).astype(np.float32)[None])
    for source in (folder, folder / "*.png", folder / "m*.png"):
        mask = media.read_mask(source)
        assert mask.shape == (3, 6, 8)
        assert [round(float(m[0, 0]) * 255) for m in mask] == [20, 40, 200]
    assert media.read_mask(folder, max_frames=2).shape == (2, 6, 8)
    with pytest.raises(H3Error, match=r"no file number 3 \(7 missing\)"):
        media.read_mask(folder / "m%d.png")
    (folder / "m10.png").rename(folder / "m0003.png")
    assert [round(float(m[0, 0]) * 255) for m in media.read_mask(folder / "m%04d.png")] == [20, 40, 200]
    deep = np.full((6, 8), 32768, np.uint16)
    Image.fromarray(deep).save(tmp_path / "deep.png")
    assert float(media.read_mask(tmp_path / "deep.png")[0, 0, 0]) == pytest.approx(32768 / 65535, abs=1e-7)
    Image.fromarray(np.array([[[255, 255, 255], [255, 0, 0]]], np.uint8)).save(tmp_path / "colour.png")
    assert media.read_mask(tmp_path / "colour.png")[0, 0].tolist() == pytest.approx([1.0, 0.299], abs=1e-6)
    write_clip(tmp_path / "clip.mp4", 12)
    mask = media.read_mask(tmp_path / "clip.mp4")
    assert mask.shape == (12, 32, 48)
    assert np.abs(mask.mean(dim=(1, 2)).numpy() * 255 - np.arange(12) * 20).max() < 3
    Image.fromarray(np.zeros((6, 9), np.uint8)).save(folder / "m4.png")
    with pytest.raises(H3Error, match=r"m4\.png is 9x6, the first mask is 8x6"):
        media.read_mask(folder)
    for source, word in (("gone.png", "does not exist"), ("z*.png", "no mask picture"), ("z%d.png", "names no file")):
        with pytest.raises(H3Error, match=word):
            media.read_mask(tmp_path / source)


def test_kinds(tmp_path):
    write_clip(tmp_path / "clip.mp4", 2)
    (tmp_path / "clip.mp4").rename(tmp_path / "misnamed.png")
    assert media.kind_of(tmp_path / "misnamed.png") == "video"
    assert media.kind_of(wav(tmp_path / "sound.wav", np.zeros((1, 100)), 8000)) == "audio"
    pages = [Image.fromarray(frame) for frame in grey_frames(3)]
    pages[0].save(tmp_path / "still.gif")
    pages[0].save(tmp_path / "moving.gif", save_all=True, append_images=pages[1:], duration=100)
    assert media.kind_of(tmp_path / "still.gif") == "image"
    assert media.kind_of(tmp_path / "moving.gif") == "video"
    assert len(media.read_clip(tmp_path / "moving.gif").frames) == 7  # 0.3 seconds


def test_cover_art_is_no_video(tmp_path):
    path = tmp_path / "song.mp3"
    with av.open(str(path), "w") as container:
        track = container.add_stream("libmp3lame", rate=44100, layout="stereo")
        cover = container.add_stream("png", rate=1)
        cover.width, cover.height, cover.pix_fmt = 16, 16, "rgb24"
        cover.disposition = av.stream.Disposition.attached_pic
        picture = av.VideoFrame.from_ndarray(np.full((16, 16, 3), 90, np.uint8), format="rgb24")
        frame = av.AudioFrame.from_ndarray(np.zeros((2, 44100), np.float32), format="fltp", layout="stereo")
        frame.sample_rate, frame.pts, frame.time_base = 44100, 0, F(1, 44100)
        sound = track.encode(frame) + track.encode(None)
        container.mux(cover.encode(picture) + cover.encode(None))
        container.mux(sound)
    assert media.kind_of(path) == "audio"
    assert media.read_audio(path).shape[1] == pytest.approx(32000, abs=2000)
    with pytest.raises(H3Error, match="no moving picture"):
        media.read_clip(path)


def test_bad_inputs_are_named(tmp_path):
    (tmp_path / "empty.png").touch()
    (tmp_path / "text.mp4").write_text("hello world\n" * 100)
    (tmp_path / "text.txt").write_text("hello world\n" * 100)
    (tmp_path / "list.m3u8").write_text("#EXTM3U\n#EXTINF:1,\nhttp://localhost:9/a.ts\n")
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(tmp_path / "a.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "a.png").read_bytes()[:3000])
    write_clip(tmp_path / "mute.mp4", 5)
    (tmp_path / "cut.mp4").write_bytes((tmp_path / "mute.mp4").read_bytes()[:600])
    Image.fromarray(np.zeros((4, 4), np.float32)).save(tmp_path / "float.tif")
    sound = wav(tmp_path / "sound.wav", np.zeros((1, 100)), 8000)
    readers = (media.kind_of, media.read_image, media.read_clip, media.read_audio, media.read_metadata)
    cases = [
        (readers, tmp_path / "gone.png", "does not exist"),
        (readers, tmp_path, "is a folder"),
        (readers, tmp_path / "empty.png", "is empty"),
        ((media.kind_of, media.read_clip, media.read_audio), tmp_path / "text.mp4", "not a media file|no sound"),
        ((media.kind_of, media.read_clip), tmp_path / "text.txt", "not a media file"),
        ((media.kind_of, media.read_clip), tmp_path / "list.m3u8", "not a media file"),
        ((media.kind_of, media.read_clip), tmp_path / "cut.mp4", "damaged or not a media file"),
        ((media.read_image,), tmp_path / "cut.png", "cannot be read as a picture"),
        ((media.read_image,), tmp_path / "mute.mp4", "cannot be read as a picture"),
        ((media.read_image,), tmp_path / "float.tif", "wider than 16 bits"),
        ((media.read_audio,), tmp_path / "mute.mp4", "holds no sound"),
        ((media.read_clip,), sound, "no moving picture"),
    ]
    for functions, path, word in cases:
        for function in functions:
            with pytest.raises(H3Error, match=word) as caught:
                function(path)
            assert path.name in str(caught.value)
