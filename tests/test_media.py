"""Pictures, sound and mp4: exact counts and times, colours, atomic writing, and clear refusals."""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import sys
import tracemalloc
from fractions import Fraction

import av
import numpy as np
import pytest
import torch

from h3_runtime import media
from h3_runtime.errors import H3Error, NonFiniteError
from h3_runtime.geometry import SAMPLE_RATE, audio_samples
from h3_runtime.media import Encoding, Mp4Writer
from h3_runtime.media import files as media_files
from h3_runtime.media import sound as media_sound
from h3_runtime.media import write as media_write

F = Fraction
TICK = F(1, 90000)


# ---------------------------------------------------------------- material


def level(index):
    """The grey of source frame ``index``; 60 of them, 4 apart."""
    return 8 + 4 * (index % 60)


def grey_frames(count, height=32, width=48):
    frames = np.empty((count, height, width, 3), np.uint8)
    frames[:] = np.array([level(i) for i in range(count)], np.uint8)[:, None, None, None]
    return frames


def indices(frames):
    """The source frame (mod 60) that each frame shows."""
    return [round((float(frame.mean()) - 8) / 4) % 60 for frame in frames]


def noise(samples, seed=0, top=6000):
    """Band-limited noise [2, samples], so that AAC keeps its shape."""
    spectrum = np.fft.rfft(np.random.default_rng(seed).standard_normal((2, samples)))
    spectrum[:, np.fft.rfftfreq(samples, 1 / SAMPLE_RATE) > top] = 0
    sound = np.fft.irfft(spectrum, samples)
    return torch.from_numpy((0.2 * sound / sound.std()).clip(-1, 1).astype(np.float32))


def write_clip(path, frames, **options):
    with Mp4Writer(path, frames.shape[2], frames.shape[1], **options) as writer:
        writer.write(frames)
    return writer


def foreign_clip(path, times, rate, tick=TICK, sound=None, codec="libx264", size=(48, 32)):
    """A clip made without our writer: frame i shows level(i) at ``times[i]`` seconds."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate, options={"preset": "ultrafast", "crf": "4"})
        stream.width, stream.height = size
        stream.pix_fmt = "yuv420p"
        stream.codec_context.time_base = tick
        track = None if sound is None else container.add_stream("pcm_s16le", rate=SAMPLE_RATE, layout="stereo")
        for index, time in enumerate(times):
            grey = np.full((size[1], size[0], 3), level(index), np.uint8)
            frame = av.VideoFrame.from_ndarray(grey, format="rgb24").reformat(format="yuv420p")
            frame.pts, frame.time_base = round(F(time) / tick), tick
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
        if track is not None:
            begin, samples = sound
            pcm = (samples.numpy() * 32767).round().astype(np.int16)
            for at in range(0, pcm.shape[1], 1000):
                block = np.ascontiguousarray(pcm[:, at : at + 1000].T.reshape(1, -1))
                frame = av.AudioFrame.from_ndarray(block, format="s16", layout="stereo")
                frame.sample_rate, frame.time_base = SAMPLE_RATE, F(1, SAMPLE_RATE)
                frame.pts = round(begin * SAMPLE_RATE) + at
                container.mux(track.encode(frame))
            container.mux(track.encode(None))
    return path


@contextlib.contextmanager
def fresh_memory(fill):
    """Where glibc is, new memory holds ``fill`` in every byte; elsewhere whatever it holds."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    perturb = -6
    if mallopt:
        mallopt(perturb, fill)
    try:
        yield
    finally:
        if mallopt:
            mallopt(perturb, 0)


def expected_indices(times, count):
    """The frame that slot k shows: the last one that begins before k / 24 + 1 / 48 (a tie belongs to the slot)."""
    return [max(i for i, t in enumerate(times) if t <= F(k, 24) + F(1, 48)) % 60 for k in range(count)]


# ---------------------------------------------------------------- writing


