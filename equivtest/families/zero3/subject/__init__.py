"""Our own ZeRO-3, small enough for one reading.

    layer       one module's parameters: partitioned, whole only between fetch and release
        gradients   each gradient reduced and scattered, then added to this rank's part of it
    engine      hooks: fetch before and release after each layer, forward and backward
    clipping    the norm of all gradients from those of the partitions
    training    the subjects: a perceptron trained by torch's optimizers on the partitions

Source: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models
(2020), section 5.3; deepspeed/runtime/zero/parameter_offload.py and stage3.py (0.19.8).
"""
