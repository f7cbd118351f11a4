"""The sampler, and the decoders.

H3_MODEL + CONDITIONING + LATENT ─▶ H3 Sampler ─▶ LATENT ─▶ H3 Decode Video ─▶ IMAGE
                                                         └▶ H3 Decode Sound ─▶ AUDIO
"""

from __future__ import annotations

from . import host
from .av_latent import give_latent, take_latent
from .jobs import Settings, make_job
from .load import host_model_refused, require_model
from .media import give_audio, take_sound
from .sockets import CATEGORY, LOADER, H3Acceleration, H3Model, Node, io, samples_of, wrong_type
from .stand_ins import TILE, PictureAsVae, SoundAsVae, load_part, only_dit, part_of

FOLDER = f"{CATEGORY}/render"


def shift_inputs() -> list:
    """Widgets of both streams' shifts."""
    return [
        io.Float.Input(
            "video_shift",
            optional=True,
            default=12.0,
            min=0.01,
            max=100.0,
            step=0.01,
            tooltip="Shift of the picture's schedule; 12 is what the model was trained with.",
        ),
        io.Float.Input(
            "audio_shift",
            optional=True,
            default=3.0,
            min=0.01,
            max=100.0,
            step=0.01,
            tooltip="Shift of the sound's schedule; 3 is what the model was trained with.",
        ),
    ]


def schedule_inputs() -> list:
    """The sampler's widgets about steps."""
    return [
        io.Int.Input(
            "steps",
            optional=True,
            default=49,
            min=1,
            max=1000,
            tooltip="Calls of the model. 49 is the release's schedule; few-step LoRAs say theirs.",
        ),
        io.Float.Input(
            "denoise",
            optional=True,
            default=1.0,
            min=0.01,
            max=1.0,
            step=0.01,
            tooltip="1 starts from pure noise. Less starts from the clip in the latent and changes it less.",
        ),
        io.Int.Input(
            "start_step",
            optional=True,
            default=0,
            min=0,
            max=1000,
            tooltip="The step to begin with: 0, or where a saved state stopped.",
        ),
        io.Int.Input(
            "stop_step",
            optional=True,
            default=0,
            min=0,
            max=1000,
            tooltip="The step to stop before, to save the state and go on later; 0: to the end.",
        ),
        *shift_inputs(),
    ]


class Sampler(Node):
    """Render."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="H3RuntimeSampler",
            display_name="H3 Sampler",
            category=FOLDER,
            description="Renders picture and sound together. The defaults are the release's own: 49 steps, "
            "shifts 12 and 3, "
            "and no guidance scale, because the model was trained without one. A run that was stopped by a "
            "crash goes on "
            "where it stood when the same job is queued again.",
            search_aliases=["minimax h3 sampler", "ksampler"],
            inputs=[
                H3Model.Input("model", tooltip=f"The model of {LOADER}. ComfyUI's own MODEL does not fit here."),
                io.Conditioning.Input("positive", tooltip="The prompt with its frames, guides or references."),
                io.Latent.Input(
                    "latent",
                    tooltip="H3 Empty Latent, an encoded clip with its masks, or any empty latent: that one is "
                    "replaced by "
                    "an H3 latent of its pixel size.",
                ),
                io.Int.Input(
                    "seed",
                    optional=True,
                    default=0,
                    min=0,
                    max=0xFFFFFFFFFFFFFFFF,
                    control_after_generate=True,
                    tooltip="Chooses the noise: the same seed gives the same clip.",
                ),
                *schedule_inputs(),
                io.Int.Input(
                    "frames",
                    optional=True,
                    default=124,
                    min=5,
                    max=3600,
                    tooltip="Length for an empty latent of a picture model, which has none; otherwise not used.",
                ),
                io.Boolean.Input(
                    "resume",
                    optional=True,
                    default=True,
                    tooltip="Keep the state of every step on disk, and go on from it when the same job is "
                    "queued again.",
                ),
                H3Acceleration.Input(
                    "acceleration",
                    optional=True,
                    tooltip="From H3 Accelerate. Without it the sampler runs the baseline.",
                ),
            ],
            outputs=[
                io.Latent.Output(display_name="latent"),
                io.String.Output(
                    "report", display_name="report", tooltip="Label, notes and times of the run, as text."
                ),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(cls, input_types):
        wanted = {"model": "H3_MODEL", "positive": "CONDITIONING", "latent": "LATENT"}
        wanted["acceleration"] = "H3_ACCELERATION"
        return wrong_type(input_types, wanted, {"model": host_model_refused()})

    @classmethod
    @host.runtime_mode
    def execute(cls, model, positive, latent, **options):
        from ..h3_runtime import RecoveryFolder, Watcher, run_job

        require_model(model)
        settings = Settings(
            seed=options.get("seed", 0),
            steps=options.get("steps", 49),
            denoise=options.get("denoise", 1.0),
            start=options.get("start_step", 0),
            stop=options.get("stop_step", 0),
            video_shift=options.get("video_shift", 12.0),
            audio_shift=options.get("audio_shift", 3.0),
            frames=options.get("frames", 124),
            acceleration=options.get("acceleration"),
        )
        made = make_job(positive, latent, settings, model)
        model.check(made.job)
        host.show_text(cls, "loading the model")
        planned = place_model(model, made.job)
        dit = load_part(model, made.job.task)
        watcher = RunWatcher(cls, made.job.schedule.num_forwards, dit.config.layers)
        result = run_job(
            model,
            made.job,
            made.request,
            made.origin,
            Watcher(watcher.progress, watcher.poll, watcher.watch),
            RecoveryFolder() if options.get("resume", True) else None,
        )
        carried = made.latent.carried
        given = give_latent(
            result.latent,
            result=result,
            finished=result.finished,
            stop=made.job.schedule.stop,
            source=None if result.finished else made.job.source,
            overlap=None if carried is None else carried.overlap,
        )
        notes = [*planned, *result.notes, times(result)]
        report = "\n".join([result.fidelity.title, *notes])
        return cls.report(notes, given, report, label=result.fidelity)


def place_model(model, job) -> list[str]:
    """Have the plan place the DiT, after the host's other models have left the card; sentences about it."""
    from ..h3_runtime import settle_placement

    only_dit(model)
    if not model.loaded:
        host.make_room(model.size, model.device)
    return settle_placement(model, job)


