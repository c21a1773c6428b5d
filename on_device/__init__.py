"""The device side (MLX): user-adapter training and generation.

The BLAS library must be loaded before MLX, hence here.
"""

from on_device.blas import preload

BLAS = preload()
