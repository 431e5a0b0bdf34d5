"""The project's own ZeRO-3, small enough to read at once.

Its modules, in this family and in `equivtest.families.training.zero3.subject`:

    layer       partitions one module's parameters; they are whole only between fetch and release
    gradients   reduces and scatters each gradient, then adds it to this rank's partition of it
    engine      hooks fetch and release around each layer, in forward and backward
    clipping    computes the norm of all gradients from the partitions, and clips
    subject     trains a perceptron by torch's optimizers on the partitions

Source: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models
(2020), section 5.3; deepspeed/runtime/zero/parameter_offload.py and stage3.py (0.19.8).
"""
