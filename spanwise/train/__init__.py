"""The decoder, document loader and training loop of ``spanwise train``: an example that imports public names only.

`config` holds the options, `data` packs files into sequences, `plans` plans them or global batches, `model` is the
decoder, `loop` is the step on every rank, `start` checks the options and `inputs`, takes the `lock` and starts ranks
with `launch`. `checkpoint` (with `manifest` and `safe_read`) and `metrics` keep the results, `prove` repeats steps on
one device, and `display` shows progress.
"""