@pytest.mark.parametrize("count", [5, 22, 124])
def test_mp4_counts_times_and_lag(tmp_path, count):
    path, sound = tmp_path / "clip.mp4", noise(audio_samples(count))
    frames = grey_frames(count, 48, 72)  # no multiples of 16
    writer = write_clip(path, frames, num_frames=count, audio=sound)
    assert (writer.frames_written, writer.notes) == (count, ())
    with av.open(str(path)) as container:
        picture, track = container.streams.video[0], container.streams.audio[0]
        decoded = list(container.decode(picture))
        assert [F(frame.pts) * frame.time_base for frame in decoded] == [F(i, 24) for i in range(count)]
        assert picture.duration * picture.time_base == F(count, 24)
        assert (picture.average_rate, picture.codec_context.name, picture.codec_context.pix_fmt) == (
            24,
            "h264",
            "yuv420p",
        )
        assert (track.codec_context.name, track.rate, track.channels) == ("aac", SAMPLE_RATE, 2)
    clip = media.read_clip(path)
    assert clip.frames.shape == frames.shape and clip.frames.dtype == np.uint8
    assert (clip.fps, clip.notes) == (24.0, ())
    assert indices(clip.frames) == [i % 60 for i in range(count)]
    alone = media.read_audio(path)
    assert alone.dtype == torch.float32
    assert alone.shape == clip.audio.shape == (2, round(count / 24 * 32000))
    assert torch.equal(alone, clip.audio)
    for channel in range(2):
        size = 2 * sound.shape[1]
        cross = np.fft.irfft(np.fft.rfft(alone[channel], size) * np.conj(np.fft.rfft(sound[channel], size)), size)
        assert int(cross.argmax()) == 0
    error = 10 * math.log10(float((sound**2).sum() / ((alone - sound) ** 2).sum()))
    assert error > 15


def test_faststart_and_interleaving(tmp_path):
    path = tmp_path / "clip.mp4"
    write_clip(path, grey_frames(72), audio=noise(audio_samples(72)))
    data = path.read_bytes()
    assert data.index(b"moov") < data.index(b"mdat")
    with av.open(str(path)) as container:
        order = [(p.stream.type, float(p.dts * p.time_base)) for p in container.demux() if p.dts is not None]
    last = {"video": 0.0, "audio": 0.0}
    for kind, time in order:
        last[kind] = time
        assert abs(last["video"] - last["audio"]) < 1.1  # a player that reads forward never waits for a second


def test_bytes_do_not_depend_on_chunks_or_repetition(tmp_path):
    frames, sound = grey_frames(22), noise(audio_samples(22))
    tags = {"prompt": "a fox"}
    write_clip(tmp_path / "a.mp4", frames, audio=sound, metadata=tags)
    with Mp4Writer(tmp_path / "b.mp4", 48, 32, num_frames=22) as writer:
        for at in range(0, 22, 7):
            writer.write(torch.from_numpy(frames[at : at + 7].astype(np.float32) / 255).permute(3, 0, 1, 2)[None])
        writer.set_metadata(tags)
        writer.set_audio(sound.numpy())
    assert (tmp_path / "a.mp4").read_bytes() == (tmp_path / "b.mp4").read_bytes()


def test_bytes_do_not_depend_on_what_memory_held(tmp_path):
    generator = np.random.default_rng(0)
    coarse = torch.from_numpy(generator.integers(0, 256, (1, 3, 12, 21)).astype(np.float32))
    large = torch.nn.functional.interpolate(coarse, (800, 1400), mode="bicubic")[0].permute(1, 2, 0).numpy()
    frames = np.stack([large[i : i + 128, i : i + 1344] for i in range(10)])
    frames = (frames + generator.integers(-3, 4, frames.shape)).clip(0, 255).astype(np.uint8)
    results = []
    for fill in (85, 170):
        with fresh_memory(fill):
            write_clip(tmp_path / f"{fill}.mp4", frames)
        results.append((tmp_path / f"{fill}.mp4").read_bytes())
    assert results[0] == results[1]
    assert b" threads=4 " in results[0] and b" sliced_threads=0 " in results[0]


def test_metadata_round_trip(tmp_path):
    long = json.dumps({"words": ['wörd 漢字 \U0001f98a \\ " = ; #\n'] * 4000}, ensure_ascii=False)
    assert len(long) > 90_000
    tags = {"prompt": "naïve café\nsecond line", "workflow": long, "h3_runtime": "{}", "title": "t"}
    write_clip(tmp_path / "clip.mp4", grey_frames(5), metadata=tags)
    found = media.read_metadata(tmp_path / "clip.mp4")
    assert {key: found.get(key) for key in tags} == tags
    assert "creation_time" not in found


