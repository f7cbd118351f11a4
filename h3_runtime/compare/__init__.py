"""Comparing two clips: how far B lies from A, in picture, sound and cost, and a page that shows it.

A.mp4 ┐  sources   frames one by one, sound, labels, costs; before encoding where the frames were kept
B.mp4 ┴▶ pictures  PSNR, SSIM, MS-SSIM, flicker, sharpness, which frame of B shows which of A
         sounds    SNR, spectra, lag, clipping, silence; per channel
         verdict   every number against the thresholds that a person set
         clips     side by side, difference, both clips for the page ─▶ page, plots, spectra ─▶ report.html, report.json
"""
