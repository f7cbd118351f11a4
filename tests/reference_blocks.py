"""The reference's own steps on the small models: media, presentation, conditions, layout, noise, loop.

SmallParts    one set of small weights twice: ours behind ``Models``, the reference's in ``components``
run_steps     the blocks one after another on a pipeline state, as the reference's pipeline runs them
processors    Qwen3-VL's picture and clip processors: the installed ones where torchvision is, else their parts put
              together (their sizes, their rows; the same resize by torch)
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import av
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from h3_runtime.checkpoint.parts import PartPaths
from h3_runtime.models.audio_vae import AudioVAEConfig
from h3_runtime.render import Models
from h3_runtime.text.config import TextEncoderConfig
from h3_runtime.text.encoder import TextEncoder, import_qwen

from .small_jobs import small_dit
from .test_audio_vae import folded, loaded, reference_of
from .test_sampler import reference_model
from .test_video_vae import random_pair

PICTURE_PIXELS = (65_536, 16_777_216)
CLIP_PIXELS = (4_096, 25_165_824)
AUDIO = AudioVAEConfig(encoder_dim=2, latent_dim=64, heads=2, decoder_dim=128)


class SmallParts:
    """Seeded small weights of every part: ``models`` for our runtime, ``components`` for the reference's blocks."""

    def __init__(self, folder: Path, seed: int = 0):
        blocks = pytest.importorskip("diffusers.modular_pipelines.minimax_h3")
        from diffusers import MiniMaxH3Scheduler, MiniMaxH3Transformer3DModel
        from diffusers.image_processor import VaeImageProcessor

        self.encoder = TextEncoder.load(folder, dtype=torch.float32)
        self.dit = small_dit(seed, self.encoder.text_dim)
        their_vae, self.video_vae = random_pair(seed)
        their_audio, mean, std = reference_of(AUDIO, seed)
        self.audio_vae = loaded(AUDIO, folded(their_audio.state_dict(), mean, std))
        their_audio.register_to_config(latents_mean=mean.tolist(), latents_std=std.tolist())
        self.models = OnePlace(folder, self)
        their_dit = reference_model(SimpleNamespace(Transformer=MiniMaxH3Transformer3DModel), self.dit)
        self.blocks = blocks
        self.components = SimpleNamespace(
            vae=their_vae,
            audio_vae=their_audio,
            transformer=their_dit,
            transformer_ref=their_dit,
            text_encoder=deeper_model(self.encoder),
            text_encoder_layer=self.encoder.config.layers,
            tokenizer=OracleTokenizer(self.encoder.tokenizer),
            processor=processors(self.encoder.config),
            image_processor=VaeImageProcessor(vae_scale_factor=16),
            scheduler=MiniMaxH3Scheduler(12.0),
            audio_scheduler=MiniMaxH3Scheduler(3.0),
            config=SimpleNamespace(
                canvas_short_edge=768, canvas_max_pixels=768 * 1344, reference_image_short_edge=2048
            ),
            min_duration=0,
            max_duration=1000,
            _execution_device=torch.device("cpu"),
            **FIXED,
        )

    def resize_by(self, short_edge: int, max_pixels: int, image_short_edge: int) -> None:
        """The reference's canvas rules, for tests that cannot afford the released sizes."""
        config = self.components.config
        config.canvas_short_edge, config.canvas_max_pixels = short_edge, max_pixels
        config.reference_image_short_edge = image_short_edge


FIXED = {
    "canvas_multiple": 32,
    "patch_size": (1, 2, 2),
    "vae_spatial_compression_ratio": 16,
    "vae_latent_channels": 24,
    "vae_frames_per_chunk": 17,
    "vae_latents_per_chunk": 5,
    "fps": 24,
    "audio_sampling_rate": 32000,
    "audio_channels": 2,
    "audio_latent_channels": 32,
    "text_tag": 1,
    "video_tag": 0,
    "audio_tag": 2,
    "keyframe_encode_seed": 42,
    "keyframe_noise_aug": 0.999,
    "pixel_mean": (0.485, 0.456, 0.406),
    "pixel_std": (0.229, 0.224, 0.225),
}


class OnePlace(Models):
    """``Models`` whose parts are already in memory; ``encodes`` counts how often the text encoder was asked for."""

    def __init__(self, folder: Path, parts: SmallParts, **options):
        paths = PartPaths((), None, None, folder / "text_encoder.safetensors", folder)
        super().__init__(paths, torch.float32, keep=True, **options)
        self.small, self.encodes = parts, 0

    def text_encoder(self) -> TextEncoder:
        self.encodes += 1
        return self.small.encoder

    def video_vae(self):
        return self.small.video_vae

    def video_encoder(self, device=None):
        return self.small.video_vae

    def audio_vae(self):
        return self.small.audio_vae


def deeper_model(encoder: TextEncoder):
    """transformers' whole Qwen3-VL: the same weights, two layers more and a last norm, as the reference wants it."""
    _, version = import_qwen()
    from transformers import Qwen3VLForConditionalGeneration

    torch.manual_seed(0)
    whole = TextEncoderConfig.from_dict({**encoder.config.to_dict(), "layers": encoder.config.layers + 2})
    model = Qwen3VLForConditionalGeneration(whole.to_transformers(version)).eval()
    model.model.load_state_dict(encoder.module.state_dict(), strict=False)
    return model