def test_colours_come_back(tmp_path):
    generator = np.random.default_rng(3)
    colours = np.concatenate(
        [generator.integers(0, 256, (20, 3)), [[255, 0, 0], [0, 255, 0], [0, 0, 255], [255, 255, 255], [0, 0, 0]]]
    )
    frames = np.broadcast_to(colours.astype(np.uint8)[:, None, None, :], (25, 32, 48, 3))
    write_clip(tmp_path / "clip.mp4", frames)
    ours = media.read_clip(tmp_path / "clip.mp4").frames.astype(int)
    with av.open(str(tmp_path / "clip.mp4")) as container:
        decoded = list(container.decode(video=0))
        assert {(f.colorspace, f.color_range) for f in decoded} == {(1, 1)}  # BT.709, limited
        other = np.stack([f.to_ndarray(format="rgb24") for f in decoded]).astype(int)
    assert np.abs(ours - frames).max() <= 3 and np.abs(other - frames).max() <= 3 + 1
    assert abs((ours - frames).mean()) < 0.3  # no darkening that grows from clip to clip


def test_lossless_is_lossless(tmp_path):
    frames = np.random.default_rng(0).integers(0, 256, (5, 34, 50, 3), dtype=np.uint8)
    sound = noise(audio_samples(5))
    write_clip(tmp_path / "clip.mp4", frames, audio=sound, encoding=Encoding(lossless=True))
    clip = media.read_clip(tmp_path / "clip.mp4")
    assert np.array_equal(clip.frames, frames)
    assert clip.audio.shape == sound.shape
    assert float((clip.audio - sound).abs().max()) <= 2**-24


@pytest.mark.parametrize(("given", "word"), [(6000, "padded to 6667"), (9000, "cut to 6667"), (0, "padded to 6667")])
def test_sound_is_fitted_and_said(tmp_path, given, word):
    writer = write_clip(tmp_path / "clip.mp4", grey_frames(5), audio=torch.full((2, given), 0.25))
    assert len(writer.notes) == 1 and word in writer.notes[0] and str(abs(given - 6667)) in writer.notes[0]
    assert media.read_audio(tmp_path / "clip.mp4").shape == (2, 6667)


