"""Atlas: ahead-of-time compiled kernels for one (hardware, model, quantisation) target, served by a thin runtime.

This module imports only the standard library, so `import atlas` works in a build environment,
on a machine without a GPU, a driver or a compiler, and before the extension is built.
"""

__version__ = "0.1.0"
