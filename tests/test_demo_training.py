"""The training of the carried model says what the product says: the same packed rows, labels and velocities.

Example ─collate─▶ Batch ─forward.velocity─▶ v     against     RenderJob ─▶ VelocityModel ─▶ v
"""

from __future__ import annotations

import pytest
import torch

from h3_runtime.demo.training import batches, forward
from h3_runtime.demo.training.clips import Example
from h3_runtime.demo.training.dit import CONFIG, start
from h3_runtime.geometry import Canvas
from h3_runtime.job import AVLatent, Guide, Masks, Reference, RenderJob, TextCondition
from h3_runtime.layout import PackedLayout, audio_to_rows, patchify_video
from h3_runtime.models.dit import DiT
from h3_runtime.sampler import Rows, VelocityModel
from h3_runtime.schedule import AUDIO_SHIFT, CONDITION_TIMESTEP, VIDEO_SHIFT, Schedule, shift_sigma
from h3_runtime.steps import plan_steps

SIZE = (64, 64, 22)
CANVAS = Canvas.fit(22, (64, 64))


@pytest.fixture(scope="module")
def dit() -> DiT:
    """Every weight of it matters: at the training's own start most branches are silent."""
    made = start().eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(3)
    for value in made.parameters():
        value.data += 0.05 * torch.randn(value.shape, generator=generator)
    return made


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def example(kind: str, length: int, seed: int = 0) -> Example:
    tags = torch.ones(length, dtype=torch.int64)
    tags[2:4] = 0
    video, audio = drawn(24, 7, 4, 4, seed=seed), drawn(32, 2, CANVAS.audio_t, seed=seed + 1)
    guides = ((0, drawn(24, 1, 4, 4, seed=5)), (21, drawn(24, 1, 4, 4, seed=6))) if kind == "both" else ()
    reference = drawn(24, 1, 8, 4, seed=7) if kind == "reference" else None
    return Example(kind, SIZE, "", drawn(length, 64, seed=8), tags, video, audio, guides, reference)


def by_product(dit: DiT, one: Example, batch: batches.Batch, index: int, base: float) -> Rows:
    """The product's velocity for the rows that the batch feeds."""
    guides = tuple(Guide(place, video=latent[None]) for place, latent in one.guides)
    references = () if one.reference is None else (Reference("image", video=one.reference[None]),)
    kept_v, kept_a = batch.video_counts[index] == 0, batch.audio_counts[index] == 0
    masks = None
    if bool(kept_v.any()) or bool(kept_a.any()):
        cells = (~kept_v).float().view(7, 2, 2).repeat_interleave(2, 1).repeat_interleave(2, 2)
        masks = Masks.make(cells, (~kept_a).float().view(2, -1))
    text = TextCondition(one.hidden, one.tags)
    source = AVLatent(one.video[None], one.audio[None])
    job = RenderJob(CANVAS, text, guides, references, masks, source)
    layout = PackedLayout.of(text.tags, CANVAS, guides, references)
    sigmas = [shift_sigma(torch.tensor(base), shift).item() for shift in (VIDEO_SHIFT, AUDIO_SHIFT)]
    steps = plan_steps(layout, Schedule((sigmas[0], 0.0), (sigmas[1], 0.0), 0, 1), job.masks)
    held = [batch.conditions[index][place * 4 : place * 4 + 4] for place in range(len(guides))]
    held += [batch.conditions[index]] if references else []
    conditions = [(s.start, s.stop, True, rows) for s, rows in zip(layout.conditions, held)]
    model = VelocityModel(dit, layout, steps, dit.refine_text(text.hidden), conditions)
    return model.velocity(Rows(batch.video[index], batch.audio[index]), steps.forwards[0])


@pytest.mark.parametrize(("kind", "lengths"), [("text", (9, 6)), ("both", (12, 12)), ("reference", (8, 8))])
def test_velocity_is_the_products(dit, kind, lengths):
    examples = [example(kind, length, seed=10 * n) for n, length in enumerate(lengths)]
    for seed in range(6 if kind == "text" else 1):  # some seeds draw masks
        base = torch.tensor([0.3, 0.01])
        batch = batches.collate(examples, torch.Generator().manual_seed(seed), base)
        video, audio = forward.velocity(dit, batch, torch.float32)
        for index, one in enumerate(examples):
            wanted = by_product(dit, one, batch, index, base[index].item())
            torch.testing.assert_close(video[index], wanted.video, rtol=1e-4, atol=2e-4)
            torch.testing.assert_close(audio[index], wanted.audio, rtol=1e-4, atol=2e-4)


def test_masks_are_drawn():
    seen = set()
    for seed in range(60):
        video, audio = batches.draw_masks(example("text", 5), torch.Generator().manual_seed(seed))
        seen.add((float(video.mean()) in (0.0, 1.0), float(audio.mean()) in (0.0, 1.0)))
    assert seen == {(True, True), (False, True), (False, False)}


def test_fed_rows_and_targets():
    """x = (1 - sigma) clean + sigma noise with v = clean - noise; kept rows are nearly clean and count nothing."""
    one = example("text", 5)
    clean = patchify_video(one.video[None]), audio_to_rows(one.audio[None])
    for seed in range(30):
        base = torch.tensor([0.2])
        batch = batches.collate([one], torch.Generator().manual_seed(seed), base)
        for fed, target, counts, source, shift, kept in (
            (batch.video, batch.video_target, batch.video_counts, clean[0], VIDEO_SHIFT, CONDITION_TIMESTEP),
            (batch.audio, batch.audio_target, batch.audio_counts, clean[1], AUDIO_SHIFT, 1.0),
        ):
            sigma = torch.where(counts[0] > 0, shift_sigma(base, shift), torch.tensor(1 - kept))[:, None]
            torch.testing.assert_close(fed[0], source - sigma * target[0], rtol=1e-5, atol=1e-5)


def test_start_points_at_zero():
    """Where all is noise a new DiT says v = -x."""
    made = start()
    batch = batches.collate([example("text", 6)], torch.Generator().manual_seed(0), torch.tensor([1.0]))
    video, _ = forward.velocity(made, batch, torch.float32)
    assert (video + batch.video).square().mean() < 0.05 * batch.video.square().mean()
    assert CONFIG.text_dim == 64
