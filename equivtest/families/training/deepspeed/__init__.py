"""Subjects that run DeepSpeed itself: its training of the perceptron and its fetch of parameters."""

SUBJECTS = {
    "deepspeed_fetch_all_gather": "equivtest.families.training.deepspeed.subject.fetch:deepspeed_fetch_all_gather",
    "deepspeed_fetch_all_reduce": "equivtest.families.training.deepspeed.subject.fetch:deepspeed_fetch_all_reduce",
    "deepspeed_mlp_all_gather": "equivtest.families.training.deepspeed.subject:deepspeed_mlp_all_gather",
    "deepspeed_mlp_all_reduce": "equivtest.families.training.deepspeed.subject:deepspeed_mlp_all_reduce",
    "deepspeed_mlp_stages_1_and_2": "equivtest.families.training.deepspeed.subject.stages:deepspeed_mlp_stages_1_and_2",
}