class OracleTokenizer:
    """Our small vocabulary behind the two calls that the blocks make."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def __call__(self, text, add_special_tokens):
        assert not add_special_tokens
        return {"input_ids": self.tokenizer.encode(text)}

    def convert_tokens_to_ids(self, name):
        return self.tokenizer.token_id(name)


def processors(config: TextEncoderConfig) -> SimpleNamespace:
    def kinds(batch):
        return [[{config.image_token: 1, config.video_token: 2}.get(token, 0) for token in ids] for ids in batch]

    try:
        import torchvision  # noqa: F401

        pictures, clips = installed_processors()
    except ImportError:
        pictures, clips = picture_processor(), ClipProcessor()
    return SimpleNamespace(image_processor=pictures, video_processor=clips, create_mm_token_type_ids=kinds)


def installed_processors():
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    half = [0.5, 0.5, 0.5]
    common = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2, "image_mean": half, "image_std": half}
    pictures = Qwen2VLImageProcessor(size=dict(zip(("shortest_edge", "longest_edge"), PICTURE_PIXELS)), **common)
    clips = Qwen3VLVideoProcessor(
        size=dict(zip(("shortest_edge", "longest_edge"), CLIP_PIXELS)), cap_pixels_per_frame=False, **common
    )
    return pictures, clips


def resized(frames: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """uint8 [f, 3, H, W]: torch's bicubic with antialiasing on bytes, which is what torchvision calls."""
    if frames.shape[-2:] == (height, width):
        return frames
    return F.interpolate(frames, size=(height, width), mode="bicubic", antialias=True, align_corners=False)


def picture_processor():
    from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as released

    class Pictures(released.Qwen2VLImageProcessorPil):
        def resize(self, image, size, resample, factor, **kwargs):
            height, width = released.smart_resize(
                *image.shape[-2:], factor, min_pixels=size.shortest_edge, max_pixels=size.longest_edge
            )
            return resized(torch.from_numpy(np.ascontiguousarray(image))[None], height, width)[0].numpy()

    half, (smallest, largest) = [0.5, 0.5, 0.5], PICTURE_PIXELS
    return Pictures(
        patch_size=16, temporal_patch_size=2, merge_size=2, image_mean=half, image_std=half,
        size={"shortest_edge": smallest, "longest_edge": largest},
    )  # fmt: skip


class ClipProcessor:
    """Qwen3-VL's clip processor without torchvision: its own size rule and rows around torch's resize."""

    temporal_patch_size = 2

    def __init__(self):
        self.size = dict(zip(("shortest_edge", "longest_edge"), CLIP_PIXELS))

    def __call__(self, videos, do_sample_frames, return_tensors):
        # by its full name: without torchvision the package gives out an empty stand-in
        released = import_module("transformers.models.qwen3_vl.video_processing_qwen3_vl")
        assert not do_sample_frames and return_tensors == "pt"
        rows, grids = [], []
        for video in videos:
            frames = torch.from_numpy(np.ascontiguousarray(video)).permute(0, 3, 1, 2).contiguous()
            limits = self.size["shortest_edge"], self.size["longest_edge"]
            size = released.smart_resize(frames.shape[0], *frames.shape[2:], 2, 32, *limits)
            values = resized(frames, *size).float().sub(127.5).div(127.5)
            patches, *grid = released.Qwen3VLVideoProcessor.patchify(None, values[None], 16, 2, 2)
            rows.append(patches[0]), grids.append(grid)
        return {"pixel_values_videos": torch.cat(rows), "video_grid_thw": torch.tensor(grids)}


def run_steps(small: SmallParts, names: list[str], **given):
    """The reference's blocks by class name, one after another, on a state that starts from ``given``."""
    from diffusers.modular_pipelines.minimax_h3 import before_denoise, before_encoder, decoders, denoise, encoders
    from diffusers.modular_pipelines.modular_pipeline import PipelineState

    state = PipelineState()
    for name, value in given.items():
        state.set(name, value)
    for name in names:
        home = next(
            module for module in (before_encoder, encoders, before_denoise, denoise, decoders) if hasattr(module, name)
        )
        step = getattr(home, name)()
        if hasattr(step, "set_progress_bar_config"):
            step.set_progress_bar_config(disable=True)
        step(small.components, state)
    return state


def write_lossless(
    path: Path, frames: np.ndarray, fps: int, sound: np.ndarray | None = None, rate: int = 44100
) -> Path:
    """A Matroska file whose RGB pixels and 16-bit samples come back as they are. sound: int16 [channels, samples]."""
    with av.open(str(path), "w") as container:
        video = container.add_stream("ffv1", rate=fps)
        video.width, video.height, video.pix_fmt = frames.shape[2], frames.shape[1], "bgr0"
        audio = None if sound is None else container.add_stream("pcm_s16le", rate=rate)
        if audio is not None:
            audio.layout = "mono" if len(sound) == 1 else "stereo"
        for pixels in frames:
            container.mux(video.encode(av.VideoFrame.from_ndarray(pixels, "rgb24").reformat(format="bgr0")))
        container.mux(video.encode(None))
        if audio is not None:
            samples = np.ascontiguousarray(sound.T.reshape(1, -1))  # interleaved
            frame = av.AudioFrame.from_ndarray(samples, "s16", audio.layout.name)
            frame.rate = rate
            container.mux(audio.encode(frame))
            container.mux(audio.encode(None))
    return path