class RunWatcher:
    """What the host sees of a run: steps on the bar with a preview, the time left, and its Cancel within a block."""

    def __init__(self, node, forwards: int, blocks: int):
        self.forwards, self.blocks = forwards, max(1, blocks)
        self.done = self.block = 0
        self.teller = host.Teller(node, self.forwards, "sampling")
        self.preview = host.Preview()

    def poll(self) -> None:
        host.poll()
        at = self.done + self.block / self.blocks
        self.block = min(self.block + 1, self.blocks)
        words = f"step {self.done + 1} of {self.forwards}, block {self.block} of {self.blocks}"
        self.teller.tick(at, self.forwards, words)

    def progress(self, done: int, total: int, seconds: float) -> None:
        self.done, self.block = done, 0

    def watch(self, denoised) -> None:
        self.teller.steps(self.done, self.forwards, self.preview.picture(denoised))


def times(result) -> str:
    """One sentence about how long a run took."""
    steps, total = result.step_seconds, result.seconds["denoise"]
    if not steps:
        return "nothing had to be computed"
    each = sum(steps) / len(steps)
    return f"{len(steps)} steps in {host.clock(total)} ({each:.2f} s each), {result.stats['rows']} rows"


# --- decoding --------------------------------------------------------------------------------------------------------


def taken_for_decoding(latent: dict):
    """(TakenLatent with a clip, sentences about it, whether it is sound). H3Error for an empty one."""
    from ..h3_runtime import WARNING, H3Error, judge_latent

    samples_of(latent)  # refuses what is no latent
    taken = take_latent({**latent, "noise_mask": None})
    if taken.clip is None:
        raise H3Error("the latent is empty (all zeros): it was never rendered; connect the sampler's")
    wrong = judge_latent(taken.clip)
    if taken.carried is not None and not taken.carried.finished:
        wrong.append(f"the run was stopped after step {taken.carried.stop}: what is decoded is still noisy")
    notes = [f"{WARNING}{sentence}" for sentence in wrong] + list(taken.notes)
    return taken, notes, not wrong


def original_input():
    return io.Audio.Input(
        "original",
        optional=True,
        tooltip="The sound that was encoded: where a mask kept it, its own samples stand in place of a decoded copy.",
    )


def with_original(wave, original, taken, notes: list[str]):
    """The sound [2, L] with the samples of the AUDIO ``original`` where the render's mask kept them."""
    from ..h3_runtime import put_back

    if original is None:
        return wave
    result = None if taken.carried is None else taken.carried.result
    masks = None if result is None else result.job.masks
    note = None
    if masks is not None and masks.audio is not None:
        wave, note = put_back(wave, take_sound(original, "original", notes), masks.audio == 0)
    notes.append(note or "the original sound has no effect: the latent is of no render that kept any of it")
    return wave


def judged(frames) -> list[str]:
    """Warnings about frames [F, H, W, 3] that another program's VAE decoded: ours are judged while they are decoded."""
    from ..h3_runtime import WARNING, FrameLevels

    levels = FrameLevels()
    levels.add(frames.movedim(-1, 0)[None])
    return [f"{WARNING}{sentence}" for sentence in levels.judge()]


def looks_sound(notes: list[str]) -> bool:
    """Whether nothing in ``notes`` warns of a clip that cannot be one."""
    from ..h3_runtime import WARNING

    return not any(note.startswith(WARNING) for note in notes)


