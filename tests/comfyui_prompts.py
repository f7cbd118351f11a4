"""Run by a test in its own process: ComfyUI's H3 tokenizer on prompts with embeddings.

    python comfyui_prompts.py COMFYUI FOLDER    FOLDER/prompts.json, FOLDER/embeddings ──▶ FOLDER/entries.json

An entry is a token id, or the rounded sum of an embedding's row.
"""

import json
import sys
from pathlib import Path

import torch

home, folder = sys.argv[1], Path(sys.argv[2])
sys.argv = sys.argv[:1]
sys.path.insert(0, home)

import comfy.cli_args  # noqa: E402

comfy.cli_args.args.cpu = True

from comfy.text_encoders.minimax import MiniMaxH3Tokenizer  # noqa: E402

tokenizer = MiniMaxH3Tokenizer(embedding_directory=str(folder / "embeddings"))
entries = []
for prompt in json.loads((folder / "prompts.json").read_text()):
    tokens = [entry[0] for entry in tokenizer.tokenize_with_weights(prompt)["qwen3vl_32b"][0]]
    entries.append([round(token.sum().item(), 3) if torch.is_tensor(token) else token for token in tokens])
(folder / "entries.json").write_text(json.dumps(entries))
