"""Pictures, sound and mp4, read and written. Nothing here knows of renders, latents or models.

    picture file      --read_image-->   uint8 [H, W, 3]
    picture(s), clip  --read_mask-->    float32 [F, H, W], 0..1
    clip, any rate    --read_clip-->    Clip: uint8 [F, H, W, 3] at 24 fps, sound [2, L] at 32 kHz
    sound, any rate   --read_audio-->   float32 [2, L] at 32 kHz

    frames [f, H, W, 3], chunk by chunk --Mp4Writer--> picture temp --sound, tags--> whole temp --rename--> clip.mp4

    the same frames, before encoding --KeptWriter--> clip.kept.mkv beside it, for comparing

Pictures are numpy uint8 arrays, sound and masks torch float32 tensors; either kind is taken as input.
Colour: Y'CbCr is written as BT.709 in limited range and tagged so; on reading, the file's own tags decide, and a file
without tags is taken as BT.601, as the reference and the libraries below us do.
"""

from .clips import Clip, read_clip, read_mask, stream_frames
from .files import TrackFacts, check_fps, check_output_path, count_frames, kind_of, read_metadata, track_facts
from .join import copy_tracks
from .kept import KeptWriter, Tee, describe_sound, kept_path, read_kept_tag
from .pictures import crop_then_resize, read_image, resize_cover, resize_stretch, to_uint8, write_image
from .sound import decode_sound, fit_audio, put_back, read_audio, resample_sound, sound_seconds
from .write import Encoding, Mp4Writer

__all__ = [
    "Clip",
    "Encoding",
    "KeptWriter",
    "Mp4Writer",
    "Tee",
    "TrackFacts",
    "check_fps",
    "check_output_path",
    "copy_tracks",
    "count_frames",
    "crop_then_resize",
    "decode_sound",
    "describe_sound",
    "fit_audio",
    "kept_path",
    "kind_of",
    "put_back",
    "read_audio",
    "read_clip",
    "read_image",
    "read_kept_tag",
    "read_mask",
    "read_metadata",
    "resample_sound",
    "resize_cover",
    "resize_stretch",
    "sound_seconds",
    "stream_frames",
    "to_uint8",
    "track_facts",
    "write_image",
]