def test_broken_sound_never_costs_the_video(tmp_path, monkeypatch):
    sound = noise(audio_samples(22))
    sound[0, 100:200] = math.nan
    sound[1, 5] = -math.inf
    writer = write_clip(tmp_path / "nan.mp4", grey_frames(22), audio=sound)
    assert writer.notes == (f"101 of {2 * 29333} sound samples were NaN or infinite: made silent",)
    clip = media.read_clip(tmp_path / "nan.mp4")
    assert len(clip.frames) == 22 and bool(torch.isfinite(clip.audio).all()) and float(clip.audio.std()) > 0.1

    loud = write_clip(tmp_path / "loud.mp4", grey_frames(5), audio=torch.full((2, 6667), 3.0))
    assert "peak 3.000" in loud.notes[0]

    def refuse(stream, samples, kind):
        raise ValueError("no such sound")
        yield

    monkeypatch.setattr(media_write, "coded_sound", refuse)
    writer = write_clip(tmp_path / "mute.mp4", grey_frames(22), audio=noise(audio_samples(22)))
    assert "saved without it" in writer.notes[0]
    clip = media.read_clip(tmp_path / "mute.mp4")
    assert len(clip.frames) == 22 and clip.audio is None
    assert sorted(p.name for p in tmp_path.iterdir()) == ["loud.mp4", "mute.mp4", "nan.mp4"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("when", ["block", "finish"])
def test_a_failure_leaves_what_was_there(tmp_path, monkeypatch, error, when):
    path = tmp_path / "clip.mp4"
    path.write_bytes(b"old")

    def fail(self, sound):
        raise error

    if when == "finish":
        monkeypatch.setattr(Mp4Writer, "_join", fail)
    with pytest.raises(error), Mp4Writer(path, 48, 32) as writer:
        writer.write(grey_frames(5))
        assert len(list(tmp_path.iterdir())) == 2
        if when == "block":
            raise error
    assert [p.name for p in tmp_path.iterdir()] == ["clip.mp4"] and path.read_bytes() == b"old"


def test_a_wrong_count_is_not_saved(tmp_path):
    for count, word in ((4, "4 frames were written"), (0, "no frame was written")):
        with pytest.raises(H3Error, match=word), Mp4Writer(tmp_path / "clip.mp4", 48, 32, num_frames=5) as writer:
            if count:
                writer.write(grey_frames(count))
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_said(tmp_path, monkeypatch):
    def full(self, picture):
        raise av.FFmpegError(28, "No space left on device")

    monkeypatch.setattr(Mp4Writer, "_encode", full)
    with pytest.raises(H3Error, match="No space left"), Mp4Writer(tmp_path / "clip.mp4", 48, 32) as writer:
        writer.write(grey_frames(1))
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_use_gets_a_new_name(tmp_path, monkeypatch):
    path, replace = tmp_path / "clip.mp4", media_files.os.replace
    path.write_bytes(b"old")

    def locked(part, target):
        if target == path:
            raise PermissionError("in use")
        replace(part, target)

    monkeypatch.setattr(media_files.os, "replace", locked)
    writer = write_clip(path, grey_frames(5))
    assert writer.path.name == "clip_1.mp4" and "saved as clip_1.mp4" in writer.notes[0]
    assert len(media.read_clip(writer.path).frames) == 5 and path.read_bytes() == b"old"
    assert len(list(tmp_path.iterdir())) == 2


def test_writer_refuses_at_once(tmp_path):
    (tmp_path / "folder.mp4").mkdir()
    good = {"path": tmp_path / "x.mp4", "width": 48, "height": 32}
    bad = [
        ({"path": tmp_path / "folder.mp4"}, "is a folder"),
        ({"path": tmp_path / "gone" / "x.mp4"}, "not a folder that exists"),
        ({"path": tmp_path / "x.avi"}, "ends in '.avi'"),
        ({"path": tmp_path / "x"}, "ends in 'nothing'"),
        ({"width": 47}, "size 47x32"),
        ({"height": 0}, "size 48x0"),
        ({"fps": 16}, "fps is 16"),
        ({"fps": 23.976}, "fps is 23.976"),
        ({"audio": torch.zeros(1, 100)}, r"shape \[1, 100\]"),
        ({"audio": torch.zeros(100)}, r"shape \[100\]"),
        ({"metadata": {"steps": 4}}, "int cannot be saved"),
        ({"metadata": {"": "x"}}, "empty"),
        ({"metadata": {"a": "x\0y"}}, "NUL"),
        ({"metadata": {"a": "\ud800"}}, "half a character"),
    ]
    for change, word in bad:
        with pytest.raises(H3Error, match=word):
            Mp4Writer(**{**good, **change})
    for options, word in (({"crf": 60}, "crf is 60"), ({"audio_bitrate": 128_000}, "audio_bitrate is 128000")):
        with pytest.raises(H3Error, match=word):
            Encoding(**options)
    with Mp4Writer(**good) as writer:
        writer.write(grey_frames(1))
        for frames, word in (
            (grey_frames(1, 34), "frames have shape"),
            (torch.zeros(1, 1, 2, 32, 48), "frames have shape"),
            (np.zeros((1, 32, 48, 3), np.int64), "pixels are int64"),
        ):
            with pytest.raises(H3Error, match=word):
                writer.write(frames)
        with pytest.raises(NonFiniteError, match="NaN"):
            writer.write(torch.full((1, 3, 1, 32, 48), math.nan))
    assert len(media.read_clip(tmp_path / "x.mp4").frames) == 1
    with pytest.raises(H3Error, match="outside"):
        writer.write(grey_frames(1))


# ---------------------------------------------------------------- reading clips


@pytest.mark.parametrize("suffix", [".mp4", ".mkv"])
@pytest.mark.parametrize(
    ("rate", "count"),
    [(12, 24), (16, 21), (F(24000, 1001), 30), (25, 50), (30, 75), (48, 61), (60, 120), (24, 30), (F(15, 2), 9)],
)
def test_constant_rates_land_on_24(tmp_path, rate, count, suffix):
    times = [i / F(rate) for i in range(count)]
    path = foreign_clip(tmp_path / f"clip{suffix}", times, rate, tick=1 / F(rate))
    clip = media.read_clip(path)
    # The reference's rule, in indices: every frame is held until the slot of the next one.
    slots = [math.floor(i * 24 / F(rate) + F(1, 2)) for i in range(count + 1)]
    expected = [i % 60 for i in range(count) for _ in range(slots[i + 1] - slots[i])]
    assert indices(clip.frames) == expected
    assert clip.fps == pytest.approx(float(rate), rel=2e-3)
    if rate == 24:
        assert clip.notes == ()
    if rate == 30:
        assert clip.notes == ("30 fps clip of 75 frames resampled to 60 frames at 24 fps",)


def test_constant_rates_match_diffusers(tmp_path):
    module = pytest.importorskip("diffusers.modular_pipelines.minimax_h3.before_encoder")
    for rate, count in ((12, 10), (25, 30), (30, 31), (48, 33), (60, 50)):
        path = foreign_clip(tmp_path / "clip.mkv", [F(i, rate) for i in range(count)], rate, size=(32, 32))
        with av.open(str(path)) as container:
            source = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
        theirs = module.MiniMaxH3Ref2VASetupStep._normalize_video_condition(source, rate, 20, 32, 32, 1024, 24.0)
        ours = media.read_clip(path, max_frames=20).frames
        assert ours.shape == theirs.shape and indices(ours) == indices(theirs)


def test_variable_rate_keeps_its_timing(tmp_path):
    gaps = [20, 20, 90, 41, 10, 5, 200, 33, 33, 34, 120, 42, 42] * 2
    times = [F(sum(gaps[:i]), 1000) for i in range(len(gaps))]
    for suffix in (".mp4", ".mkv"):
        path = foreign_clip(tmp_path / f"clip{suffix}", times, 60, tick=F(1, 1000))
        clip = media.read_clip(path)
        # x264 tells the last frame's length by the one before it or by the rate: the count may end there.
        known = math.floor(times[-1] * 24 + F(1, 2)) + 1
        assert known <= len(clip.frames) <= known + 2
        assert indices(clip.frames)[:known] == expected_indices(times, known)
        assert "variable rate" in clip.notes[0] and f"{len(gaps)} frames" in clip.notes[0]


def test_start_and_length(tmp_path):
    path = tmp_path / "clip.mp4"
    sound = noise(audio_samples(124))
    write_clip(path, grey_frames(124), audio=sound)
    whole = media.read_clip(path)
    for start, frames in ((F(1, 2), 10), (3, 20), (F(100, 24), None)):  # the last two jump to a keyframe
        clip = media.read_clip(path, start_seconds=float(start), max_frames=frames)
        first = round(start * 24)
        assert np.array_equal(clip.frames, whole.frames[first:][:frames])
        begin = round(start * SAMPLE_RATE)
        assert clip.audio.shape[1] == audio_samples(len(clip.frames)) or frames is None
        assert torch.equal(clip.audio, whole.audio[:, begin:][:, : clip.audio.shape[1]])
        assert clip.notes == ()
    assert media.read_clip(path, max_frames=7).frames.shape[0] == 7
    assert media.read_clip(path, sound=False).audio is None
    with pytest.raises(H3Error, match="start earlier"):
        media.read_clip(path, start_seconds=6)
    with pytest.raises(H3Error, match="start_seconds is -1"):
        media.read_clip(path, start_seconds=-1)
    with pytest.raises(H3Error, match="max_frames is 0"):
        media.read_clip(path, max_frames=0)
    with pytest.raises(H3Error, match="fps is 30"):
        media.read_clip(path, fps=30)


def test_sound_after_a_jump_is_the_same(tmp_path, monkeypatch):
    path = tmp_path / "clip.mp4"
    write_clip(path, grey_frames(96), audio=noise(audio_samples(96)))
    plain = media.read_audio(path, start_seconds=2.5, max_seconds=1)
    monkeypatch.setattr(media_sound, "SEEK_AFTER", 1)
    jumped = media.read_audio(path, start_seconds=2.5, max_seconds=1)
    assert plain.shape == jumped.shape == (2, SAMPLE_RATE)
    assert float((plain - jumped).abs().max()) < 1e-4


def test_reading_streams(tmp_path):
    path = tmp_path / "clip.mp4"
    write_clip(path, grey_frames(96, 160, 160))
    one = 160 * 160 * 3

    def peak(work):
        tracemalloc.start()
        work()
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    assert peak(lambda: sum(1 for _ in media.stream_frames(path))) < 6 * one
    assert peak(lambda: media.read_clip(path, max_frames=5)) < 12 * one
    assert peak(lambda: media.read_clip(path)) < 1.2 * 96 * one  # one copy of the clip
    assert indices(media.stream_frames(path, max_frames=4, start_seconds=1.0)) == [24, 25, 26, 27]


def test_a_clip_larger_than_memory_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "clip.mp4"
    write_clip(path, grey_frames(22))
    monkeypatch.setattr(media.clips.psutil, "virtual_memory", lambda: type("Free", (), {"available": 50_000})())
    with pytest.raises(H3Error, match="set max_frames"):
        media.read_clip(path)
    assert len(media.read_clip(path, max_frames=5).frames) == 5


@pytest.mark.parametrize("degrees", [90, 180, 270])
def test_rotation_tag(tmp_path, degrees):
    frame = np.zeros((32, 64, 3), np.uint8)
    frame[:16, :32], frame[16:, 32:] = 250, 120
    path = tmp_path / "clip.mp4"
    write_clip(path, np.repeat(frame[None], 3, axis=0))
    data = bytearray(path.read_bytes())
    cosine, sine = {90: (0, 1), 180: (-1, 0), 270: (0, -1)}[degrees]
    # ISO 14496-12: a pixel (x, y) is shown at (a x + c y, b x + d y); y points down, so this turns clockwise.
    matrix = [cosine, sine, 0, -sine, cosine, 0, 0, 0, 0x4000]
    at = data.index(b"tkhd") + 4 + 40
    for index, value in enumerate(matrix):
        data[at + 4 * index : at + 4 * index + 4] = (value * 65536).to_bytes(4, "big", signed=True)
    path.write_bytes(bytes(data))
    clip = media.read_clip(path)
    turned = frame
    for _ in range(degrees // 90):  # clockwise: the left column, read upwards, becomes the first row
        turned = np.stack([turned[::-1, x] for x in range(turned.shape[1])])
    assert clip.frames.shape == (3, *turned.shape)
    assert np.abs(clip.frames[0].astype(int) - turned).mean() < 4
    assert any(f"turned by {degrees} degrees clockwise" in note for note in clip.notes)


@pytest.mark.parametrize(
    ("codec", "matrix", "full"),
    [("mjpeg", 5, 2), ("libx264", 1, 1), ("libx264", 5, 2), ("libx264", 1, 2), ("libx264", 9, 1), ("libx264rgb", 0, 2)],
)
def test_tagged_colours_are_followed(tmp_path, codec, matrix, full):
    path = tmp_path / "clip.mkv"
    colours = [[200, 40, 60], [10, 10, 10], [250, 250, 250], [20, 180, 90]]
    layout = {"mjpeg": "yuvj420p", "libx264": "yuv420p", "libx264rgb": "rgb24"}[codec]
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=24, options={"qmin": "1", "qmax": "1"} if codec == "mjpeg" else {})
        stream.width, stream.height, stream.pix_fmt = 48, 32, layout
        if codec == "libx264":
            stream.codec_context.colorspace, stream.codec_context.color_range = matrix, full
        for index, colour in enumerate(colours):
            frame = av.VideoFrame.from_ndarray(np.full((32, 48, 3), colour, np.uint8), format="rgb24")
            if layout != "rgb24":
                frame = frame.reformat(format=layout, dst_colorspace=matrix, dst_color_range=full)
            frame.pts, frame.time_base = index, F(1, 24)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    shown = media.read_clip(path).frames.mean(axis=(1, 2))
    assert np.abs(shown - colours).max() <= 4


def test_sound_is_placed_on_the_pictures_clock(tmp_path):
    tone = torch.full((2, SAMPLE_RATE), 0.5)
    times = [F(i, 24) for i in range(24)]
    late = foreign_clip(tmp_path / "late.mkv", times, 24, sound=(0.25, tone))
    clip = media.read_clip(late)
    assert clip.audio.shape[1] == 32000
    assert float(clip.audio[:, :7960].abs().max()) == 0 and float(clip.audio[:, 8040:].min()) > 0.49
    early = foreign_clip(tmp_path / "early.mkv", [t + F(1, 2) for t in times], 24, sound=(0, tone))
    clip = media.read_clip(early)
    assert len(clip.frames) == 24
    assert clip.audio.shape[1] == pytest.approx(16000, abs=40)
    assert media.read_audio(early).shape[1] == pytest.approx(16000, abs=40)


def test_sound_past_a_foreign_picture_is_kept_alone_and_cut_in_a_clip(tmp_path):
    path = foreign_clip(tmp_path / "c.mkv", [F(i, 24) for i in range(24)], 24, sound=(0, torch.full((2, 40000), 0.5)))
    assert media.read_audio(path).shape[1] == 40000
    assert media.read_clip(path).audio.shape[1] == 32000


def test_forty_clips_do_not_drift():
    lengths = [124, 141, 158, 243, 5, 22] * 7
    frame, pieces = 0, []
    for length in lengths[:40]:
        pieces.append(audio_samples(frame + length) - audio_samples(frame))
        frame += length
        assert abs(sum(pieces) - F(frame, 24) * SAMPLE_RATE) < 1
    assert sum(pieces) == audio_samples(frame)
