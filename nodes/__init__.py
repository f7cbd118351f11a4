"""The nodes of this package: thin, one class each, and the only code that may touch the host.

Widgets in, one call of the runtime, outputs and a report out. A new node is one class and its name in a NODES list.
"""


def node_classes() -> list:
    """All node classes, in the order of the menu."""
    from . import accelerate, compare, condition, latent, load, mask, media, plan, references, remote, render, save

    modules = (load, condition, references, latent, mask, plan, accelerate, render, save, remote, compare, media)
    return [node for module in modules for node in module.NODES]
