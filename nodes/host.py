"""ComfyUI's services, each behind one function of ours: the only module here that knows how the host is built.

    files      folder_files, find_file, missing_file, saved_files, output_file      folder_paths
    telling    Teller: bar, text with time left, preview; report                    comfy.utils, server, latent_preview
    stopping   poll                                                                 comfy.model_management
    memory     compute_device, make_room, keep_evictable                            comfy.model_management
    metadata   workflow_tags                                                        comfy.cli_args

Where a service is missing or has changed, the render goes on without it and one sentence says so in the log.
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
import os
import re
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import comfy.model_management as management
import folder_paths
import torch

from .widgets import refuse_wrong_numbers

log = logging.getLogger("h3_runtime")

DOWNLOAD_PAGE = "https://huggingface.co/Comfy-Org/MiniMax-H3"
OFFICIAL_PAGE = "https://huggingface.co/MiniMaxAI/MiniMax-H3"
TELL_EVERY = 1.0  # seconds between two texts on a node
NUMBERED = 5
LONGEST_NAME = 180  # bytes of a part of a path that is asked for: a number and an ending are added
_NO_TAGS = str.maketrans("<>", "\u2039\u203a")


def runtime_mode(execute: Callable) -> Callable:
    """Runs ``execute`` with gradients off but outside inference mode, which the host puts around every node: weights
    and slots made inside it could not be written to by the threads that stream them. Numbers outside the limits of
    their widgets are refused first: the host does not look at those that come over a wire. A refusal stands on its node
    too: the page itself shows its sentence only after two clicks."""

    @functools.wraps(execute)
    def wrapped(*args, **options):
        from ..h3_runtime import H3Error

        try:
            if hasattr(args[0], "define_schema"):  # a node, no stand-in for a model
                refuse_wrong_numbers(args[0], options)
            with torch.inference_mode(False), torch.no_grad():
                return execute(*args, **options)
        except H3Error as error:
            show_text(args[0], str(error))
            raise

    return wrapped


# --- files -----------------------------------------------------------------------------------------------------------


def folder_files(kind: str, *more: str) -> list[str]:
    """Names in the host's folders of these kinds (extra paths included), GGUF files too; [] where one is missing."""
    names: list[str] = []
    for folder in (kind, *more):
        try:
            names += folder_paths.get_filename_list(folder)
            for root in folder_paths.get_folder_paths(folder):
                names += _gguf_below(Path(root))
        except Exception as error:  # a list of files must never take the node list down
            log.warning("H3 Runtime: the folder %s cannot be listed (%s)", folder, error)
    return list(dict.fromkeys(names))


