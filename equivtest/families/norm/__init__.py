"""Family of cases that run LayerNorm or RMSNorm under SequenceParallel."""

SUBJECTS = {
    "sequence_layer_norm": "equivtest.families.norm.subject:sequence_layer_norm",
    "sequence_rms_norm": "equivtest.families.norm.subject:sequence_rms_norm",
}
