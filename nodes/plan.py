"""The memory plan: what a render takes, on this machine or another, before anything is loaded.

H3_MODEL + LATENT (+ CONDITIONING, VAEs) ─▶ H3 Memory Plan ─▶ the plan as text, and for the page as rows
"""

from __future__ import annotations

from . import host
from .av_latent import take_latent
from .jobs import Settings, make_job
from .load import CARRIED, carried_folder, host_model_refused, open_part, require_model
from .render import FOLDER
from .sockets import LOADER, H3Acceleration, H3Model, Node, io, wrong_type
from .stand_ins import is_ours


class MemoryPlan(Node):
    """What a render takes."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="H3RuntimeMemoryPlan",
            display_name="H3 Memory Plan",
            category=FOLDER,
            description="Says before a render what stays on the card, what is streamed from RAM or disk, how much each "
            "stage takes and how long it lasts; for this machine, or for a card that you think of buying.",
            search_aliases=["vram", "memory", "estimate", "oom"],
            inputs=[
                H3Model.Input("model", tooltip=f"The model of {LOADER}."),
                io.Latent.Input("latent", tooltip="The latent that will be rendered: its size and length count."),
                io.Conditioning.Input(
                    "positive",
                    optional=True,
                    tooltip="The prompt with its guides or references; without it a prompt of 512 rows is assumed.",
                ),
                io.Vae.Input("video_vae", optional=True, tooltip="The video VAE; the release's is assumed without it."),
                io.Vae.Input("audio_vae", optional=True, tooltip="The audio VAE; the release's is assumed without it."),
                io.Int.Input("steps", optional=True, default=49, min=1, max=1000, tooltip="Calls of the model."),
                io.Float.Input(
                    "vram_gib",
                    optional=True,
                    default=0.0,
                    min=0.0,
                    max=1024.0,
                    step=0.5,
                    tooltip="Plan for a card with this much memory; 0: this machine's.",
                ),
                io.Float.Input(
                    "ram_gib",
                    optional=True,
                    default=0.0,
                    min=0.0,
                    max=4096.0,
                    step=1.0,
                    tooltip="Plan for this much main memory; 0: this machine's.",
                ),
                H3Acceleration.Input(
                    "acceleration", optional=True, tooltip="From H3 Accelerate: what it holds is counted."
                ),
            ],
            outputs=[io.String.Output("plan", display_name="plan", tooltip="The plan as text.")],
            hidden=[io.Hidden.unique_id],
            is_output_node=True,
        )

    @classmethod
    def validate_inputs(cls, input_types):
        wanted = {"model": "H3_MODEL", "latent": "LATENT", "positive": "CONDITIONING"}
        wanted |= {"video_vae": "VAE", "audio_vae": "VAE", "acceleration": "H3_ACCELERATION"}
        return wrong_type(input_types, wanted, {"model": host_model_refused()})

    @classmethod
    @host.runtime_mode
    def execute(cls, model, latent, positive=None, **options):
        from ..h3_runtime import RenderSizes, plan_lines, plan_results, plan_sizes, weights_of_parts

        require_model(model)
        steps = options.get("steps", 49)
        if positive is None:
            sizes = RenderSizes(take_latent(latent).canvas, num_forwards=steps)
        else:
            sizes = RenderSizes.of_job(make_job(positive, latent, Settings(steps=steps), model).job)
        vaes = [options.get(name) for name in ("video_vae", "audio_vae")]
        others = beside_carried(model) + [vae.part for vae in vaes if is_ours(vae)]
        gib, asked = (options.get("vram_gib", 0.0), options.get("ram_gib", 0.0)), options.get("acceleration")
        weights = weights_of_parts(model, others)
        made = plan_sizes(model, sizes, weights, *gib, accelerators=[] if asked is None else asked.built())
        lines = plan_lines(made)
        ui = {"h3_plan": plan_results(made), "text": ["\n".join(lines)]}
        return cls.report(lines, "\n".join(lines), ui=ui, sound=made.fits)


def beside_carried(model) -> list:
    """The other parts of the small carried model, where it is the model; [] for any other, whose parts are unknown."""
    if model.path.parent != carried_folder():
        return []
    return [open_part(kind, CARRIED)[0] for kind in ("text_encoder", "video_vae", "audio_vae")]


NODES = [MemoryPlan]
