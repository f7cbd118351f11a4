"""The sizes of the text encoder, and their two written forms.

    config.json of the release  --from_huggingface-->  TextEncoderConfig  --to_transformers-->  Qwen3VLConfig
    our file's header (to_dict) --from_dict--------->       |
                                                       the defaults are the released Qwen3-VL-32B, cut at layer 50

``layers`` is where the condition is read: the state after that decoder layer. Later layers are never built.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from ..errors import CheckpointError
from .vision import FRAMES_PER_PATCH, MERGE, PATCH

CONDITION_LAYER = 50


@dataclass(frozen=True)
class TextEncoderConfig:
    """Qwen3-VL as H3 uses it. Sizes are counts of channels, heads, rows or layers; ``deepstack`` lists the vision
    blocks after which picture features go to language layers 0, 1, 2 ..."""

    vocab: int = 151_936
    hidden: int = 5120
    layers: int = CONDITION_LAYER
    ffn: int = 25_600
    heads: int = 64
    kv_heads: int = 8
    head_dim: int = 128
    rope_theta: float = 5_000_000.0
    rope_sections: tuple[int, int, int] = (24, 20, 20)
    norm_eps: float = 1e-6
    vision_depth: int = 27
    vision_hidden: int = 1152
    vision_ffn: int = 4304
    vision_heads: int = 16
    vision_positions: int = 2304
    deepstack: tuple[int, ...] = (8, 16, 24)
    image_token: int = 151_655
    video_token: int = 151_656
    vision_start_token: int = 151_652
    vision_end_token: int = 151_653

    def __post_init__(self):
        side = math.isqrt(max(self.vision_positions, 0))
        faults = {
            "layers": self.layers < 1,
            "kv_heads": self.kv_heads < 1 or self.heads % self.kv_heads != 0,
            "rope_sections": len(self.rope_sections) != 3 or sum(self.rope_sections) * 2 != self.head_dim,
            "vision_heads": self.vision_heads < 1 or self.vision_hidden % (4 * self.vision_heads) != 0,
            "vision_positions": side < 2 or side * side != self.vision_positions,
            "deepstack": any(not 0 <= block < self.vision_depth for block in self.deepstack),
        }
        for name, wrong in faults.items():
            if wrong:
                raise CheckpointError(
                    f"the text encoder's config has {name} = {getattr(self, name)}, which its other sizes rule out; "
                    "use the config that came with the weights"
                )

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and lists for JSON."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TextEncoderConfig:
        """The inverse of ``to_dict``; a missing or unknown name is a ``CheckpointError``."""
        known = {field.name for field in fields(cls)}
        if not isinstance(values, Mapping) or set(values) != known:
            odd = sorted(known.symmetric_difference(values)) if isinstance(values, Mapping) else [type(values).__name__]
            raise CheckpointError(
                f"the text encoder's config does not have the needed names (differing: {', '.join(odd)}); "
                "make the file again with this version"
            )
        try:
            return cls(**{key: tuple(value) if isinstance(value, list) else value for key, value in values.items()})
        except TypeError as error:
            raise CheckpointError(f"the text encoder's config holds a value of the wrong kind ({error})") from error

    @classmethod
    def from_huggingface(cls, config: Mapping[str, Any], layers: int | None = None) -> TextEncoderConfig:
        """From a parsed ``config.json`` of Qwen3-VL, as 4.x or 5.x of transformers writes it.

        ``layers``: where to read the condition; 50 when not given, and then the folder must have at least 50.
        """
        if config.get("model_type") != "qwen3_vl":
            raise CheckpointError(
                f"config.json names the model type {config.get('model_type')!r}; H3's text encoder is 'qwen3_vl'"
            )
        try:
            text, vision = config["text_config"], config["vision_config"]
            rope = {**(text.get("rope_scaling") or {}), **(text.get("rope_parameters") or {})}
            _check_unchangeable(text, vision)
            return cls(
                vocab=text["vocab_size"],
                hidden=text["hidden_size"],
                layers=pick_layers(text["num_hidden_layers"], layers),
                ffn=text["intermediate_size"],
                heads=text["num_attention_heads"],
                kv_heads=text["num_key_value_heads"],
                head_dim=text["head_dim"],
                rope_theta=rope["rope_theta"] if "rope_theta" in rope else text["rope_theta"],
                rope_sections=tuple(rope["mrope_section"]),
                norm_eps=text["rms_norm_eps"],
                vision_depth=vision["depth"],
                vision_hidden=vision["hidden_size"],
                vision_ffn=vision["intermediate_size"],
                vision_heads=vision["num_heads"],
                vision_positions=vision["num_position_embeddings"],
                deepstack=tuple(vision["deepstack_visual_indexes"]),
                image_token=config["image_token_id"],
                video_token=config["video_token_id"],
                vision_start_token=config["vision_start_token_id"],
                vision_end_token=config["vision_end_token_id"],
            )
        except (KeyError, TypeError) as error:
            raise CheckpointError(
                f"config.json of the text encoder lacks or garbles {error}; download it again"
            ) from error

    def to_transformers(self, version: tuple[int, ...]):
        """The ``Qwen3VLConfig`` of transformers ``version`` for this encoder; only ``layers`` layers are asked for."""
        from transformers import Qwen3VLConfig

        rope = {"rope_type": "default", "mrope_interleaved": True, "mrope_section": list(self.rope_sections)}
        if version >= (5,):
            rotary = {"rope_parameters": {**rope, "rope_theta": self.rope_theta}}
        else:
            rotary = {"rope_scaling": rope, "rope_theta": self.rope_theta}
        return Qwen3VLConfig(
            text_config={
                "vocab_size": self.vocab,
                "hidden_size": self.hidden,
                "intermediate_size": self.ffn,
                "num_hidden_layers": self.layers,
                "num_attention_heads": self.heads,
                "num_key_value_heads": self.kv_heads,
                "head_dim": self.head_dim,
                "rms_norm_eps": self.norm_eps,
                **rotary,
            },
            vision_config={
                "depth": self.vision_depth,
                "hidden_size": self.vision_hidden,
                "intermediate_size": self.vision_ffn,
                "num_heads": self.vision_heads,
                "patch_size": PATCH,
                "temporal_patch_size": FRAMES_PER_PATCH,
                "spatial_merge_size": MERGE,
                "out_hidden_size": self.hidden,
                "num_position_embeddings": self.vision_positions,
                "deepstack_visual_indexes": list(self.deepstack),
            },
            image_token_id=self.image_token,
            video_token_id=self.video_token,
            vision_start_token_id=self.vision_start_token,
            vision_end_token_id=self.vision_end_token,
        )


def pick_layers(available: int, asked: int | None) -> int:
    """How many of a stack of ``available`` layers make the condition. Raises ``CheckpointError`` when too few."""
    wanted = CONDITION_LAYER if asked is None else asked
    if not 1 <= wanted <= available:
        raise CheckpointError(
            f"the text encoder has {available} layers and the condition is the state after layer {wanted}; "
            "H3 needs Qwen3-VL-32B with its first 50 layers"
        )
    return wanted


def _check_unchangeable(text: Mapping[str, Any], vision: Mapping[str, Any]) -> None:
    fixed = (
        ("attention_bias", text.get("attention_bias", False), False),
        ("hidden_act", text.get("hidden_act", "silu"), "silu"),
        ("vision hidden_act", vision.get("hidden_act", "gelu_pytorch_tanh"), "gelu_pytorch_tanh"),
        ("patch_size", vision.get("patch_size", PATCH), PATCH),
        ("temporal_patch_size", vision.get("temporal_patch_size", FRAMES_PER_PATCH), FRAMES_PER_PATCH),
        ("spatial_merge_size", vision.get("spatial_merge_size", MERGE), MERGE),
        ("out_hidden_size", vision.get("out_hidden_size"), text["hidden_size"]),
    )
    for name, found, needed in fixed:
        if found != needed:
            raise CheckpointError(f"config.json has {name} = {found!r} where H3's text encoder has {needed!r}")