def tile_batch_input():
    return io.Int.Input(
        "tile_batch",
        optional=True,
        default=1,
        min=1,
        max=64,
        tooltip="Tiles of the picture that are decoded at once: more is faster on a large card and takes more of it; "
        "above 1 sums may come in another order (EXACT MATH).",
    )


def settled_batch(tile_batch: int, part, notes: list[str]) -> int:
    """The tiles that are decoded at once; 1 by another program's VAE, with a sentence."""
    if tile_batch > 1 and not isinstance(part, PictureAsVae):
        notes.append(f"tile_batch {tile_batch} has no effect: the VAE is ComfyUI's own")
        return 1
    return tile_batch


def tile_paths(tile: int) -> tuple[str, ...]:
    """What a decode in tiles of ``tile`` pixels adds to a label."""
    return () if tile == TILE else ("video-vae/other-tile",)


def decoded_by(images) -> tuple[list, int, int]:
    """([the video VAE's part], tiles at once, tile) of frames that come straight from H3 Decode Video; ([], 1, 256) of
    any others."""
    return getattr(images, "h3_decoded", ([], 1, TILE))


def label_of(taken, parts, tile_batch: int = 1, paths=()):
    """The Fidelity of the render that a latent carries, with the VAEs that decode it and the ``paths`` of how they do;
    None when it carries none."""
    from ..h3_runtime import with_parts

    if taken.carried is None:
        return None
    if taken.carried.result is not None:
        return with_parts(taken.carried.result, parts, tile_batch, paths).fidelity
    return taken.carried.fidelity


class DecodeVideo(Node):
    """Latent to frames."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="H3RuntimeDecodeVideo",
            display_name="H3 Decode Video",
            category=FOLDER,
            description="Decodes the picture of a latent to frames, chunk by chunk in the reference's 256 px "
            "tiles. All "
            "frames are held in memory; H3 Decode and Save Video does without.",
            search_aliases=["minimax h3 vae decode"],
            inputs=[
                io.Latent.Input("latent", tooltip="The sampler's latent."),
                io.Vae.Input("video_vae", tooltip="The video VAE."),
                io.Int.Input(
                    "tile",
                    optional=True,
                    default=TILE,
                    min=128,
                    max=4096,
                    step=16,
                    tooltip="Edge of a tile in pixels. 256 is what the decoder was trained on, and the reference; "
                    "any other is labelled APPROXIMATE.",
                ),
                tile_batch_input(),
            ],
            outputs=[
                io.Image.Output("images", display_name="images"),
                io.String.Output("report", display_name="report", tooltip="Label and notes, as text."),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    @host.runtime_mode
    def execute(cls, latent, video_vae, tile=TILE, tile_batch=1):
        taken, notes, _ = taken_for_decoding(latent)
        part = part_of(video_vae, "video_vae")
        batch = settled_batch(tile_batch, part, notes)
        if isinstance(part, PictureAsVae):
            teller = host.Teller(cls, 1, "decoding the picture")
            frames = part.frames(taken.clip.video, teller.steps, notes, batch, tile)
            if tile != TILE:
                notes.append(f"tiles of {tile} px: APPROXIMATE, the decoder was trained on tiles of {TILE} px")
        else:
            frames = video_vae.decode(taken.clip.video)[0]
            notes += judged(frames)
            if tile != TILE:
                notes.append(f"tile {tile} is not used: this VAE is another program's and cuts by its own rule")
                tile = TILE
        frames.h3_decoded = ([part], batch, tile)
        sound = looks_sound(notes)
        label = label_of(taken, [part], batch, tile_paths(tile))
        report = "\n".join(([label.title] if label else []) + notes)
        return cls.report(notes, frames, report, label=label, sound=sound)


class DecodeSound(Node):
    """Latent to sound."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="H3RuntimeDecodeSound",
            display_name="H3 Decode Sound",
            category=FOLDER,
            description="Decodes the sound of a latent, cut to the picture's length: frames / 24 seconds at 32 kHz.",
            search_aliases=["vae decode audio"],
            inputs=[
                io.Latent.Input("latent", tooltip="The sampler's latent."),
                io.Vae.Input("audio_vae", tooltip="The audio VAE."),
                original_input(),
            ],
            outputs=[io.Audio.Output("audio", display_name="audio")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    @host.runtime_mode
    def execute(cls, latent, audio_vae, original=None):
        from ..h3_runtime import decode_audio, fit_audio

        taken, notes, sound = taken_for_decoding(latent)
        part = part_of(audio_vae, "audio_vae")
        if isinstance(part, SoundAsVae):
            wave, note = decode_audio(part.load(), taken.clip, taken.canvas)
        else:
            decoded = audio_vae.decode(taken.clip.audio).movedim(-1, 1)[0].float().cpu()
            wave, note = fit_audio(decoded, taken.canvas.audio_samples)
        notes += [note] if note else []
        wave = with_original(wave, original, taken, notes)
        return cls.report(notes, give_audio(wave), label=label_of(taken, [part]), sound=sound)


NODES = [Sampler, DecodeVideo, DecodeSound]
