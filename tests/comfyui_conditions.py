"""Run by a test in its own process: ComfyUI's H3 nodes with VAEs and an encoder that only keep what they are handed.

python comfyui_conditions.py COMFYUI FOLDER      FOLDER/given.safetensors ──▶ FOLDER/handed.safetensors
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

home, folder = sys.argv[1], Path(sys.argv[2])
sys.argv = sys.argv[:1]
sys.path.insert(0, home)

import comfy.cli_args  # noqa: E402

comfy.cli_args.args.cpu = True

from comfy_extras import nodes_minimax_h3 as nodes  # noqa: E402

WIDTH, HEIGHT, LENGTH = 256, 160, 39


class Encoder:
    def tokenize(self, prompt, **options):
        self.items = options.get("minimax_ref_items", [])
        return {}

    def encode_from_tokens_scheduled(self, tokens):
        return [[None, {}]]


class PictureVAE:
    def __init__(self):
        self.seen = []

    def encode(self, pixels):
        self.seen.append(pixels)
        frames, height, width = pixels.shape[:3]
        return torch.zeros(1, 24, 1 if frames == 1 else (frames - 5) // 17 * 5 + 2, height // 16, width // 16)


class SoundVAE:
    audio_sample_rate = 32000

    def __init__(self):
        self.seen = []

    def encode(self, waveform):
        self.seen.append(waveform)
        return torch.zeros(1, 32, 2, -(-waveform.shape[1] // 800))


given = load_file(folder / "given.safetensors")
pictures = {name: value.float() / 255 for name, value in given.items() if value.dtype == torch.uint8}
sounds = {n: {"waveform": v[None], "sample_rate": 32000} for n, v in given.items() if v.dtype != torch.uint8}
encoder, vae, sound_vae = Encoder(), PictureVAE(), SoundVAE()
nodes.MiniMaxH3ReferenceToVideo.execute(
    encoder, vae, sound_vae, "p", WIDTH, HEIGHT, LENGTH,
    ref_images={"ref_image_0": pictures["wide"], "ref_image_1": pictures["small"]},
    ref_videos={"ref_video_0": pictures["talk"], "ref_video_1": pictures["silent"]},
    ref_video_audios={"ref_video_audio_0": sounds["soundtrack"]},
    ref_audios={"ref_audio_0": sounds["voice"]},
)  # fmt: skip
handed = [*vae.seen, *(item["data"] for item in encoder.items if "data" in item)]
for first, last in ((pictures["wide"], pictures["small"]), (None, pictures["wide"])):
    vae = PictureVAE()
    nodes.MiniMaxH3ImageToVideo.execute(encoder, vae, "p", WIDTH, HEIGHT, LENGTH, first_frame=first, last_frame=last)
    handed += vae.seen
tensors = {f"pixels{i}": (pixels * 255).round().to(torch.uint8).contiguous() for i, pixels in enumerate(handed)}
tensors |= {f"sound{i}": waveform[0].T.contiguous() for i, waveform in enumerate(sound_vae.seen)}
save_file(tensors, folder / "handed.safetensors")