def _gguf_below(root: Path) -> list[str]:
    """GGUF files below ``root``, through linked folders as the host lists its own, each folder once."""
    found, seen = [], set()
    for folder, inside, files in os.walk(root, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:  # a link to a folder above it
            inside.clear()
            continue
        seen.add(real)
        found += [(Path(folder) / name).relative_to(root).as_posix() for name in files if name.endswith(".gguf")]
    return sorted(found)


def find_file(kind: str, name: str, *more: str) -> Path | None:
    """The file that ``name`` stands for in the host's folders of these kinds."""
    for folder in (kind, *more):
        try:
            found = folder_paths.get_full_path(folder, name)
        except Exception:
            found = None
        if found:
            return Path(found)
    return None


def missing_file(kind: str, name: str) -> str:
    """One sentence: which file, which folder, which page."""
    try:
        folders = ", ".join(folder_paths.get_folder_paths(kind)[:2])
    except Exception:
        folders = f"models/{kind}"
    return f"{name} is not in {folders}: download it from {DOWNLOAD_PAGE}, put it there and press R, or choose another"


def embedding_folders() -> list[str]:
    try:
        return list(folder_paths.get_folder_paths("embeddings"))
    except Exception:
        return []


def vocabulary_folder() -> Path:
    """Where the host keeps Qwen's vocabulary."""
    return Path(inspect.getfile(management)).parent / "text_encoders" / "qwen25_tokenizer"


def converted_folder() -> Path:
    """Where converted weights are kept: a folder that extra_model_paths.yaml names ``h3_converted``, else
    models/h3_converted. It need not exist."""
    try:
        return Path(folder_paths.get_folder_paths("h3_converted")[0])
    except Exception:  # the host knows no such kind
        return Path(folder_paths.models_dir) / "h3_converted"


def temp_folder() -> Path:
    return Path(folder_paths.get_temp_directory())


def saved_files(suffix: str) -> list[str]:
    """Files with this ending in the input folder, and in the output folder with the host's mark `` [output]``."""
    found = []
    for folder, mark in ((folder_paths.get_input_directory(), ""), (folder_paths.get_output_directory(), " [output]")):
        for root, _, names in os.walk(folder):
            inside = os.path.relpath(root, folder)
            found += [
                os.path.normpath(os.path.join(inside, name)).replace(os.sep, "/") + mark
                for name in names
                if name.endswith(suffix)
            ]
    return sorted(found)


def saved_file(name: str) -> Path | None:
    """The file that a name of ``saved_files`` stands for; None when it is gone. It never leaves the host's folders."""
    try:
        path = Path(folder_paths.get_annotated_filepath(name))
        return path if path.is_file() else None
    except (ValueError, TypeError, AttributeError, OSError):  # it leads out of the folder, or is no name at all
        return None


def output_file(prefix: str, suffix: str, width: int = 0, height: int = 0) -> tuple[Path, dict[str, str]]:
    """(a free numbered path in the output folder, what the page needs to show it). H3Error for a prefix that is no name
    there, and for a folder that cannot be made."""
    from ..h3_runtime import H3Error

    output, shown = folder_paths.get_output_directory(), f"filename_prefix is {prefix[:80]!r}"
    if any(ord(letter) < 32 for letter in prefix):
        raise H3Error(f"{shown}: it holds a control character; give a name below the output folder without one")
    if any(len(os.fsencode(part)) > LONGEST_NAME for part in re.split(r"[/\\]", prefix)):
        raise H3Error(f"{shown}... : a part of it is longer than {LONGEST_NAME} bytes; give a shorter name")
    try:
        folder, name, counter, subfolder, _ = folder_paths.get_save_image_path(prefix, output, width, height)
        Path(folder).mkdir(parents=True, exist_ok=True)
    except Exception as error:  # the host raises a plain one for a folder outside
        outside = not Path(os.path.abspath(os.path.join(output, os.path.dirname(prefix)))).is_relative_to(
            os.path.abspath(output)
        )
        why = f"it leads out of the output folder {output}" if outside else f"its folder cannot be used ({error})"
        raise H3Error(f"{shown}: {why}; give a name below the output folder, which has to be writable") from error
    path = Path(folder) / f"{name}_{counter:0{NUMBERED}}_{suffix}"
    return path, {"filename": path.name, "subfolder": subfolder, "type": "output"}


def saved_name(shown: dict[str, str]) -> str:
    """The entry of ``saved_files`` for what ``output_file`` gave."""
    return f"{'/'.join(filter(None, (shown['subfolder'].replace(os.sep, '/'), shown['filename'])))} [output]"


def stamp(path: Path | None) -> str:
    """What changes when a file is replaced: for the host's cache."""
    if path is None or not path.exists():
        return "missing"
    files = [path] if path.is_file() else sorted(path.iterdir())
    return " ".join(f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files)


# --- metadata --------------------------------------------------------------------------------------------------------


def metadata_allowed() -> bool:
    """Whether files may carry the workflow and the manifest (the host's --disable-metadata)."""
    try:
        from comfy.cli_args import args

        return not args.disable_metadata
    except (ImportError, AttributeError):
        return True


def workflow_tags(hidden) -> dict[str, str]:
    """The prompt and the workflow as the host's own files carry them: dropping one on the canvas restores it."""
    if hidden is None or not metadata_allowed():
        return {}
    tags = {key: json.dumps(value) for key, value in (hidden.extra_pnginfo or {}).items()}
    if hidden.prompt is not None:
        tags["prompt"] = json.dumps(hidden.prompt)
    return tags


# --- stopping and telling --------------------------------------------------------------------------------------------


def poll() -> None:
    """Raise the host's own interrupt when Cancel was pressed. Nothing of ours catches it."""
    management.throw_exception_if_processing_interrupted()


def node_id(node) -> str | None:
    hidden = getattr(node, "hidden", None)
    return None if hidden is None else hidden.unique_id


def show_text(node, text: str) -> None:
    """A line of text on the node, where the host has a page that shows it."""
    identity = node_id(node)
    if identity is None:
        return
    try:
        from server import PromptServer

        # The page takes this text for HTML and drops <Picture 1>: brackets that look alike are left as they are.
        PromptServer.instance.send_progress_text(text.translate(_NO_TAGS), identity)
    except Exception as error:
        _once("text on nodes", error)


class Teller:
    """Tells one node's progress: the host's bar, a text with the time left, and previews.

    ``steps(done, total)`` moves the bar; ``tick(done, total, what)`` is called often and changes the text only.
    """

    def __init__(self, node, total: int, what: str):
        self.node, self.what, self.total = node, what, max(1, total)
        self.began = self.told = time.perf_counter()
        self.first: int | None = None
        self.bar = None
        try:
            from comfy.utils import ProgressBar

            self.bar = ProgressBar(self.total, node_id=node_id(node))
        except Exception as error:
            _once("the progress bar", error)

    def steps(self, done: int, total: int, preview=None, words: str = "") -> None:
        """``done`` of ``total`` parts of the work are behind us; ``preview`` as the host's bar takes it; ``words`` in
        place of the count."""
        if self.bar is not None:
            self.bar.update_absolute(done, total, preview)
        self.tick(done, total, words, force=True)

    def tick(self, done: float, total: float, words: str = "", force: bool = False) -> None:
        now = time.perf_counter()
        if self.first is None:
            self.first, self.began = done, now
        if not force and now - self.told < TELL_EVERY:
            return
        self.told = now
        show_text(self.node, f"{self.what}: {words or f'{done:g} of {total:g}'}{self._left(done, total, now)}")

    def _left(self, done: float, total: float, now: float) -> str:
        walked = done - (self.first or 0)
        if walked <= 0 or done >= total:
            return ""
        return f", {clock((now - self.began) / walked * (total - done))} left"


def clock(seconds: float) -> str:
    """Seconds in words: 4.2 s, 42 s, 3 min 05 s, 1 h 12 min."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02} s"
    return f"{seconds // 3600} h {seconds % 3600 // 60:02} min"


class Preview:
    """Pictures of a latent by the host's own means: the method chosen there, its tiny decoder or its colour factors.

    Whatever goes wrong costs the preview and nothing else.
    """

    def __init__(self):
        self.previewer, self.tried_plain = None, False
        try:
            import latent_preview
            from comfy import latent_formats

            self.format = latent_formats.MiniMaxH3Video()
            self.previewer = latent_preview.get_previewer(management.get_torch_device(), self.format)
        except Exception as error:
            self._plain(error)

    def picture(self, denoised: Callable[[], torch.Tensor]):
        """What the host's bar shows of ``denoised()`` [1, 24, T, h, w]: its middle frame; None without previews."""
        if self.previewer is None:
            return None
        try:
            latent = denoised()
            middle = latent.shape[2] // 2
            return self.previewer.decode_latent_to_preview_image("JPEG", latent[:, :, middle : middle + 1])
        except Exception as error:
            self._plain(error)
            return None

    def _plain(self, error: Exception) -> None:
        """The colour factors in place of a decoder that fails; without them no preview."""
        _once("previews", error)
        self.previewer = None
        if self.tried_plain:
            return
        self.tried_plain = True
        try:
            import latent_preview
            from comfy.cli_args import LatentPreviewMethod, args

            if args.preview_method != LatentPreviewMethod.NoPreviews:
                made = self.format
                self.previewer = latent_preview.Latent2RGBPreviewer(
                    made.latent_rgb_factors, made.latent_rgb_factors_bias
                )
        except Exception as second:
            _once("previews by colour factors", second)


@functools.cache
def _said(service: str) -> None:
    return None


def _once(service: str, error: Exception) -> None:
    """Log once that this host lacks a service."""
    before = _said.cache_info().misses
    _said(service)
    if _said.cache_info().misses > before:
        log.warning("H3 Runtime goes on without %s: this ComfyUI does not offer it as expected (%s)", service, error)


def is_running() -> bool:
    """Whether the host runs a graph now."""
    try:
        from server import PromptServer

        return bool(PromptServer.instance.prompt_queue.currently_running)
    except Exception as error:
        _once("whether a graph runs", error)
        return False


# --- memory ----------------------------------------------------------------------------------------------------------


def follow_flags() -> None:
    """The host's own flags hold for us too: memory that must not be page-locked, VRAM that is left to others. What the
    user set for the runtime itself goes first."""
    try:
        from comfy.cli_args import args

        if getattr(args, "disable_pinned_memory", False) or getattr(args, "disable_async_offload", False):
            os.environ.setdefault("H3_NO_PIN", "1")
        if getattr(args, "reserve_vram", None):
            os.environ.setdefault("H3_RESERVE_VRAM", str(args.reserve_vram))
    except Exception as error:
        _once("its flags", error)


def compute_device() -> torch.device:
    """The device the host computes on (--cpu included)."""
    return torch.device(management.get_torch_device())


def freed_for(device: torch.device) -> tuple[int, int]:
    """Bytes of (card, host memory) that are taken now and will be free for a render: what torch holds on the card, and
    our own weights in the host's memory."""
    card = torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
    held = 0
    try:
        for loaded in management.current_loaded_models:
            part = getattr(loaded.model, "part", None)
            if part is not None and part.loaded and part.in_host_memory:
                held += part.info.nbytes
    except Exception as error:
        _once("what its models hold", error)
    return card, held


def make_room(nbytes: int, device: torch.device) -> None:
    """Ask the host to let other models go until ``nbytes`` are free on ``device``."""
    if device.type == "cpu":
        return
    try:
        management.free_memory(nbytes, device)
    except Exception as error:
        _once("freeing other models' memory", error)


class _Weights:
    """What the host believes to be a model: a name in its log, and something that lives as long as our part."""


def keep_evictable(part) -> None:
    """Tell the host that ``part`` (``kind``, ``loaded``, ``release()``, ``info.nbytes``) is loaded and may be let go
    when another model needs the room."""
    try:
        root = part.root
        if root.evictable is None:
            root.evictable = _evictable_class()(root)
        management.load_models_gpu([root.evictable])
    except Exception as error:
        _once("eviction of its models by others", error)


@functools.cache
def _evictable_class():
    from comfy.model_patcher import ModelPatcher

    class EvictablePart(ModelPatcher):
        """Stands for a part of ours in the host's list of loaded models. It moves nothing: asked for room, it lets
        all of the part go, and the next use reads it again."""

        def __init__(self, part):
            self._part = weakref.ref(part)
            weights = type(f"H3Runtime_{part.kind}", (_Weights,), {})()
            super().__init__(
                weights, load_device=part.device, offload_device=torch.device("cpu"), size=part.info.nbytes
            )

        @property
        def part(self):
            return self._part()

        def model_size(self):
            part = self._part()
            return self.size if part is None or part.info is None else part.info.nbytes

        def loaded_size(self):
            part = self._part()
            return self.model_size() if part is not None and part.loaded else 0

        def current_loaded_device(self):
            return self.load_device

        def model_dtype(self):
            return None

        def model_patches_to(self, device):
            pass

        def partially_load(self, *args, **options):
            return 0

        def partially_unload(self, *args, **options):
            return 0  # nothing by halves: the host then detaches the whole

        def detach(self, unpatch_all=True):
            part = self._part()
            if part is not None and unpatch_all:  # False: the host only moves its own note of us up its list
                part.release()
            return self.model

        def is_clone(self, other):
            return other is self

    return EvictablePart
